"""What stages will need and devices have, from file headers and the system: no tensor is read, no library asked."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterator

from omni_bus.deployment import Deployment
from omni_bus.devices import cuda_devices

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FILE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def stage_weights(deployment: Deployment) -> dict[str, int]:
    """Stage → bytes of its weights in the dtype it is to have, for stages whose name begins their tensors' names in the checkpoint.

    A stage that brings its own model, or a checkpoint that is laid out otherwise, is left out: nothing is known of it.
    """
    found: dict[str, int] = {}
    for name, kind, elements in _tensors(pathlib.Path(deployment.model.path)) if deployment.model.path else ():
        stage = name.partition(".")[0]
        if stage in deployment.stages:
            size = DTYPE_BYTES[deployment.stages[stage].dtype] if kind in _FLOATS else _FILE_BYTES.get(kind, 1)
            found[stage] = found.get(stage, 0) + elements * size
    return found


def capacity(device: str) -> int:
    """Bytes of memory of "cpu" or "cuda:N"."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return cuda_devices()[int(device.removeprefix("cuda:"))].memory


def _tensors(directory: pathlib.Path) -> Iterator[tuple[str, str, int]]:
    """(name, dtype, elements) of each tensor in a directory's safetensors files: an 8-byte length, then JSON."""
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield name, tensor["dtype"], math.prod(tensor["shape"])
