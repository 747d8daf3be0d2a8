"""Local: producer and consumer share a process, and the tensor is handed over by reference."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

import torch

from omni_bus.connectors.base import Frame, dtype_name
from omni_bus.errors import StaleTensor
from omni_bus.events import TensorRef


class LocalConnector:
    name = "local"

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        # Keys of two processes must not coincide, or a ref that strayed would find another tensor.
        self._keys = itertools.count(secrets.randbits(61))

    def put(self, name: str, tensor: torch.Tensor, frames: list[Frame]) -> TensorRef:
        key = next(self._keys)
        nbytes = tensor.numel() * tensor.element_size()
        ref = TensorRef(name, self.name, dtype_name(tensor), tuple(tensor.shape), nbytes, generation=key)
        self._tensors[key] = tensor
        return ref

    def get(self, ref: TensorRef, frames: Sequence[Frame]) -> torch.Tensor:
        try:
            return self._tensors[ref.generation]
        except KeyError:
            raise StaleTensor(f"tensor {ref.name!r} is not held in this process") from None

    def release(self, ref: TensorRef) -> None:
        del self._tensors[ref.generation]

    @property
    def used(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        self._tensors.clear()
