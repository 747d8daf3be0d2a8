"""The cascade's graph: speech recogniser → language model → speech synthesiser. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from omni_bus.payloads import AudioDelta, ChatInput, InputTranscript, TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.spec import EdgeSpec, PipelineSpec, StageSpec
from omni_bus.stages.ar.options import AROptions
from omni_bus.stages.cascade.packages import check_packages
from omni_bus.stages.cascade.payloads import Clause, Prompt

if TYPE_CHECKING:
    from omni_bus.stages.contract import Stage

VOICE = "heart"  # the one voice inside the hibari package


class AsrOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    compute_type: Literal["int8", "float32"] = "int8"  # CTranslate2's
    kept_transcripts: int = 256  # of audio heard last: what a conversation's history holds is not heard again; 0 = none

    def __post_init__(self) -> None:
        if self.kept_transcripts < 0:
            raise ValueError("kept_transcripts must be at least 0")


class LlmOptions(AROptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_length: int = 2048  # positions of a conversation and its answer
    system_prompt: str = "You are a friendly assistant named Omni. Keep your answers short: one or two plain sentences."  # used where the conversation has no system message


class TtsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    speed: float = 1.0  # 0.5 slow … 2.0 fast
    seed: int = 0  # of the voice's noise; a request's own seed goes before it

    def __post_init__(self) -> None:
        if not 0.5 <= self.speed <= 2.0:
            raise ValueError("speed must be from 0.5 to 2")


def _asr() -> Stage:
    from omni_bus.stages.cascade.asr import AsrStage

    return AsrStage()


def _llm() -> Stage:
    from omni_bus.stages.cascade.llm import llm_stage

    return llm_stage()


def _tts() -> Stage:
    from omni_bus.stages.cascade.tts import TtsStage

    return TtsStage()


PIPELINE = PipelineSpec(
    name="cascade",
    stages=(
        StageSpec(
            name="asr",
            factory=_asr,
            options=AsrOptions,
            max_batch=1,
            cpu_only=True,
            unused=frozenset({"dtype", "max_batch"}),
        ),
        StageSpec(
            name="llm",
            factory=_llm,
            options=LlmOptions,
            modalities=frozenset({"text", "audio"}),
            sampling=SamplingParams(temperature=0.0, max_tokens=256),
            max_batch=8,
        ),
        StageSpec(
            name="tts",
            factory=_tts,
            options=TtsOptions,
            modalities=frozenset({"audio"}),
            max_batch=1,
            cpu_only=True,
            unused=frozenset({"dtype", "max_batch"}),
        ),
    ),
    edges=(
        EdgeSpec(source="client", target="asr", payload=ChatInput),
        EdgeSpec(source="asr", target="llm", payload=Prompt),
        EdgeSpec(source="asr", target="client", payload=InputTranscript),
        EdgeSpec(source="llm", target="tts", payload=Clause),
        EdgeSpec(source="llm", target="client", payload=TextDelta),
        EdgeSpec(source="tts", target="client", payload=AudioDelta),
    ),
    text_stage="llm",
    input_kinds=frozenset({"text", "audio"}),
    output_modalities=frozenset({"text", "audio"}),
    voices=lambda model_path: (VOICE,),
    transcript_edge="asr->client",
    check_model=check_packages,
)
