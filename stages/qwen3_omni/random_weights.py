"""Weights made on their device at load instead of read: `load = "random"`. For timings; such a model babbles.

Every tensor is drawn as the fixture draws it (fixture_tensors.py), in float32 and by a generator of its own seeded by its name, then
put into the dtype of the stage. On a CPU that gives the very tensors of `omni-bus fixture --seed 0`; a card draws other numbers of the
same distribution. Experts are drawn into their fused tensors, or quantised into them, and no tensor passes through host memory.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from typing import Any

import torch

from omni_bus.errors import CheckpointError
from omni_bus.stages.ar.fp8 import FP8
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint, Experts, Loaded, stored_bytes
from omni_bus.stages.qwen3_omni.checkpoint_files import EXPERT, resolve
from omni_bus.stages.qwen3_omni.fixture_tensors import TensorSpec, tensor_specs
from omni_bus.stages.qwen3_omni.json_fields import read_json

SEED = 0
REPORT_BYTES = 256 << 20  # between two reports of progress


class RandomCheckpoint(Checkpoint):
    """The tensors that the config.json of a directory calls for. Nothing but that file is read."""

    def __init__(self, path: str | os.PathLike[str], *, loaded: Loaded | None = None, fp8: bool = False) -> None:
        self._directory = resolve(path)
        self.fp8 = fp8
        self._loaded = loaded
        self._specs = {spec.name: spec for spec in sorted(tensor_specs(self.json("config.json")), key=lambda spec: spec.name)}

    @property
    def directory(self) -> pathlib.Path:
        return self._directory

    def json(self, name: str) -> dict[str, Any]:
        return read_json(self._directory / name)

    def tensors(
        self, prefix: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        device, dtype = torch.device(device), dtype or torch.float32
        specs = [spec for name, spec in self._specs.items() if name.startswith(prefix)]
        if not specs:
            raise CheckpointError(f"{self.directory}: config.json calls for no tensor under {prefix!r}")
        experts = Experts(prefix, [(spec.name, spec.shape, self._dtype(spec, dtype)) for spec in specs], device)
        generator = torch.Generator(device)
        out: dict[str, torch.Tensor] = {}
        made = 0
        for spec in specs:
            place = experts.place(spec.name)
            if place is None:
                place = out[spec.name.removeprefix(prefix)] = torch.empty(spec.shape, dtype=dtype, device=device)
            place.copy_(draw(spec, SEED, generator))
            made += place.nbytes
            if made >= REPORT_BYTES:
                self._report(made)
                made = 0
        self._report(made)
        return out | experts.tensors

    def bytes(self, prefix: str, dtype: torch.dtype) -> int:
        specs = (spec for name, spec in self._specs.items() if name.startswith(prefix))
        return sum(stored_bytes(spec.shape, self._dtype(spec, dtype)) for spec in specs)

    def _dtype(self, spec: TensorSpec, wanted: torch.dtype) -> torch.dtype:
        return FP8 if self.fp8 and EXPERT.fullmatch(spec.name) else wanted


def draw(spec: TensorSpec, seed: int, generator: torch.Generator) -> torch.Tensor:
    """The float32 tensor of (spec, seed) on the generator's device, whatever that generator drew before."""
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    values = torch.empty(spec.shape, device=generator.device).normal_(spec.mean, spec.std, generator=generator)
    if spec.zero_sum:
        values -= values.mean(-1, keepdim=True)
    for start, stop, gain in spec.row_gains:
        values[start:stop] *= gain
    return values
