"""A request run through Qwen3-Omni's stages, and what its trace holds: the Thinker's tokens, the Talker's frames."""

from __future__ import annotations

import torch

from omni_bus.events import RequestOptions
from tests.support.qwen3_omni import CASES
from tests.support.stage_pipeline import StagePipeline, Trace


def run(pipeline: StagePipeline, name: str, request: RequestOptions) -> Trace:
    """The case of that name, alone and to its end."""
    trace = pipeline.submit(len(pipeline.traces), *CASES[name].chat(), options=request)
    pipeline.run()
    assert trace.error is None
    return trace


def text_tokens(trace: Trace) -> list[int]:
    return [token for payload in trace.payloads("thinker->talker") for token in payload.token_ids]


def frames(trace: Trace) -> list[list[int]]:
    """16 codes each."""
    return [output.tensors["codes"][0].tolist() for output in trace.chunks["talker->code2wav"] if output.payload.count]


def codes(trace: Trace) -> torch.Tensor:
    """int64 [16, frames]."""
    found = [output.tensors["codes"] for output in trace.chunks.get("talker->code2wav", []) if output.payload.count]
    return torch.cat(found).T.long() if found else torch.zeros(16, 0, dtype=torch.int64)
