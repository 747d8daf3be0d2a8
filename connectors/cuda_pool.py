"""One sender's buffer on one device: slots handed out, fenced, and handed out again only after their reader is through.

Each tensor has a slot and a fence; a fence is two events: `written`, which only the sender records, after its copy into the slot, and
`read`, which only readers record, after their copy out of it. A returned slot stays out of the free list until both are over. Only
where that leaves no room is one reused earlier: then the sender's stream, and not the host, waits for the events before it
overwrites the slot. Fences are used in turn, so that a reader which was overtaken between its two looks at the generation finds its
fence still unused.
"""

from __future__ import annotations

import collections
import dataclasses
import os

import torch

from omni_bus.connectors.cuda_control import ControlPage
from omni_bus.connectors.cuda_device import Gpu
from omni_bus.connectors.cuda_fences import Fence
from omni_bus.connectors.deaths import Deaths
from omni_bus.connectors.free_list import FreeList
from omni_bus.errors import TooLarge
from omni_bus.segments import is_alive

ALIGNMENT = 512  # as cudaMalloc's own: any dtype, and whole sectors
READY_FENCES = 32  # made with the buffer, and opened with it by a receiver; more only where more tensors are under way


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """The two events of one fence."""

    index: int
    written: Fence
    read: Fence


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    start: int
    end: int
    fence: Pair
    reader: int = 0  # pid, once returned; 0 where nobody has read it

    def free(self) -> bool:
        """Whether nothing on any device reads or writes it any more. A dead process's work on the device has ended with it."""
        if not self.fence.written.over():
            return False
        return self.fence.read.over() or (self.reader not in (0, os.getpid()) and not is_alive(self.reader))


class DevicePool:
    def __init__(self, gpu: Gpu, device: int, name: str, nbytes: int, fences: int, deaths: Deaths) -> None:
        """Takes `nbytes` of the device. `name`: of the control page."""
        self._gpu = gpu
        self._deaths = deaths
        self._device = device
        self.buffer = gpu.allocate(device, nbytes)
        try:
            self.page = ControlPage.create(
                name,
                nbytes=nbytes,
                fences=fences,
                words=fences * gpu.words,
                bus_id=gpu.bus_id(device),
                handle=gpu.handle(self.buffer),
            )
        except OSError:
            gpu.free(self.buffer)
            raise
        self._fences = gpu.fences(device, self.page.memory, self.page.words_at, self.page.words)
        self._room = FreeList(nbytes)
        self._generation = 0
        self._live: dict[int, _Slot] = {}  # by fence
        self._returned: collections.deque[_Slot] = collections.deque()  # by age; their readers may not be through
        self._overwritten: list[_Slot] = []  # of those, the ones whose range was given back before
        self._made = min(READY_FENCES, fences)
        self._idle = collections.deque(self._new_fence(index) for index in range(self._made))

    @property
    def used(self) -> int:
        """Slots handed out and not returned."""
        return len(self._live)

    def write(self, tensor: torch.Tensor) -> tuple[int, int, int] | None:
        """(offset, generation, fence) of a copy that is under way on the current stream; None: no room until a slot is returned.

        Raises TooLarge for what exceeds the buffer.
        """
        nbytes = tensor.numel() * tensor.element_size()
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        if size > self._room.size:
            raise TooLarge(f"a tensor of {nbytes} bytes exceeds the {self._room.size} bytes that one process shares on a GPU")
        self._settle()
        fence = self._take_fence()
        if fence is None:
            return None
        start = self._room.allocate(size)
        while start is None and self._returned:
            self._reuse_oldest()
            start = self._room.allocate(size)
        if start is None:
            self._idle.appendleft(fence)
            return None
        slot = self._live[fence.index] = _Slot(start, start + size, fence)
        for past in self._overwritten:
            if past.start < slot.end and slot.start < past.end:
                past.fence.written.wait()
                past.fence.read.wait()
                self._deaths.note(past.reader, past.fence.read)
        try:
            if nbytes:
                self._gpu.copy(self.buffer[start : start + nbytes].view(tensor.dtype).view(tensor.shape), tensor)
            fence.written.record()
        except Exception:
            self._returned.append(self._live.pop(fence.index))
            raise
        self._generation += 1
        self.page.lay(fence.index, self._generation)
        return start, self._generation, fence.index

    def free(self, generation: int, index: int) -> None:
        assert self.page.generation(index) == generation, "a slot returned twice"
        # First the generation, then the look at the events: a reader records its event before it looks at the generation again.
        self.page.take_away(index)
        self._returned.append(dataclasses.replace(self._live.pop(index), reader=self.page.reader(index)))

    def fence(self, index: int) -> Pair:
        """For a reader in this process. KeyError for one behind which nothing lies."""
        return self._live[index].fence

    def close(self) -> None:
        """Give the memory back, whoever reads it: a process that has it open keeps it until it closes it."""
        self.page.unlink()
        self._fences.close()
        self.page.close()
        self._gpu.free(self.buffer)

    def _settle(self) -> None:
        """Give back the ranges and fences of returned slots whose readers are through."""
        for _ in range(len(self._returned)):
            slot = self._returned.popleft()
            if slot.free():
                self._room.free(slot.start)
                if slot.fence.read.over():
                    self._idle.append(slot.fence)
                else:  # its reader has died, and nobody knows whether the device will still come to that record
                    self._retire(slot.fence)
                    self._idle.append(self._new_fence(slot.fence.index))
            else:
                self._returned.append(slot)
        through = [slot for slot in self._overwritten if slot.free()]
        for slot in through:
            self._overwritten.remove(slot)
            self._retire(slot.fence)

    def _take_fence(self) -> Pair | None:
        if self._idle:
            return self._idle.popleft()
        if self._made < self.page.fences:
            self._made += 1
            return self._new_fence(self._made - 1)
        if not self._returned:
            return None
        self._reuse_oldest()
        return self._idle.popleft()

    def _reuse_oldest(self) -> None:
        """Its range to the free list, its number to a new fence; its own events go on being waited for."""
        fence = self._new_fence(self._returned[0].fence.index)  # may raise: nothing has changed then
        slot = self._returned.popleft()
        self._room.free(slot.start)
        self._overwritten.append(slot)
        self._idle.append(fence)

    def _new_fence(self, index: int) -> Pair:
        fence = Pair(index, self._fences.new(), self._fences.new())
        self.page.set_fence(index, fence.written.handle(), fence.read.handle())
        return fence

    def _retire(self, fence: Pair) -> None:
        self._fences.retire(fence.written)
        self._fences.retire(fence.read)
