"""A GPU in the host's memory that real processes share: buffers are files of shared memory, a stream is a thread that does its work in order
and dies with its process. For bench/cuda_ipc_peer.py, so that connectors/cuda_ipc.py meets real deaths without a card.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import queue
import struct
import threading
import time
from collections.abc import Callable

import torch

from omni_bus.connectors.cuda_fences import HANDLE_BYTES, Fence, Fences
from omni_bus.connectors.cuda_words import WordFence, WordFences
from omni_bus.connectors.segment import create_map, open_map
from omni_bus.segments import SHM, segment_name
from tests.support.fake_gpu import OnGpu, on_gpu

_LOOK_S = 0.0005  # how often a stream that waits for a number looks at it: the device's own affair


class HostStream:
    """What is put on it is done in order, by a thread that nobody waits for."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def mark(self) -> threading.Event:
        """Set when the stream comes to it."""
        reached = threading.Event()
        self.put(reached.set)
        return reached

    def _run(self) -> None:
        while True:
            self._work.get()()


class _LocalFence:
    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._latest = threading.Event()
        self._latest.set()

    def record(self) -> None:
        self._latest = self._stream.mark()

    def wait(self) -> None:
        self._stream.put(self._latest.wait)

    def over(self) -> bool:
        return self._latest.is_set()

    def handle(self) -> bytes:
        raise AssertionError("a fence of one process")

    def force(self) -> None:
        self._latest.set()


class HostStreamValues:
    def __init__(self, stream: HostStream) -> None:
        self._stream = stream

    def map(self, device: int, memory: mmap.mmap) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def unmap(self, memory: mmap.mmap) -> None:
        self._stream.mark().wait(30)  # what is still to be written there would have nowhere to go

    def write(self, device: int, address: int, number: int) -> None:
        self._stream.put(lambda: ctypes.memmove(address, struct.pack("<I", number), 4))

    def wait(self, device: int, address: int, number: int) -> None:
        def there() -> None:
            while ((ctypes.c_uint32.from_address(address).value - number) & 0xFFFFFFFF) >= 1 << 31:
                time.sleep(_LOOK_S)

        self._stream.put(there)


class HostGpu:
    words = 32

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._numbers = itertools.count()
        self._names: dict[int, str] = {}  # of our buffers, by address
        self._buffers: dict[int, mmap.mmap] = {}
        self.stream = HostStream()
        self.values = HostStreamValues(self.stream)
        self.opened = 0  # bytes of other processes' buffers

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return 0 if isinstance(tensor, OnGpu) else None

    def bus_id(self, device: int) -> str:
        return "0000:00:00.0"

    def device_at(self, bus_id: str) -> int:
        return 0

    def allocate(self, device: int, nbytes: int) -> torch.Tensor:
        name = segment_name(self._tag, next(self._numbers))
        buffer = self._keep(create_map(name, nbytes))
        self._names[buffer.data_ptr()] = name
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        (SHM / self._names.pop(buffer.data_ptr())).unlink()

    def handle(self, buffer: torch.Tensor) -> bytes:
        return self._names[buffer.data_ptr()].encode("ascii").ljust(HANDLE_BYTES, b"\0")

    def open(self, device: int, handle: bytes, nbytes: int) -> torch.Tensor:
        self.opened += nbytes
        return self._keep(open_map(handle.rstrip(b"\0").decode("ascii"), write=True))

    def close(self, buffer: torch.Tensor) -> None:
        self.opened -= buffer.numel()

    def fence(self, device: int) -> Fence:
        return _LocalFence(self.stream)

    def fences(self, device: int, page: mmap.mmap, at: int, count: int) -> Fences:
        return WordFences(self.values, device, page, at, count)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        return on_gpu(torch.empty(like.shape, dtype=like.dtype))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.stream.put(lambda: target.copy_(source))

    def _keep(self, memory: mmap.mmap) -> torch.Tensor:
        """Mapped until this process ends: a device's memory is no file that a late copy could miss."""
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._buffers[buffer.data_ptr()] = memory
        return buffer


class HostCard:
    """A Card of bench/cuda_ipc_peer.py."""

    fence_class = WordFence

    def __init__(self, tag: str) -> None:
        self.gpu = HostGpu(f"{tag}m")

    def busy(self, ms: float) -> None:
        if ms:
            self.gpu.stream.put(lambda: time.sleep(ms / 1e3))

    def full(self, value: int, nbytes: int) -> torch.Tensor:
        tensor = on_gpu(torch.empty(nbytes // 4, dtype=torch.int32))
        self.gpu.stream.put(lambda: tensor.fill_(value))
        return tensor

    def flags(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.bool)

    def flag_other_than(self, flags: torch.Tensor, number: int, tensor: torch.Tensor) -> None:
        def look() -> None:
            flags[number] = bool((tensor != number).any())

        self.gpu.stream.put(look)

    def mark(self) -> Callable[[], bool]:
        return self.gpu.stream.mark().is_set

    def synchronize(self) -> None:
        self.gpu.stream.mark().wait()

    def free_memory(self) -> int:
        return (1 << 40) - self.gpu.opened
