"""[stages.NAME] keys of the stages that hold weights. Imports no torch: spec.py names these types."""

from __future__ import annotations

from typing import Literal

import msgspec

from omni_bus.memory import check_memory
from omni_bus.stages.ar.options import AROptions

# "checkpoint": the tensors of model.path. "random": made on the device at load, for timings; model.path then needs no weights.
Load = Literal["checkpoint", "random"]
# "model": as the dtype says. "fp8": the experts' matrices in FP8 with a scale an output channel, all else as the dtype says.
Weights = Literal["model", "fp8"]
Kernels = Literal["auto", "torch"]


class ProcessorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    media_cache_mb: int = 128  # of features kept by content, so that a conversation's media are not read anew at each turn

    def __post_init__(self) -> None:
        _check_media_cache(self.media_cache_mb)


class DecoderOptions(AROptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thinker and Talker."""

    load: Load = "checkpoint"


class ThinkerOptions(DecoderOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weights: Weights = "model"
    media_cache_mb: int = 256  # of encoded audio windows, pictures and video steps, kept by content on the stage's device

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_media_cache(self.media_cache_mb)


class Code2WavOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    load: Load = "checkpoint"
    # Bytes of the card for weights, slots and workspace ("8GiB"); fewer slots than max_batch where it is tight.
    memory: str = "auto"
    graphs: Literal["auto", "plain", "off"] = (
        "auto"  # auto: the fused form by CUDA graphs on a GPU; plain: the same, not captured
    )
    kernels: Kernels = "auto"  # of the fused form; auto: Triton on a GPU, torch: plain operators

    def __post_init__(self) -> None:
        check_memory(self.memory)


def _check_media_cache(megabytes: int) -> None:
    if megabytes < 0:
        raise ValueError("media_cache_mb must be at least 0")


class LoadOptions(msgspec.Struct, frozen=True):
    """How weights are loaded: read from any of these stages' options, whether it has every key or not."""

    load: Load = "checkpoint"
    weights: Weights = "model"
    kernels: Kernels = "auto"
