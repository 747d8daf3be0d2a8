"""The probe pipeline's topology: source → relay → sink, words in, words and tones out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from omni_bus.events import CLIENT
from omni_bus.payloads import AudioDelta, ChatInput, TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.spec import EdgeSpec, PipelineSpec, StageSpec

if TYPE_CHECKING:
    from omni_bus.deployment import StageConfig
    from omni_bus.stages.contract import Stage

SAMPLE_RATE = 24_000
SAMPLES_PER_WORD = 1_920


class ProbeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of [stages.source], [stages.relay] and [stages.sink]."""

    tensor_bytes: int = 0  # size of the float32 tensor `data` that source sends along with each word; 0 = none
    step_ms: int = 0  # that each step waits without the CPU, as for a GPU, whatever its batch
    faults: bool = False  # let words such as `!raise:relay` act as the faults of faults.py


class ProbeWord(msgspec.Struct, frozen=True):
    """source → relay → sink: one word, beside it the tensor `data` float32 [tensor_bytes / 4] where one is wanted.

    An empty word closes the edge and makes no sound.
    """

    word: str


def _source() -> Stage:
    from omni_bus.stages.probe.stages import Source

    return Source()


def _relay() -> Stage:
    from omni_bus.stages.probe.stages import Relay

    return Relay()


def _sink() -> Stage:
    from omni_bus.stages.probe.stages import Sink

    return Sink()


def _voices(model_path: str) -> tuple[str, ...]:
    return ("tone",)


def _check_model(model_path: str, stages: Mapping[str, StageConfig]) -> None:
    """There is no model to check."""


_AUDIO = frozenset({"audio"})

PIPELINE = PipelineSpec(
    name="probe",
    stages=(
        StageSpec(name="source", factory=_source, sampling=SamplingParams(), options=ProbeOptions, cpu_only=True),
        StageSpec(name="relay", factory=_relay, modalities=_AUDIO, options=ProbeOptions, cpu_only=True),
        StageSpec(name="sink", factory=_sink, modalities=_AUDIO, options=ProbeOptions, cpu_only=True),
    ),
    edges=(
        EdgeSpec(source=CLIENT, target="source", payload=ChatInput),
        EdgeSpec(source="source", target="relay", payload=ProbeWord),
        EdgeSpec(source="relay", target="sink", payload=ProbeWord),
        EdgeSpec(source="source", target=CLIENT, payload=TextDelta),
        EdgeSpec(source="sink", target=CLIENT, payload=AudioDelta),
    ),
    text_stage="source",
    input_kinds=frozenset({"text"}),
    output_modalities=frozenset({"text", "audio"}),
    voices=_voices,
    check_model=_check_model,
)
