"""Shared memory: one pool of segments for each sending process, slots handed out and returned; readers copy out.

The first segment is made when the first tensor needs it, further ones when it is full, up to `limit` bytes in all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from omni_bus.connectors.base import Bytes, Frame, check_ref, dtype_name, tensor_bytes, tensor_from
from omni_bus.connectors.segment import AttachedSegment, OwnedSegment
from omni_bus.errors import Overloaded, ProtocolViolation, TooLarge
from omni_bus.events import TensorRef
from omni_bus.segments import is_segment_name, segment_name

SEGMENT_BYTES = 32 << 20
LIMIT_BYTES = 256 << 20
_numbers = itertools.count()  # of the process's segments: a process may have several senders, each in a thread


class ShmConnector:
    name = "shm"

    def __init__(self, tag: str, *, segment_bytes: int = SEGMENT_BYTES, limit: int = LIMIT_BYTES) -> None:
        self._pool = SegmentPool(tag, segment_bytes, limit)
        self._attached: dict[str, AttachedSegment] = {}

    def put(self, name: str, tensor: torch.Tensor, frames: list[Frame]) -> TensorRef | None:
        dtype = dtype_name(tensor)
        data = tensor_bytes(tensor)
        slot = self._pool.write(data)
        if slot is None:
            return None
        segment, offset, generation = slot
        return TensorRef(name, self.name, dtype, tuple(tensor.shape), len(data), segment, offset, generation)

    def get(self, ref: TensorRef, frames: Sequence[Frame]) -> torch.Tensor:
        check_ref(ref)
        segment = self._attached.get(ref.segment)
        if segment is None:
            # A client's or a peer's string becomes a file name only in the one form that we make ourselves.
            if not is_segment_name(ref.segment):
                raise ProtocolViolation("a tensor in a segment of an impossible name")
            segment = self._attached[ref.segment] = AttachedSegment(ref.segment)
        # Checked before memory is taken for it: nbytes came over the wire.
        segment.check(ref.offset, ref.nbytes)
        data = torch.empty(ref.nbytes, dtype=torch.uint8)
        segment.read(ref.offset, ref.generation, data.numpy())
        return tensor_from(ref, data)

    def release(self, ref: TensorRef) -> None:
        self._pool.free(ref.segment, ref.offset, ref.generation)

    @property
    def used(self) -> int:
        return self._pool.used

    @property
    def attached(self) -> tuple[str, ...]:
        """Names of the segments mapped here for reading."""
        return tuple(self._attached)

    def prune(self) -> None:
        """Unmap segments whose owner has closed them, or has died and was swept."""
        for name in [name for name, segment in self._attached.items() if not segment.linked]:
            self._attached.pop(name).close()

    def close(self) -> None:
        self._pool.close()
        for segment in self._attached.values():
            segment.close()
        self._attached.clear()


class SegmentPool:
    """The segments of one sender."""

    def __init__(self, tag: str, segment_bytes: int, limit: int) -> None:
        self._tag = tag
        self._segment_bytes = segment_bytes
        self._limit = limit
        self._segments: dict[str, OwnedSegment] = {}

    @property
    def used(self) -> int:
        return sum(segment.used for segment in self._segments.values())

    @property
    def size(self) -> int:
        """Bytes of shared memory taken from the system."""
        return sum(segment.size for segment in self._segments.values())

    def write(self, data: Bytes) -> tuple[str, int, int] | None:
        """(segment, offset, generation); None: full until a slot is returned.

        Raises TooLarge for what exceeds the pool, Overloaded where the system has no shared memory for it.
        """
        if OwnedSegment.size_for(len(data)) > self._limit:
            raise TooLarge(f"a tensor of {len(data)} bytes exceeds the {self._limit} bytes of shared memory of one process")
        for segment in self._segments.values():
            slot = segment.write(data)
            if slot is not None:
                return segment.name, *slot
        grown = self._grow(OwnedSegment.size_for(len(data)))
        if grown is None:
            return None
        slot = grown.write(data)
        assert slot is not None
        return grown.name, *slot

    def free(self, name: str, offset: int, generation: int) -> None:
        self._segments[name].free(offset, generation)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _grow(self, needed: int) -> OwnedSegment | None:
        """A further segment with room for `needed` bytes, in place of unused ones where the limit asks for it."""
        size = min(max(needed, self._segment_bytes), self._limit)
        idle = [segment for segment in self._segments.values() if not segment.used]
        while self.size + size > self._limit:
            if self.size + needed <= self._limit:
                size = self._limit - self.size
            elif idle:
                self._drop(idle.pop())
            else:
                return None
        while True:
            try:
                segment = OwnedSegment(segment_name(self._tag, next(_numbers)), size)
            except OSError as error:
                # Less shared memory than the limit allows: a container's /dev/shm, or other users of it.
                if idle:
                    self._drop(idle.pop())
                elif size > needed:
                    size = needed
                elif self._segments:
                    return None
                else:
                    raise Overloaded(f"no shared memory for a tensor: {error.strerror}") from error
            else:
                self._segments[segment.name] = segment
                return segment

    def _drop(self, segment: OwnedSegment) -> None:
        del self._segments[segment.name]
        segment.close()
