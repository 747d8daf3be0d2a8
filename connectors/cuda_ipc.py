"""CUDA IPC: tensors from one process's GPU memory to another's, with no copy through the host and no wait of the host.

One buffer for each sending process and device, made with the first tensor and opened once by each receiver; in it slots, handed out
and returned. The sender copies a tensor into its slot on its current stream and records an event; the receiver's current stream waits
for that event, copies the tensor out, and records another, before which the slot is not written again. Handles and generations lie on
a control page in shared memory (cuda_control.py), whose name is the ref's `segment`.

A tensor arrives on the device of its sender, also where the receiver's stage computes on another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from omni_bus.connectors.base import DTYPES, Frame, check_ref, dtype_name
from omni_bus.connectors.cuda_control import ControlPage
from omni_bus.connectors.cuda_device import CudaGpu, Gpu
from omni_bus.connectors.cuda_fences import Fence
from omni_bus.connectors.cuda_pool import ALIGNMENT, DevicePool, Pair
from omni_bus.connectors.deaths import Deaths
from omni_bus.errors import Overloaded, ProtocolViolation, StaleTensor
from omni_bus.events import TensorRef
from omni_bus.segments import is_alive, is_segment_name, segment_name

BUFFER_BYTES = 256 << 20
FENCES = 256  # tensors under way at once; each takes two fences, and the driver has about a thousand interprocess events
# Of control pages, over all senders of the process, far above those of its shared memory segments.
_numbers = itertools.count(1 << 32)


class CudaIpcConnector:
    name = "cuda_ipc"

    def __init__(self, tag: str, gpu: Gpu | None = None, *, buffer_bytes: int = BUFFER_BYTES, fences: int = FENCES) -> None:
        self._tag = tag
        self._gpu: Gpu = gpu or CudaGpu()
        self._buffer_bytes = buffer_bytes
        self._fences = fences
        self._pools: dict[int, DevicePool] = {}  # by device
        self._by_segment: dict[str, DevicePool] = {}
        self._peers: dict[str, _Peer] = {}  # by segment
        self._deaths = Deaths()

    def carries(self, tensor: torch.Tensor) -> bool:
        return self._gpu.device_of(tensor) is not None

    def load(self, device: int) -> None:
        """Import and initialise what a receiver needs, so that its first tensor does not wait for it."""
        self._gpu.bus_id(device)

    def prepare(self, device: int) -> None:
        """Make the buffer now, so that the first tensor does not wait for it. Raises Overloaded where there is no memory for it."""
        if device in self._pools:
            return
        name = segment_name(self._tag, next(_numbers))
        try:
            pool = DevicePool(self._gpu, device, name, self._buffer_bytes, self._fences, self._deaths)
        except OSError as error:
            raise Overloaded(f"no shared memory for the tensors of a GPU: {error.strerror}") from error
        self._pools[device] = self._by_segment[name] = pool

    def put(self, name: str, tensor: torch.Tensor, frames: list[Frame]) -> TensorRef | None:
        dtype = dtype_name(tensor)
        device = self._gpu.device_of(tensor)
        assert device is not None, "a tensor on the CPU has no way through cuda_ipc"
        self.prepare(device)
        pool = self._pools[device]
        slot = pool.write(tensor.detach())
        if slot is None:
            return None
        offset, generation, fence = slot
        nbytes = tensor.numel() * tensor.element_size()
        return TensorRef(name, self.name, dtype, tuple(tensor.shape), nbytes, pool.page.name, offset, generation, fence)

    def get(self, ref: TensorRef, frames: Sequence[Frame]) -> torch.Tensor:
        check_ref(ref)
        pool = self._by_segment.get(ref.segment)
        if pool is not None:
            return self._read(ref, pool.page, pool.buffer, pool.fence)
        peer = self._peers.get(ref.segment)
        if peer is None:
            if not is_segment_name(ref.segment):
                raise ProtocolViolation("a tensor in a segment of an impossible name")
            peer = self._peers[ref.segment] = _Peer(self._gpu, ref.segment)
        if not is_alive(peer.page.owner):
            raise StaleTensor("the GPU buffer of a tensor is gone with its owner")
        try:
            return self._read(ref, peer.page, peer.buffer, peer.fence)
        finally:
            peer.through.record()

    def release(self, ref: TensorRef) -> None:
        self._by_segment[ref.segment].free(ref.generation, ref.fence)

    @property
    def used(self) -> int:
        return sum(pool.used for pool in self._pools.values())

    @property
    def attached(self) -> tuple[str, ...]:
        """Names of the control pages of the peers whose buffers are open here."""
        return tuple(self._peers)

    def prune(self) -> None:
        """Close the buffers of peers that have closed them, or have died, as soon as our own copies out of them are through."""
        for name, peer in list(self._peers.items()):
            if peer.gone and peer.through.over():
                self._peers.pop(name).close()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        for pool in self._pools.values():
            pool.close()
        self._peers.clear()
        self._pools.clear()
        self._by_segment.clear()
        self._deaths.close()

    def _read(self, ref: TensorRef, page: ControlPage, buffer: torch.Tensor, fence: Callable[[int], Pair]) -> torch.Tensor:
        """A copy that is under way on the current stream."""
        if not 0 <= ref.fence < page.fences or ref.offset % ALIGNMENT or ref.offset + ref.nbytes > page.nbytes:
            raise ProtocolViolation("a tensor beyond the buffer on its GPU")
        if ref.generation == 0 or page.generation(ref.fence) != ref.generation:
            raise StaleTensor("the GPU buffer's slot of a tensor has been reused")
        events = fence(ref.fence)
        source = buffer[ref.offset : ref.offset + ref.nbytes].view(DTYPES[ref.dtype]).view(ref.shape)
        target = self._gpu.empty(source)
        page.set_reader(ref.fence)
        events.written.wait()
        if ref.nbytes:
            self._gpu.copy(target, source)
        events.read.record()
        if page.generation(ref.fence) != ref.generation:
            raise StaleTensor("the GPU buffer's slot of a tensor has been reused")
        self._deaths.note(page.owner, events.written)
        return target


class _Peer:
    """Another process's buffer, opened. Raises StaleTensor where its owner is gone."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu = gpu
        self.page = ControlPage.attach(name)
        if self.gone:
            self.page.close()
            raise StaleTensor("the GPU buffer of a tensor is gone with its owner")
        device = gpu.device_at(self.page.bus_id)
        self.buffer = gpu.open(device, self.page.handle, self.page.nbytes)
        self.through: Fence = gpu.fence(device)
        self._fences = gpu.fences(device, self.page.memory, self.page.words_at, self.page.words)
        self._pairs: dict[int, tuple[tuple[bytes, bytes], Pair]] = {}  # by fence, with the handles that were opened
        for index in range(self.page.fences):
            if any(self.page.fence(index)[0]):
                self.fence(index)

    @property
    def gone(self) -> bool:
        return not self.page.linked or not is_alive(self.page.owner)

    def fence(self, index: int) -> Pair:
        handles = self.page.fence(index)
        known = self._pairs.get(index)
        if known is None or known[0] != handles:
            written, read = (self._fences.open(handle) for handle in handles)
            known = self._pairs[index] = (handles, Pair(index, written, read))
        return known[1]

    def close(self) -> None:
        self._pairs.clear()
        self._fences.close()
        self._gpu.close(self.buffer)
        self.page.close()
