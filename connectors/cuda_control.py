"""The control page of one device buffer: a few KiB of shared memory with all that other processes need to read from it.

    page      header: magic, owner's pid, size of the buffer, number of fences, of words, the device's PCI bus id, the buffer's handle
    fence     generation of the tensor that lies behind it (0 = none), pid of its reader, handles of its two events
    words     where fences are numbers in shared memory (cuda_words.py): those

It has the name of a shared memory segment, so that it is swept like one when its owner has died. The owner writes everything but
the reader's pid, which is how it learns that a read will never end.
"""

from __future__ import annotations

import mmap
import os
import struct

from omni_bus.connectors.cuda_fences import HANDLE_BYTES
from omni_bus.connectors.cuda_words import WORD_BYTES
from omni_bus.connectors.segment import create_map, open_map
from omni_bus.errors import ProtocolViolation
from omni_bus.segments import SHM

_HEADER = struct.Struct(f"<QQQQQ32s{HANDLE_BYTES}s")
_ENTRY = struct.Struct(f"<QQ{HANDLE_BYTES}s{HANDLE_BYTES}s")  # a multiple of 8, as the header is: the numbers lie aligned
_NUMBER = struct.Struct("<Q")
_NUMBERS = struct.Struct("<QQ")
_MAGIC = int.from_bytes(b"omnicuda", "little")


class ControlPage:
    """`name` is one that segments.py makes."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self._map = memory
        magic, self.owner, self.nbytes, self.fences, self.words, bus_id, self.handle = _HEADER.unpack_from(memory, 0)
        self.bus_id = bus_id.rstrip(b"\0").decode("ascii", "replace")
        if magic != _MAGIC or len(memory) < self.words_at + self.words * WORD_BYTES:
            raise ProtocolViolation("a tensor on a GPU behind a control page that is none of ours")

    @classmethod
    def create(cls, name: str, *, nbytes: int, fences: int, words: int, bus_id: str, handle: bytes) -> ControlPage:
        """The owner's. OSError where there is no shared memory for it."""
        assert len(handle) == HANDLE_BYTES and len(bus_id) <= 32
        memory = create_map(name, _at(fences) + words * WORD_BYTES)
        _HEADER.pack_into(memory, 0, _MAGIC, os.getpid(), nbytes, fences, words, bus_id.encode("ascii"), handle)
        return cls(name, memory)

    @classmethod
    def attach(cls, name: str) -> ControlPage:
        """Another process's. Raises StaleTensor where it is gone."""
        memory = open_map(name, write=True)
        if len(memory) < _HEADER.size:
            raise ProtocolViolation("a tensor on a GPU behind a control page that is none of ours")
        return cls(name, memory)

    @property
    def memory(self) -> mmap.mmap:
        return self._map

    @property
    def words_at(self) -> int:
        """The byte at which the words begin: a multiple of 8."""
        return _at(self.fences)

    def set_fence(self, index: int, written: bytes, read: bytes) -> None:
        """By the owner: that fence's events are these, and nothing lies behind it yet."""
        assert len(written) == len(read) == HANDLE_BYTES
        _ENTRY.pack_into(self._map, _at(index), 0, 0, written, read)

    def fence(self, index: int) -> tuple[bytes, bytes]:
        """Handles of the events "the tensor is written" and "it has been read"; zeros where there are none yet."""
        *_, written, read = _ENTRY.unpack_from(self._map, _at(index))
        return written, read

    def generation(self, index: int) -> int:
        number: int = _NUMBER.unpack_from(self._map, _at(index))[0]
        return number

    def lay(self, index: int, generation: int) -> None:
        """By the owner: a tensor that nobody has read yet lies behind that fence."""
        _NUMBERS.pack_into(self._map, _at(index), generation, 0)

    def take_away(self, index: int) -> None:
        """By the owner: nothing lies there any more."""
        _NUMBER.pack_into(self._map, _at(index), 0)

    def reader(self, index: int) -> int:
        """The pid of the process that has read what lies there; 0 where none has."""
        number: int = _NUMBER.unpack_from(self._map, _at(index) + _NUMBER.size)[0]
        return number

    def set_reader(self, index: int) -> None:
        _NUMBER.pack_into(self._map, _at(index) + _NUMBER.size, os.getpid())

    @property
    def linked(self) -> bool:
        """Whether the owner still has it."""
        return (SHM / self.name).exists()

    def close(self) -> None:
        self._map.close()

    def unlink(self) -> None:
        (SHM / self.name).unlink(missing_ok=True)


def _at(index: int) -> int:
    return _HEADER.size + index * _ENTRY.size
