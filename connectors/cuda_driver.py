"""The stream memory operations of CUDA's driver, which neither torch nor cupy has: a stream stores a number in the host's memory, or waits
for one there. The driver's library is opened when they are first used.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from typing import Any

import torch

_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_*
_WRITE_BEHIND_ALL = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: behind a barrier for the whole system
_WAIT_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32_t)(*address - number) >= 0


class DriverError(RuntimeError):
    """What the driver says of a call, by the call's name."""


class DriverStreamValues:
    """A StreamValues (cuda_words.py) on torch's current streams."""

    def __init__(self) -> None:
        self._ready = threading.local()  # a thread has no context of a device until the runtime has given it one
        self._mapped: dict[int, int] = {}  # by id of the memory: its address

    def map(self, device: int, memory: mmap.mmap) -> int:
        self._enter(device)
        first = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(first)
        del first  # or the memory could never be closed
        with torch.cuda.device(device):
            _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), _PORTABLE | _MAPPED)
            seen = ctypes.c_uint64()
            _call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), ctypes.c_void_p(address), 0)
        self._mapped[id(memory)] = address
        return seen.value

    def unmap(self, memory: mmap.mmap) -> None:
        _call("cuMemHostUnregister", ctypes.c_void_p(self._mapped.pop(id(memory))))

    def write(self, device: int, address: int, number: int) -> None:
        self._put("cuStreamWriteValue32_v2", device, address, number, _WRITE_BEHIND_ALL)

    def wait(self, device: int, address: int, number: int) -> None:
        self._put("cuStreamWaitValue32_v2", device, address, number, _WAIT_AT_LEAST)

    def _put(self, name: str, device: int, address: int, number: int, how: int) -> None:
        self._enter(device)
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            _call(name, ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(number), how)

    def _enter(self, device: int) -> None:
        known = self._ready.__dict__.setdefault("devices", set())
        if device not in known:
            with torch.cuda.device(device):
                torch.cuda.current_stream(device).query()
            known.add(device)


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(status, ctypes.byref(text))
        raise DriverError(f"CUDA error: {name}: {(text.value or b'unknown').decode('ascii', 'replace')} ({status})")
