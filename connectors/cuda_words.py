"""Fences that are numbers in shared memory: one process's stream writes the next number there, another's waits until it stands there.

    word      number of records that a host has asked for, number of the latest that a stream has come to (each 32 bits, and round they go)

An event of CUDA that a process has recorded before it died is the driver's affair: whether whoever waits for it can be set free, and
whether asking for it keeps the host, is nowhere said. A word is ours: a plain store by the host sets free who waits for it.
"""

from __future__ import annotations

import collections
import mmap
import struct
import threading
from typing import Protocol

from omni_bus.connectors.cuda_fences import HANDLE_BYTES, Fence
from omni_bus.errors import Overloaded, ProtocolViolation

WORD_BYTES = 8
_NUMBER = struct.Struct("<I")
_REACHED = _NUMBER.size  # its place in a word
_HANDLE = struct.Struct("<Q")


class StreamValues(Protocol):
    """What a device's streams do with 32-bit numbers in the host's memory. Only `map` and `unmap` may wait for the device."""

    def map(self, device: int, memory: mmap.mmap) -> int:
        """Let that device's streams reach this memory; the address of its first byte as they see it."""

    def unmap(self, memory: mmap.mmap) -> None: ...

    def write(self, device: int, address: int, number: int) -> None:
        """On the current stream: store the number once all work before it is done and to be seen by every process."""

    def wait(self, device: int, address: int, number: int) -> None:
        """What is put on the current stream from here on runs once that number, or a later one, stands there."""


class WordFence:
    """A Fence (cuda_device.py). One process at a time records it."""

    def __init__(self, values: StreamValues, device: int, memory: mmap.mmap, at: int, address: int, index: int) -> None:
        self._values, self._device = values, device
        self._memory, self._at = memory, at
        self._address = address + at + _REACHED
        self._lock = threading.Lock()
        self._retired = False
        self.index = index

    def record(self) -> None:
        number = (self._recorded + 1) & 0xFFFFFFFF
        self._values.write(self._device, self._address, number)
        _NUMBER.pack_into(self._memory, self._at, number)

    def wait(self) -> None:
        self._values.wait(self._device, self._address, self._recorded)

    def over(self) -> bool:
        return self._retired or ((self._reached - self._recorded) & 0xFFFFFFFF) < 1 << 31

    def handle(self) -> bytes:
        return _HANDLE.pack(self.index + 1).ljust(HANDLE_BYTES, b"\0")  # no handle is all zeros: that is "none yet"

    def force(self) -> None:
        with self._lock:  # a thread may do so just when the word goes to another fence
            if not self._retired:
                self._free()

    def retire(self) -> None:
        with self._lock:
            self._free()
            self._retired = True

    def _free(self) -> None:
        _NUMBER.pack_into(self._memory, self._at + _REACHED, self._recorded)

    @property
    def _recorded(self) -> int:
        number: int = _NUMBER.unpack_from(self._memory, self._at)[0]
        return number

    @property
    def _reached(self) -> int:
        number: int = _NUMBER.unpack_from(self._memory, self._at + _REACHED)[0]
        return number


class WordFences:
    """The fences of one control page, as its owner or a reader has them: `count` words from byte `at` of the page on."""

    def __init__(self, values: StreamValues, device: int, memory: mmap.mmap, at: int, count: int) -> None:
        self._values, self._device = values, device
        self._memory, self._at, self._count = memory, at, count
        self._address = values.map(device, memory)
        self._unused = collections.deque(range(count))  # by their owner

    def new(self) -> Fence:
        if not self._unused:
            raise Overloaded("the streams of a GPU are too far behind: every fence of the tensors between its stages is taken")
        return self._fence(self._unused.popleft())

    def open(self, handle: bytes) -> Fence:
        index = _HANDLE.unpack_from(handle)[0] - 1
        if not 0 <= index < self._count:
            raise ProtocolViolation("a tensor on a GPU behind a fence that is none of ours")
        return self._fence(index)

    def retire(self, fence: Fence) -> None:
        """Its number goes on counting where it stands: whoever still waits for an earlier one is through with a later one, too."""
        assert isinstance(fence, WordFence)
        fence.retire()
        self._unused.append(fence.index)

    def close(self) -> None:
        self._values.unmap(self._memory)

    def _fence(self, index: int) -> WordFence:
        return WordFence(self._values, self._device, self._memory, self._at + index * WORD_BYTES, self._address, index)
