"""A stage of the cascade in this process, driven through the stage contract as a worker drives it."""

from __future__ import annotations

import importlib.util
import re
import time

import torch

from omni_bus.deployment import EdgeConfig, StageConfig
from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from omni_bus.stages.cascade.packages import PACKAGES
from omni_bus.stages.contract import Chunk, Consumed, Emission, Finished, Output, Stage, StageContext, StageError, StageRequest
from tests.support.lacking import lacking


def skip_without_packages() -> None:
    """Skip (by hand only: lacking.py), with the reason, where a package that carries a model is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        lacking(f"quickstart packages are not installed: {', '.join(missing)}")


def words(text: str) -> list[str]:
    """Lower-case words without punctuation: how transcripts are compared."""
    return re.findall(r"[a-z0-9']+", text.lower())


def microphone(audio: torch.Tensor, rate: int = 24_000) -> torch.Tensor:
    """float32 [samples] at `rate` → 16 kHz."""
    return torch.nn.functional.interpolate(audio[None, None], size=len(audio) * 16_000 // rate, mode="linear")[0, 0]


class Driver:
    """One loaded stage and what it has emitted."""

    def __init__(self, name: str, **options: object) -> None:
        self.pipeline = load_pipeline("cascade")
        spec = self.pipeline.stage(name)
        self.name = name
        self.stage: Stage = spec.factory()
        self.sampling = spec.sampling or SamplingParams()
        self.emissions: list[Emission] = []
        self._next = 0
        self.stage.load(
            StageContext(
                stage=name,
                pipeline=self.pipeline,
                model_path="",
                device="cpu",
                config=StageConfig(
                    devices=("cpu",), threads=1, max_batch=spec.max_batch, sampling=self.sampling, options=options
                ),
                edges={edge.name: EdgeConfig(credits=edge.credits) for edge in self.pipeline.edges},
                progress=lambda fraction, doing: None,
            )
        )

    def open(self, options: RequestOptions | None = None, sampling: SamplingParams | None = None) -> int:
        self._next += 1
        options = options or RequestOptions(modalities=("text", "audio"))
        edges = self.pipeline.active_edges(options.modalities)
        self.stage.open(
            StageRequest(
                id=self._next,
                options=options,
                sampling=self.sampling.merged(sampling or SamplingParams()),
                inputs=tuple(edge.name for edge in edges if edge.target == self.name),
                outputs=tuple(edge.name for edge in edges if edge.source == self.name),
                deadline=time.monotonic() + 60,
            )
        )
        return self._next

    def run(self) -> list[Emission]:
        """Step until there is nothing to do; what came out of it."""
        begin = len(self.emissions)
        while self.stage.has_work():
            self.emissions += self.stage.step()
        return self.emissions[begin:]

    def outputs(self, request: int, edge: str) -> list[Output]:
        return [item for item in self.emissions if isinstance(item, Output) and (item.request_id, item.edge) == (request, edge)]

    def consumed(self, request: int) -> int:
        return sum(item.count for item in self.emissions if isinstance(item, Consumed) and item.request_id == request)

    def finished(self, request: int) -> Finished:
        """The request's one end; every output edge had exactly one last chunk, and nothing came after the end."""
        own = [item for item in self.emissions if item.request_id == request]
        assert sum(isinstance(item, Finished | StageError) for item in own) == 1
        end = own[-1]
        assert isinstance(end, Finished), end
        for edge in {item.edge for item in own if isinstance(item, Output)}:
            assert [item.last for item in self.outputs(request, edge)].count(True) == 1 and self.outputs(request, edge)[-1].last
        return end

    def pcm(self, request: int) -> torch.Tensor:
        """int16 [samples] of all audio sent for the request."""
        pieces = [item.tensors["pcm"] for item in self.outputs(request, "tts->client") if item.tensors]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int16)


def chunk(edge: str, payload: object, *, last: bool = True, **tensors: torch.Tensor) -> Chunk:
    return Chunk(edge, payload, tensors, last)  # type: ignore[arg-type]
