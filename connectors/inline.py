"""Inline: the tensor's bytes are a payload frame of the event. For small tensors, and for all that goes to the client."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_bus.connectors.base import Frame, check_ref, dtype_name, tensor_bytes, tensor_from
from omni_bus.errors import ProtocolViolation
from omni_bus.events import TensorRef


class InlineConnector:
    """`frames` are the payload frames: frame 0 is the payload Struct, and a ref's `offset` is an index into them."""

    name = "inline"
    used = 0

    def put(self, name: str, tensor: torch.Tensor, frames: list[Frame]) -> TensorRef:
        data = tensor_bytes(tensor).tobytes()
        frames.append(data)
        return TensorRef(name, self.name, dtype_name(tensor), tuple(tensor.shape), len(data), offset=len(frames) - 1)

    def get(self, ref: TensorRef, frames: Sequence[Frame]) -> torch.Tensor:
        check_ref(ref)
        if not 1 <= ref.offset < len(frames):
            raise ProtocolViolation(f"a chunk of {len(frames)} payload frames has no tensor frame {ref.offset}")
        frame = frames[ref.offset]
        if len(frame) != ref.nbytes:
            raise ProtocolViolation(f"a tensor frame has {len(frame)} bytes where {ref.nbytes} were announced")
        # Copied: the frame is read-only, and the tensor belongs to the stage that gets it.
        return tensor_from(ref, torch.frombuffer(bytearray(frame), dtype=torch.uint8) if ref.nbytes else torch.empty(0))

    def release(self, ref: TensorRef) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""
