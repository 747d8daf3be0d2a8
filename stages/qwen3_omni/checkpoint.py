"""Reads one stage's tensors of a checkpoint: only those under a prefix, straight to their device, experts fused.

On disk every expert has three matrices of its own; in memory a layer's experts are `gate_up_proj` [experts, 2 * intermediate, hidden]
and `down_proj` [experts, hidden, intermediate], filled matrix by matrix, so no second copy is ever held; in FP8, if that is wanted,
they are quantised on the way, matrix by matrix, and `gate_up_proj_scale` and `down_proj_scale` stand beside them. Files are mapped, and read by a
few threads at once; on the way to a card each thread has two pinned buffers and a stream of its own, and dtypes are converted there.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from omni_bus.errors import CheckpointError
from omni_bus.stages.ar.fp8 import FP8, SCALE_BYTES, SCALE_SUFFIX, Fp8Matrix
from omni_bus.stages.qwen3_omni.card_lane import CardLane
from omni_bus.stages.qwen3_omni.checkpoint_files import EXPERT, CheckpointFiles, TensorEntry

PARTS = ("gate", "up", "down")
THREADS = 4
RUN_BYTES = 128 << 20  # of one file, read by one thread before it takes the next run
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Loaded = Callable[[int], None]  # so many more bytes are in their place; called by the thread that called `tensors`
Shape = tuple[int, ...]
T = TypeVar("T")


class Checkpoint:
    """A checkpoint directory, by path or hub id. Raises CheckpointError naming the file or tensor that is missing or malformed.
    With `fp8` the experts' matrices are in FP8, whatever dtype is asked for."""

    def __init__(self, path: str | os.PathLike[str], *, loaded: Loaded | None = None, fp8: bool = False) -> None:
        self.files = CheckpointFiles(path)
        self.fp8 = fp8
        self._loaded = loaded

    @property
    def directory(self) -> pathlib.Path:
        return self.files.directory

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object of the directory."""
        return self.files.json(name)

    def tensors(
        self, prefix: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Tensors under `prefix`, which is cut off their names, experts fused. `dtype` converts floating point tensors."""
        device = torch.device(device)
        entries = list(self.files.entries(prefix))
        if not entries:
            raise CheckpointError(f"{self.directory} has no tensor under {prefix!r}")
        kinds = {entry.name: self._kind(entry, dtype) for entry in entries}
        experts = Experts(prefix, [(entry.name, entry.shape, kinds[entry.name]) for entry in entries], device)
        out: dict[str, torch.Tensor] = {}
        read = functools.partial(_read, experts=experts, kinds=kinds, device=device, lanes=_Lanes())
        if device.type == "cuda":
            # Memory comes to be of the caller's stream, and is given back there: nothing of it may still use what others fill now.
            stream = torch.cuda.current_stream(device)
            stream.synchronize()
            read = functools.partial(_on_stream, stream, read)
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            for run, single in pool.map(read, list(_runs(entries))):
                out |= {name.removeprefix(prefix): tensor for name, tensor in single.items()}
                self._report(sum(stored_bytes(entry.shape, kinds[entry.name]) for entry in run))
        return out | experts.tensors

    def bytes(self, prefix: str, dtype: torch.dtype) -> int:
        """Bytes of the tensors under `prefix` in that dtype."""
        return sum(stored_bytes(entry.shape, self._kind(entry, dtype)) for entry in self.files.entries(prefix))

    def _kind(self, entry: TensorEntry, wanted: torch.dtype | None) -> torch.dtype:
        """The dtype that a tensor is to have."""
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{entry.file}: tensor {entry.name} has dtype {entry.dtype}, which no stage here takes")
        own = DTYPES[entry.dtype]
        if not own.is_floating_point:
            return own
        return FP8 if self.fp8 and EXPERT.fullmatch(entry.name) else wanted or own

    def _report(self, loaded: int) -> None:
        if self._loaded is not None:
            self._loaded(loaded)

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


