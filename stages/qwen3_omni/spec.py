"""The Qwen3-Omni pipeline: processor → thinker → talker → code2wav. Speech stages run for requests that want audio only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from omni_bus.payloads import AudioDelta, ChatInput, TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.spec import EdgeSpec, PipelineSpec, StageSpec
from omni_bus.stages.qwen3_omni.options import Code2WavOptions, DecoderOptions, ProcessorOptions, ThinkerOptions
from omni_bus.stages.qwen3_omni.payloads import CodecFrames, ModelInputs, TalkerPrompt, ThinkerTokens

if TYPE_CHECKING:
    from omni_bus.deployment import Deployment, StageConfig
    from omni_bus.memory import StageNeed
    from omni_bus.stages.contract import Stage

SAMPLE_RATE = 24_000
SPEECH = frozenset({"audio"})
# What transformers' generate() of this model uses where a caller says nothing.
THINKER_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1024)
TALKER_SAMPLING = SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05, max_tokens=4096)


class CodecEdgeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """talker->code2wav: how many codec frames (80 ms each) Code2Wav decodes at once."""

    first_chunk_frames: int = 1
    max_chunk_frames: int = 25

    def __post_init__(self) -> None:
        if self.first_chunk_frames < 1:
            raise ValueError("first_chunk_frames must be at least 1")
        if self.max_chunk_frames < self.first_chunk_frames:
            raise ValueError(f"max_chunk_frames must be at least first_chunk_frames, which is {self.first_chunk_frames}")


def _processor() -> Stage:
    from omni_bus.stages.qwen3_omni.processor import ProcessorStage

    return ProcessorStage()


def _thinker() -> Stage:
    from omni_bus.stages.ar.stage import ARStage
    from omni_bus.stages.qwen3_omni.thinker import ThinkerProgram

    return ARStage(ThinkerProgram(), ThinkerOptions)


def _talker() -> Stage:
    from omni_bus.stages.ar.stage import ARStage
    from omni_bus.stages.qwen3_omni.talker import TalkerProgram

    return ARStage(TalkerProgram(), DecoderOptions)


def _code2wav() -> Stage:
    from omni_bus.stages.qwen3_omni.code2wav import Code2WavStage

    return Code2WavStage()


def voices(model_path: str) -> tuple[str, ...]:
    """Lower-case speaker names of the checkpoint, the default one first."""
    from omni_bus.stages.qwen3_omni.config import read_config

    return read_config(model_path).talker.voices


def check_model(model_path: str, stages: Mapping[str, StageConfig]) -> None:
    """Tensors are looked for only where a stage is to read them."""
    from omni_bus.stages.qwen3_omni.check import check_checkpoint

    check_checkpoint(
        model_path,
        random=frozenset(name for name, stage in stages.items() if stage.options.get("load") == "random"),
        fp8="thinker" in stages and stages["thinker"].options.get("weights") == "fp8",
    )


def needs(deployment: Deployment) -> dict[str, StageNeed]:
    from omni_bus.stages.qwen3_omni.needs import stage_needs

    return stage_needs(deployment)


PIPELINE = PipelineSpec(
    name="qwen3_omni",
    stages=(
        StageSpec(
            name="processor",
            factory=_processor,
            cpu_only=True,
            unused=frozenset({"dtype", "max_batch"}),
            options=ProcessorOptions,
        ),
        StageSpec(name="thinker", factory=_thinker, sampling=THINKER_SAMPLING, options=ThinkerOptions),
        StageSpec(name="talker", factory=_talker, modalities=SPEECH, sampling=TALKER_SAMPLING, options=DecoderOptions),
        StageSpec(name="code2wav", factory=_code2wav, modalities=SPEECH, options=Code2WavOptions),
    ),
    edges=(
        EdgeSpec(source="client", target="processor", payload=ChatInput, credits=1),
        EdgeSpec(source="processor", target="thinker", payload=ModelInputs, credits=1),
        EdgeSpec(source="processor", target="talker", payload=TalkerPrompt, credits=1),
        # Token ids are tiny, and text must not be held up by speech: more credits than max_tokens usually needs.
        EdgeSpec(source="thinker", target="talker", payload=ThinkerTokens, credits=4096),
        EdgeSpec(source="thinker", target="client", payload=TextDelta, credits=64),
        EdgeSpec(source="talker", target="code2wav", payload=CodecFrames, credits=32, options=CodecEdgeOptions),
        EdgeSpec(source="code2wav", target="client", payload=AudioDelta, credits=16),
    ),
    text_stage="thinker",
    input_kinds=frozenset({"text", "audio", "image", "video"}),
    output_modalities=frozenset({"text", "audio"}),
    voices=voices,
    check_model=check_model,
    needs=needs,
)
