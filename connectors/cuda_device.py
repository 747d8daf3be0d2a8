"""The few CUDA calls that connectors/cuda_ipc.py is built on: buffers and events that other processes can open.

torch does the copies and the events, on its own current stream; cupy only takes a buffer from the driver and opens a peer's, which
torch's allocator does not do. Both use the device's primary context. cupy is imported when a buffer is first made or opened.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch

from omni_bus.connectors.cuda_driver import DriverStreamValues
from omni_bus.connectors.cuda_fences import Fence, Fences
from omni_bus.connectors.cuda_words import StreamValues, WordFences
from omni_bus.errors import Overloaded

_BLOCK = 2 << 20  # smaller allocations share one, and a handle opens the whole of it


class Gpu(Protocol):
    """Devices are numbered as in torch's "cuda:N" of this process."""

    words: int  # of a control page, for each fence that it has; 0 where fences lie elsewhere

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """None for a tensor on the CPU."""

    def bus_id(self, device: int) -> str:
        """The device's name for other processes, which may number it otherwise."""

    def device_at(self, bus_id: str) -> int: ...

    def allocate(self, device: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], to be given to `free`. Raises Overloaded where the device has no such memory left."""

    def free(self, buffer: torch.Tensor) -> None: ...

    def handle(self, buffer: torch.Tensor) -> bytes: ...

    def open(self, device: int, handle: bytes, nbytes: int) -> torch.Tensor:
        """Another process's buffer, uint8 [nbytes], to be given to `close`."""

    def close(self, buffer: torch.Tensor) -> None: ...

    def fence(self, device: int) -> Fence:
        """One for this process alone."""

    def fences(self, device: int, page: mmap.mmap, at: int, count: int) -> Fences:
        """Those behind that page, whose `count` words begin at byte `at`."""

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised, contiguous, of that dtype, shape and device."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream of the buffer's device."""


class CudaFence:
    """`free`: a stream of the device on which nothing waits, for `force`; made ahead, since making one may wait for the device."""

    def __init__(self, device: int, event: Any, free: Any = None) -> None:
        self._device = device
        self._event = event
        self._free = free

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def over(self) -> bool:
        return bool(self._event.query())

    def handle(self) -> bytes:
        with torch.cuda.device(self._device):  # an event gets its device when it is first exported or recorded
            return bytes(self._event.ipc_handle())

    def force(self) -> None:
        self._event.record(self._free)


class _EventFences:
    """Fences that are interprocess events of CUDA."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._free = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def new(self) -> Fence:
        return CudaFence(self._device, torch.cuda.Event(interprocess=True), self._free)  # type: ignore[no-untyped-call]

    def open(self, handle: bytes) -> Fence:
        with torch.cuda.device(self._device):
            event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", self._device), handle)  # type: ignore[no-untyped-call]
        return CudaFence(self._device, event, self._free)

    def retire(self, fence: Fence) -> None:
        pass

    def close(self) -> None:
        pass


class _Raw:
    """Device memory that torch did not allocate, in the form in which it takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


FenceKind = Literal["events", "words"]
_WORDS = 32  # for each fence of a page: the older ones of it whose readers the device has not come to yet


class CudaGpu:
    """`fences`: "events" of CUDA, or "words" in shared memory (cuda_words.py), which a peer's death cannot keep from us."""

    def __init__(self, fences: FenceKind = "events") -> None:
        self.words = _WORDS if fences == "words" else 0
        self._values: StreamValues | None = None

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return tensor.device.index if tensor.is_cuda else None

    def bus_id(self, device: int) -> str:
        return str(_runtime().deviceGetPCIBusId(device))

    def device_at(self, bus_id: str) -> int:
        return int(_runtime().deviceGetByPCIBusId(bus_id))

    def allocate(self, device: int, nbytes: int) -> torch.Tensor:
        with _current(device) as runtime:
            try:
                address = runtime.malloc(-(-nbytes // _BLOCK) * _BLOCK)
            except runtime.CUDARuntimeError as error:
                raise Overloaded(f"cuda:{device} has no {nbytes >> 20} MiB left for the tensors between its stages") from error
            assert address % _BLOCK == 0, "a peer would open the block around the buffer, and not the buffer"
            return _tensor(device, address, nbytes)

    def free(self, buffer: torch.Tensor) -> None:
        with _current(buffer.device.index) as runtime:
            runtime.free(buffer.data_ptr())

    def handle(self, buffer: torch.Tensor) -> bytes:
        with _current(buffer.device.index) as runtime:
            return bytes(runtime.ipcGetMemHandle(buffer.data_ptr()))

    def open(self, device: int, handle: bytes, nbytes: int) -> torch.Tensor:
        with _current(device) as runtime:
            return _tensor(device, runtime.ipcOpenMemHandle(handle), nbytes)

    def close(self, buffer: torch.Tensor) -> None:
        with _current(buffer.device.index) as runtime:
            runtime.ipcCloseMemHandle(buffer.data_ptr())

    def fence(self, device: int) -> Fence:
        return CudaFence(device, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def fences(self, device: int, page: mmap.mmap, at: int, count: int) -> Fences:
        if not count:
            return _EventFences(device)
        self._values = self._values or DriverStreamValues()
        return WordFences(self._values, device, page, at, count)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)


def _runtime() -> Any:
    import cupy.cuda.runtime

    return cupy.cuda.runtime


@contextlib.contextmanager
def _current(device: int) -> Iterator[Any]:
    """cupy's runtime calls, with `device` current for torch and for cupy, each of which may have a runtime of its own."""
    runtime = _runtime()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # torch makes the context, if nothing has yet
        before = runtime.getDevice()
        runtime.setDevice(device)
        try:
            yield runtime
        finally:
            runtime.setDevice(before)


def _tensor(device: int, address: int, nbytes: int) -> torch.Tensor:
    tensor = torch.as_tensor(_Raw(address, nbytes), device=torch.device("cuda", device))
    assert tensor.data_ptr() == address, "torch has copied a buffer that it was to use in place"
    return tensor
