"""What a connector is, and how a tensor becomes bytes and a TensorRef and comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from omni_bus.errors import ProtocolViolation
from omni_bus.events import TensorRef

Frame = bytes | memoryview
Bytes = npt.NDArray[np.uint8]

_CARRIED = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CARRIED}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMENSIONS = 8


class Connector(Protocol):
    """One way for a tensor from `put` at the producer to `get` at the consumer; `release` gives back what `put` took.

    None of the calls blocks.
    """

    name: str

    def put(self, name: str, tensor: torch.Tensor, frames: list[Frame]) -> TensorRef | None:
        """A ref to the tensor's content as it is now; inline appends to `frames`. None: no room until something is released.

        Raises TooLarge for a tensor for which there will never be room.
        """

    def get(self, ref: TensorRef, frames: Sequence[Frame]) -> torch.Tensor:
        """The tensor, in this process's memory. Raises ProtocolViolation for a ref that cannot be, StaleTensor for one past."""

    def release(self, ref: TensorRef) -> None:
        """The consumer has it, or nobody wants it any more. Once for each `put`, at the producer."""

    @property
    def used(self) -> int:
        """Slots handed out and not yet returned."""

    def close(self) -> None:
        """Free everything, whoever holds refs to it."""


def dtype_name(tensor: torch.Tensor) -> str:
    """As TensorRef has it. Raises TypeError for a tensor that no connector carries (quantised, sparse)."""
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} cannot leave its process")
    return _NAMES[tensor.dtype]


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """The content as uint8 [nbytes], C-contiguous; shares the tensor's memory where that is on the CPU and contiguous already."""
    # A lazy conjugate or negative view has other bytes than it has values.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat: Bytes = plain.reshape(-1).view(torch.uint8).numpy()
    return flat


def tensor_from(ref: TensorRef, data: torch.Tensor) -> torch.Tensor:
    """uint8 [nbytes] that nobody else writes to, as the tensor that `ref` describes."""
    if ref.nbytes == 0:
        return torch.empty(ref.shape, dtype=DTYPES[ref.dtype])
    return data.view(DTYPES[ref.dtype]).reshape(ref.shape)


def check_ref(ref: TensorRef) -> None:
    """Raise ProtocolViolation unless dtype, shape and nbytes go together: the ref came from another process."""
    dtype = DTYPES.get(ref.dtype)
    if dtype is None:
        raise ProtocolViolation(f"a tensor of unknown dtype {ref.dtype[:40]!r}")
    if len(ref.shape) > MAX_DIMENSIONS or any(size < 0 for size in ref.shape):
        raise ProtocolViolation(f"a tensor of impossible shape {ref.shape[:MAX_DIMENSIONS]}")
    # Above 2**62 elements an empty dimension may still make the product 0, and torch refuses the shape.
    if any(size > 2**62 for size in ref.shape) or math.prod(size for size in ref.shape if size) > 2**62:
        raise ProtocolViolation(f"a tensor of impossible shape {ref.shape}")
    if math.prod(ref.shape) * dtype.itemsize != ref.nbytes:
        raise ProtocolViolation(f"{ref.nbytes} bytes are no {ref.dtype} tensor of shape {ref.shape}")
    if ref.offset < 0 or ref.generation < 0:
        raise ProtocolViolation("a tensor at a negative offset or generation")
