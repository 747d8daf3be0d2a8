"""A GPU in memory, for the logic of connectors/cuda_ipc.py: streams whose work is put off until `run` takes it up, in any order that
the events allow. Only what `connectors/cuda_device.py` asks of CUDA is here.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import mmap
import random
import struct
from collections.abc import Callable

import torch

from omni_bus.connectors.cuda_fences import HANDLE_BYTES, Fence, Fences
from omni_bus.connectors.cuda_words import WordFences


class OnGpu(torch.Tensor):
    """A tensor that passes for one on the device."""


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnGpu)


@dataclasses.dataclass(eq=False)
class Event:
    recorded: int = 0  # records that the hosts have asked for
    reached: int = 0  # the latest that a stream has come to

    @property
    def over(self) -> bool:
        return self.reached >= self.recorded


@dataclasses.dataclass(eq=False)
class Stream:
    """Work in order; each entry returns whether it could be done."""

    work: collections.deque[Callable[[], bool]] = dataclasses.field(default_factory=collections.deque)
    held: bool = False  # the device does not get to it

    def put(self, entry: Callable[[], bool]) -> None:
        self.work.append(entry)

    def step(self) -> bool:
        if self.held or not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True


class Machine:
    """One device, which several FakeGpus (processes) share."""

    def __init__(self, seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.numbers = itertools.count(1)
        self.streams: list[Stream] = []
        self.memory: dict[bytes, torch.Tensor] = {}
        self.events: dict[bytes, Event] = {}
        self.allocated = 0  # bytes that are not freed
        self.opened = 0  # buffers open in other processes

    def new_handle(self) -> bytes:
        return next(self.numbers).to_bytes(HANDLE_BYTES, "little")

    def run(self, steps: int | None = None) -> None:
        """So many steps of streams taken by chance; all that can be done for None."""
        while steps is None or steps > 0:
            if not any(stream.step() for stream in self.dice.sample(self.streams, len(self.streams))):
                return
            steps = None if steps is None else steps - 1

    @property
    def pending(self) -> int:
        return sum(len(stream.work) for stream in self.streams)


class FakeFence:
    def __init__(self, machine: Machine, stream: Stream, event: Event) -> None:
        self._machine, self._stream, self.event = machine, stream, event

    def _record_on(self, stream: Stream) -> None:
        event = self.event
        event.recorded += 1
        number = event.recorded

        def reach() -> bool:
            event.reached = max(event.reached, number)
            return True

        stream.put(reach)

    def record(self) -> None:
        self._record_on(self._stream)

    def wait(self) -> None:
        event, number = self.event, self.event.recorded
        self._stream.put(lambda: event.reached >= number)

    def over(self) -> bool:
        return self.event.over

    def handle(self) -> bytes:
        handle = self._machine.new_handle()
        self._machine.events[handle] = self.event
        return handle

    def force(self) -> None:
        self._record_on(fresh := Stream())
        while fresh.step():
            pass


class FakeEvents:
    """Fences that are events of the machine."""

    def __init__(self, machine: Machine, stream: Stream) -> None:
        self._machine, self._stream = machine, stream

    def new(self) -> FakeFence:
        return FakeFence(self._machine, self._stream, Event())

    def open(self, handle: bytes) -> FakeFence:
        return FakeFence(self._machine, self._stream, self._machine.events[handle])

    def retire(self, fence: Fence) -> None:
        pass

    def close(self) -> None:
        pass


class FakeStreamValues:
    """Numbers in memory that the one stream writes and waits for. Addresses are offsets."""

    def __init__(self, machine: Machine, stream: Stream) -> None:
        self._machine, self._stream = machine, stream
        self._memory: dict[int, tuple[int, mmap.mmap]] = {}  # by address of the first byte: its size, and itself

    def map(self, device: int, memory: mmap.mmap) -> int:
        address = next(self._machine.numbers) << 32
        self._memory[address] = (len(memory), memory)
        return address

    def unmap(self, memory: mmap.mmap) -> None:
        for address, (_, mapped) in list(self._memory.items()):
            if mapped is memory:
                del self._memory[address]

    def write(self, device: int, address: int, number: int) -> None:
        memory, at = self._find(address)

        def store() -> bool:
            struct.pack_into("<I", memory, at, number)
            return True

        self._stream.put(store)

    def wait(self, device: int, address: int, number: int) -> None:
        memory, at = self._find(address)

        def there() -> bool:
            found: int = struct.unpack_from("<I", memory, at)[0]
            return ((found - number) & 0xFFFFFFFF) < 1 << 31

        self._stream.put(there)

    def _find(self, address: int) -> tuple[mmap.mmap, int]:
        memory = self._memory[address >> 32 << 32][1]
        return memory, address & 0xFFFFFFFF


class FakeGpu:
    """One process's view: its one stream, and whatever memory and events it has made or opened. `words`: as in Gpu."""

    def __init__(self, machine: Machine, words: int = 0) -> None:
        self.machine = machine
        self.words = words
        self.stream = Stream()
        self.values = FakeStreamValues(machine, self.stream)
        machine.streams.append(self.stream)

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return 0 if isinstance(tensor, OnGpu) else None

    def bus_id(self, device: int) -> str:
        return f"0000:{device:02d}:00.0"

    def device_at(self, bus_id: str) -> int:
        return int(bus_id.split(":")[1])

    def allocate(self, device: int, nbytes: int) -> torch.Tensor:
        self.machine.allocated += nbytes
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def free(self, buffer: torch.Tensor) -> None:
        self.machine.allocated -= buffer.numel()

    def handle(self, buffer: torch.Tensor) -> bytes:
        handle = self.machine.new_handle()
        self.machine.memory[handle] = buffer
        return handle

    def open(self, device: int, handle: bytes, nbytes: int) -> torch.Tensor:
        self.machine.opened += 1
        assert self.machine.memory[handle].numel() == nbytes
        return self.machine.memory[handle]

    def close(self, buffer: torch.Tensor) -> None:
        self.machine.opened -= 1

    def fence(self, device: int) -> FakeFence:
        return FakeFence(self.machine, self.stream, Event())

    def fences(self, device: int, page: mmap.mmap, at: int, count: int) -> Fences:
        return WordFences(self.values, device, page, at, count) if count else FakeEvents(self.machine, self.stream)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def work() -> bool:
            target.copy_(source)
            return True

        self.stream.put(work)
