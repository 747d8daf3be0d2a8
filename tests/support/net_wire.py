"""`python net_wire.py FAR NEAR_ADDRESS FAR_ADDRESS`: a cable between this network namespace and FAR, with latency, loss, and a cut.

Two TUN devices, one in each namespace, and this process between them: every IP packet passes through it, later, or never. It says
"ready", then takes commands on stdin: `delay SECONDS` (each way), `loss FRACTION`, `cut`, `heal`. Needs root and /dev/net/tun, no kernel
module for traffic control.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import random
import struct
import subprocess
import sys

_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_TUN_WITHOUT_HEADER = 0x1001
_NEWNET = 0x40000000  # linux/sched.h: CLONE_NEWNET
MTU = 1400
DEVICE = "obwire"


def enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def tun(name: str, address: str, peer: str) -> int:
    """A device of the present namespace, up; its descriptor reads and writes IP packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))
    for command in (f"address add {address} peer {peer} dev {name}", f"link set {name} mtu {MTU} up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return descriptor


class Cable:
    def __init__(self, near: int, far: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._delay = 0.0
        self._loss = 0.0
        self._whole = True
        self._dice = random.Random(1)
        for source, sink in ((near, far), (far, near)):
            self._loop.add_reader(source, self._pass, source, sink)

    def command(self, line: str) -> None:
        match line.split():
            case ["delay", seconds]:
                self._delay = float(seconds)
            case ["loss", fraction]:
                self._loss = float(fraction)
            case ["cut" | "heal" as what]:
                self._whole = what == "heal"

    def _pass(self, source: int, sink: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(source, 65536)
            except BlockingIOError:
                return
            if self._whole and self._dice.random() >= self._loss:
                # The loop calls what is due at the same moment in no certain order; nor does a network.
                self._loop.call_later(self._delay, self._arrive, sink, packet)

    def _arrive(self, sink: int, packet: bytes) -> None:
        if self._whole:
            try:
                os.write(sink, packet)
            except OSError:
                return  # a full queue loses packets, too


async def main(near: int, far: int) -> None:
    cable = Cable(near, far)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print("ready", flush=True)
    while line := await commands.readline():
        cable.command(line.decode())
        print("done", flush=True)


if __name__ == "__main__":
    far_name, near_address, far_address = sys.argv[1:]
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{far_name}", os.O_RDONLY)
    near_end = tun(f"{DEVICE}{near_address.split('.')[2]}", near_address, far_address)
    enter(there)
    far_end = tun(DEVICE, far_address, near_address)
    enter(here)
    asyncio.run(main(near_end, far_end))
