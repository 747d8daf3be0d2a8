"""All four stages together: what the client hears is the one-pass decode of the codes that the Talker sent."""

from __future__ import annotations

import pathlib

import torch
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.code2wav_model import to_pcm16
from tests.support.qwen3_omni import CASES
from tests.support.stage_pipeline import StagePipeline


def test_two_requests_hear_the_one_pass_decode_of_their_codes(omni_checkpoint: pathlib.Path) -> None:
    stages = ("processor", "thinker", "talker", "code2wav")
    pipeline = StagePipeline(load_pipeline("qwen3_omni"), str(omni_checkpoint), stages)
    options = RequestOptions(
        modalities=("text", "audio"),
        sampling={
            "thinker": SamplingParams(temperature=0.0, max_tokens=12),
            "talker": SamplingParams(temperature=0.0, max_tokens=20),
        },
    )
    traces = [
        pipeline.submit(index, *CASES[name].chat(), options=options) for index, name in enumerate(("text", "text_system"))
    ]
    pipeline.run()

    model = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeConfig.from_pretrained(omni_checkpoint).code2wav_config).eval()
    model.load_state_dict(Checkpoint(omni_checkpoint).tensors("code2wav."), strict=True)
    for trace in traces:
        assert trace.error is None and trace.closed("code2wav->client")
        sent = [output.tensors["codes"] for output in trace.chunks["talker->code2wav"] if output.tensors]
        heard = [output.tensors["pcm"] for output in trace.chunks["code2wav->client"] if output.tensors]
        codes, pcm = torch.cat(sent), torch.cat(heard)
        assert len(codes) > 5 and heard[0].numel() == 1920 - 555, "the first audio is made of one frame"
        with torch.no_grad():
            expected = to_pcm16(model(codes.T[None].long())[0, 0])
        assert pcm.shape == expected.shape
        assert int((pcm.int() - expected.int()).abs().max()) <= 1
        assert trace.usage["code2wav"] == {"frames": len(codes), "samples": pcm.numel()}
        assert trace.consumed["talker->code2wav"] == len(trace.chunks["talker->code2wav"])