class Experts:
    """The fused tensors of all layers, allocated at once and filled matrix by matrix; those of dtype FP8 have their scales beside them."""

    def __init__(self, prefix: str, entries: Iterable[tuple[str, Shape, torch.dtype]], device: torch.device) -> None:
        """entries: name, shape and the dtype that is wanted. Only the matrices of experts count; CheckpointError where one is amiss."""
        layers: dict[str, dict[tuple[int, str], tuple[str, Shape, torch.dtype]]] = {}
        for entry in entries:
            if match := EXPERT.fullmatch(entry[0]):
                layers.setdefault(match["layer"], {})[int(match["expert"]), match["part"]] = entry
        self.tensors: dict[str, torch.Tensor] = {}
        self._layers: dict[str, dict[str, torch.Tensor]] = {}
        for layer, found in layers.items():
            count, (intermediate, hidden) = _checked(layer, found)
            dtype = found[0, "gate"][2]
            fused = self._layers[layer] = {}
            for name, shape in (
                ("gate_up_proj", (count, 2 * intermediate, hidden)),
                ("down_proj", (count, hidden, intermediate)),
            ):
                fused[name] = torch.empty(shape, dtype=dtype, device=device)
                if dtype == FP8:
                    fused[name + SCALE_SUFFIX] = torch.empty(shape[:2], dtype=torch.float32, device=device)
            self.tensors |= {f"{layer.removeprefix(prefix)}.{name}": tensor for name, tensor in fused.items()}

    def place(self, name: str) -> torch.Tensor | Fp8Matrix | None:
        """Where that matrix of an expert belongs, contiguous; None for any other tensor."""
        match = EXPERT.fullmatch(name)
        if match is None:
            return None
        fused, expert = self._layers[match["layer"]], int(match["expert"])
        name = "down_proj" if match["part"] == "down" else "gate_up_proj"
        matrix, scales = fused[name][expert], None
        if (all_scales := fused.get(name + SCALE_SUFFIX)) is not None:
            scales = all_scales[expert]
        if match["part"] != "down":  # gates before ups
            half = match["part"] == "up"
            matrix = matrix.chunk(2)[half]
            scales = None if scales is None else scales.chunk(2)[half]
        return matrix if scales is None else Fp8Matrix(matrix, scales)


def _checked(layer: str, found: dict[tuple[int, str], tuple[str, Shape, torch.dtype]]) -> tuple[int, tuple[int, int]]:
    """Number of experts, and (intermediate, hidden)."""
    count = 1 + max(expert for expert, _ in found)
    for expert in range(count):
        for part in PARTS:
            if (expert, part) not in found:
                raise CheckpointError(f"the checkpoint lacks tensor {layer}.{expert}.{part}_proj.weight")
    name, first, _ = found[0, "gate"]
    if len(first) != 2:
        raise CheckpointError(f"tensor {name} has shape {list(first)}; a matrix is expected")
    for (_, part), (name, shape, _) in found.items():
        expected = first if part != "down" else first[::-1]
        if shape != expected:
            raise CheckpointError(f"tensor {name} has shape {list(shape)}; {list(expected)} is expected")
    return count, (first[0], first[1])


def stored_bytes(shape: Shape, kind: torch.dtype) -> int:
    """Of a tensor in that dtype, the scales of one in FP8 counted."""
    return math.prod(shape) * kind.itemsize + (SCALE_BYTES * shape[0] if kind == FP8 else 0)


def _runs(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Consecutive tensors of one file, about RUN_BYTES of them."""
    run: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if run and (entry.file != run[0].file or size >= RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(entry)
        size += stored_bytes(entry.shape, DTYPES[entry.dtype])
    yield run


class _Lanes(threading.local):
    """Each thread's way to the card."""

    own: CardLane | None = None


def _read(
    run: list[TensorEntry], *, experts: Experts, kinds: dict[str, torch.dtype], device: torch.device, lanes: _Lanes
) -> tuple[list[TensorEntry], dict[str, torch.Tensor]]:
    """One run: experts into their places, the others returned."""
    if device.type == "cuda" and lanes.own is None:
        lanes.own = CardLane(device)
    lane = lanes.own
    out: dict[str, torch.Tensor] = {}
    try:
        with safe_open(run[0].file, framework="pt", device="cpu") as opened:
            for entry in run:
                tensor, place = opened.get_tensor(entry.name), experts.place(entry.name)
                if lane is not None:
                    if place is None:
                        place = out[entry.name] = torch.empty(entry.shape, dtype=kinds[entry.name], device=device)
                    lane.send(tensor, place)
                elif place is not None:
                    place.copy_(tensor)
                else:
                    out[entry.name] = tensor.to(device, kinds[entry.name])
            if lane is not None:
                lane.finish()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{run[0].file} cannot be read: {error}; fetch it again") from error
    return run, out


def _on_stream(stream: torch.cuda.Stream, read: Callable[[list[TensorEntry]], T], run: list[TensorEntry]) -> T:
    """`read(run)` with memory of the stream."""
    with torch.cuda.stream(stream):
        return read(run)


def _first(names: list[str]) -> str:
    """The first name, and how many more there are."""
    return f"tensor {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
