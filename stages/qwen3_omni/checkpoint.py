"""Reads one stage's tensors of a checkpoint: only those under a prefix, straight to their device, experts fused.

On disk every expert has three matrices of its own; in memory a layer's experts are `gate_up_proj` [experts, 2 * intermediate, hidden]
and `down_proj` [experts, hidden, intermediate], filled matrix by matrix, so no second copy is ever held.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from omni_bus.errors import CheckpointError
from omni_bus.stages.qwen3_omni.checkpoint_files import CheckpointFiles, TensorEntry

_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
PARTS = ("gate", "up", "down")


class Checkpoint:
    """A checkpoint directory, by path or hub id. Raises CheckpointError naming the file or tensor that is missing or malformed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.files = CheckpointFiles(path)

    @property
    def directory(self) -> pathlib.Path:
        return self.files.directory

    def tensors(
        self, prefix: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Tensors under `prefix`, which is cut off their names, experts fused. `dtype` converts floating point tensors."""
        device = torch.device(device)
        entries = list(self.files.entries(prefix))
        if not entries:
            raise CheckpointError(f"{self.directory} has no tensor under {prefix!r}")
        fused = _Experts(prefix, entries, dtype, device)
        out: dict[str, torch.Tensor] = {}
        for entry, tensor in _read(entries, device):
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            if not fused.take(entry.name, tensor):
                out[entry.name.removeprefix(prefix)] = tensor
        return out | fused.tensors

    def load_into(
        self,
        module: nn.Module,
        prefix: str,
        strict: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rename: Callable[[str], str | None] | None = None,
    ) -> None:
        """Give `module` the tensors under `prefix`; its parameters may be on the meta device. They become the loaded tensors.

        `rename` maps a name behind the prefix to the module's own, or to None to leave the tensor out. With `strict`, every parameter
        and persistent buffer must be there and every tensor must have a place; without it, tensors that have none are ignored.
        """
        loaded: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors(prefix, dtype=dtype, device=device).items():
            own = name if rename is None else rename(name)
            if own is not None:
                loaded[own] = tensor
        wanted = module.state_dict()
        if missing := sorted(wanted.keys() - loaded.keys()):
            raise CheckpointError(f"{self.directory} lacks {_first(missing)} under {prefix!r}")
        if strict and (unexpected := sorted(loaded.keys() - wanted.keys())):
            raise CheckpointError(
                f"{self.directory} has {_first(unexpected)} under {prefix!r}, which this model has no place for"
            )
        for name, parameter in wanted.items():
            if loaded[name].shape != parameter.shape:
                found, expected = list(loaded[name].shape), list(parameter.shape)
                raise CheckpointError(
                    f"{self.directory}: tensor {prefix}{name} has shape {found}; config.json asks for {expected}"
                )
        module.load_state_dict({name: loaded[name] for name in wanted}, assign=True)
        module.requires_grad_(False)


class _Experts:
    """The fused tensors of all layers, filled in place as the single matrices come by."""

    def __init__(self, prefix: str, entries: list[TensorEntry], dtype: torch.dtype | None, device: torch.device) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._device = device
        self.tensors: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, int, int]] = {}  # layer → (experts, intermediate, hidden)
        layers: dict[str, dict[tuple[int, str], TensorEntry]] = {}
        for entry in entries:
            if match := _EXPERT.fullmatch(entry.name):
                layers.setdefault(match["layer"], {})[int(match["expert"]), match["part"]] = entry
        for layer, found in layers.items():
            count = 1 + max(expert for expert, _ in found)
            for expert in range(count):
                for part in PARTS:
                    if (expert, part) not in found:
                        raise CheckpointError(f"the checkpoint lacks tensor {layer}.{expert}.{part}_proj.weight")
            first = found[0, "gate"]
            if len(first.shape) != 2:
                raise CheckpointError(f"tensor {first.name} has shape {list(first.shape)}; a matrix is expected")
            self._shapes[layer] = (count, *first.shape)
            for (_, part), entry in found.items():
                expected = first.shape if part != "down" else first.shape[::-1]
                if entry.shape != expected:
                    raise CheckpointError(f"tensor {entry.name} has shape {list(entry.shape)}; {list(expected)} is expected")

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Put an expert's matrix in its place; False for any other tensor."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return False
        layer, expert, part = match["layer"], int(match["expert"]), match["part"]
        count, intermediate, hidden = self._shapes[layer]
        shape = (count, hidden, intermediate) if part == "down" else (count, 2 * intermediate, hidden)
        key = f"{layer.removeprefix(self._prefix)}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        if key not in self.tensors:
            self.tensors[key] = torch.empty(shape, dtype=tensor.dtype, device=self._device)
        start = intermediate if part == "up" else 0
        self.tensors[key][expert, start : start + tensor.shape[0]] = tensor
        return True


def _read(entries: list[TensorEntry], device: torch.device) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Tensors file by file; each file is mapped once."""
    with contextlib.ExitStack() as stack:
        current: pathlib.Path | None = None
        for entry in entries:
            try:
                if entry.file != current:
                    stack.close()
                    opened = stack.enter_context(safe_open(entry.file, framework="pt", device=str(device)))
                    current = entry.file
                yield entry, opened.get_tensor(entry.name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{entry.file} cannot be read: {error}; fetch it again") from error


def _first(names: list[str]) -> str:
    """The first name, and how many more there are."""
    return f"tensor {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
