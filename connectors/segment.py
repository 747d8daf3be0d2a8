"""One POSIX shared memory segment: how its owner writes slots, how others read them, and how a reused slot is told.

    segment   16 bytes of segment header: magic, the segment's nonce; then slots
    slot      16 bytes of slot header: generation (0 = returned), nonce; then the bytes of a tensor; 64-byte aligned

The owner zeroes a slot's generation when it is returned, and sets the next one when the new bytes are whole. A reader copies
the bytes out and looks at the header before and after: whatever happened in between, either the header still has the ref's
generation and the copy is whole, or the ref is stale. The nonce is random for each segment, so that no tensor's bytes can pass for a header.

Plain files of /dev/shm in place of multiprocessing.SharedMemory: its resource tracker unlinks what others still use.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct

import numpy as np

from omni_bus.connectors.base import Bytes
from omni_bus.connectors.free_list import FreeList
from omni_bus.errors import ProtocolViolation, StaleTensor
from omni_bus.segments import SHM

ALIGNMENT = 64
_SLOT = struct.Struct("<QQ")
_MAGIC = int.from_bytes(b"omnibus1", "little")


def slot_size(nbytes: int) -> int:
    """Bytes of a segment that a tensor of `nbytes` takes up."""
    return -(-(_SLOT.size + nbytes) // ALIGNMENT) * ALIGNMENT


def create_map(name: str, size: int) -> mmap.mmap:
    """A new file of zeros in shared memory, every page reserved, mapped for writing. OSError where there is no room."""
    path = SHM / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def open_map(name: str, *, write: bool = False) -> mmap.mmap:
    """Another process's. Raises StaleTensor where it is gone."""
    try:
        fd = os.open(SHM / name, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise StaleTensor("the shared memory of a tensor is gone with its owner") from None
    try:
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ)
    finally:
        os.close(fd)


class OwnedSegment:
    """A segment this process made, writes to and unlinks. Every page is reserved at once: a full /dev/shm is an OSError here and
    not a SIGBUS later."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._map = create_map(name, size)
        self._nonce = secrets.randbits(64)
        self._generation = 0
        self._room = FreeList(size - ALIGNMENT)
        _SLOT.pack_into(self._map, 0, _MAGIC, self._nonce)

    @staticmethod
    def size_for(nbytes: int) -> int:
        """The smallest segment in which one tensor of `nbytes` finds room."""
        return ALIGNMENT + slot_size(nbytes)

    @property
    def used(self) -> int:
        return self._room.used

    def write(self, data: Bytes) -> tuple[int, int] | None:
        """(offset of the first byte, generation), or None where no free range is large enough."""
        start = self._room.allocate(slot_size(len(data)))
        if start is None:
            return None
        header = ALIGNMENT + start
        self._generation += 1
        offset = header + _SLOT.size
        _SLOT.pack_into(self._map, header, 0, self._nonce)
        np.frombuffer(self._map, np.uint8, len(data), offset)[:] = data
        _SLOT.pack_into(self._map, header, self._generation, self._nonce)
        return offset, self._generation

    def free(self, offset: int, generation: int) -> None:
        header = offset - _SLOT.size
        assert _SLOT.unpack_from(self._map, header) == (generation, self._nonce), "a slot returned twice"
        _SLOT.pack_into(self._map, header, 0, self._nonce)
        self._room.free(header - ALIGNMENT)

    def close(self) -> None:
        self._map.close()
        (SHM / self.name).unlink(missing_ok=True)


class AttachedSegment:
    """Another process's segment, mapped for reading. `name` is one that segments.py makes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._map = open_map(name)
        magic, self._nonce = _SLOT.unpack_from(self._map, 0)
        if magic != _MAGIC:
            self._map.close()
            raise ProtocolViolation("a tensor in shared memory that is no segment of ours")

    @property
    def linked(self) -> bool:
        """Whether the owner still has it."""
        return (SHM / self.name).exists()

    def check(self, offset: int, nbytes: int) -> None:
        """Raise ProtocolViolation unless a slot may begin at `offset` and have `nbytes`."""
        header = offset - _SLOT.size
        if header < ALIGNMENT or header % ALIGNMENT or offset + nbytes > len(self._map):
            raise ProtocolViolation("a tensor beyond its shared memory segment")

    def read(self, offset: int, generation: int, into: Bytes) -> None:
        """Fill `into` from the slot whose first byte is at `offset`. Raises StaleTensor where the slot is another's by now."""
        self.check(offset, len(into))
        header = offset - _SLOT.size
        wanted = (generation, self._nonce)
        fresh = generation != 0 and _SLOT.unpack_from(self._map, header) == wanted
        if fresh:
            into[:] = np.frombuffer(self._map, np.uint8, len(into), offset)
        if not fresh or _SLOT.unpack_from(self._map, header) != wanted:
            raise StaleTensor("the shared memory slot of a tensor has been reused")

    def close(self) -> None:
        self._map.close()
