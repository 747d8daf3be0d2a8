"""Which CUDA devices this machine has, asked of the driver in a process of its own: no torch, and no CUDA state left in ours."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import msgspec

DEVICE = re.compile(r"cpu|cuda:(?P<index>\d+)")

_ASK_DRIVER = """
import ctypes, json
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("[]")
    raise SystemExit
count, device, name, size = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
found = []
if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for index in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, 256, device)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        found.append({"name": name.value.decode(), "memory": size.value})
print(json.dumps(found))
"""


class CudaDevice(msgspec.Struct, frozen=True):
    name: str
    memory: int  # bytes


@functools.cache
def cuda_devices() -> tuple[CudaDevice, ...]:
    """In the order of `cuda:N`, as CUDA_VISIBLE_DEVICES leaves them. Empty without a driver or without a device."""
    try:
        asked = subprocess.run([sys.executable, "-I", "-S", "-c", _ASK_DRIVER], capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return ()
    return msgspec.convert(json.loads(asked.stdout or b"[]"), tuple[CudaDevice, ...])


def missing_device(device: str) -> str | None:
    """What is wrong with a device's name, or why it is not to be had here; None where all is well."""
    match = DEVICE.fullmatch(device)
    if match is None:
        return f'"{device}" is no device; write "cpu" or "cuda:0"'
    if match["index"] is None:
        return None
    found = len(cuda_devices())
    if int(match["index"]) < found:
        return None
    if not found:
        return f"wants {device}, and this machine has no CUDA device"
    return f"wants {device}, and this machine has {found} CUDA device{'s' if found > 1 else ''}, up to cuda:{found - 1}"


def usable_cores() -> int:
    """CPU cores this process may use: its affinity, and the quota of its control group where there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
