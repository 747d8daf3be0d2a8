"""Another host for tests: a network namespace with an address of its own, at the end of a cable with latency, loss and a cut."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

WIRE = pathlib.Path(__file__).with_name("net_wire.py")


class NetHost:
    """`near` is this host's address on the cable, `far` the other one's."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.near = f"10.213.{number}.1"
        self.far = f"10.213.{number}.2"
        self.inside = ("ip", "netns", "exec", name)
        self._wire = subprocess.Popen(
            [sys.executable, str(WIRE), name, self.near, self.far], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._heard("ready")

    def network(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Latency each way, and the part of all packets that is lost."""
        self._tell(f"delay {delay_s}")
        self._tell(f"loss {loss}")

    def cut(self) -> None:
        """Nothing passes any more, and neither end is told."""
        self._tell("cut")

    def heal(self) -> None:
        self._tell("heal")

    def close(self) -> None:
        self._wire.communicate(timeout=30)

    def _tell(self, line: str) -> None:
        assert self._wire.stdin is not None
        self._wire.stdin.write(line + "\n")
        self._wire.stdin.flush()
        self._heard("done")

    def _heard(self, word: str) -> None:
        assert self._wire.stdout is not None
        assert self._wire.stdout.readline().strip() == word, f"the cable to {self.name} broke"


def missing() -> str:
    """Why there can be no such host here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip`: install iproute2"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    tried = subprocess.run(["ip", "netns", "add", f"obtry{os.getpid()}"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", f"obtry{os.getpid()}"], check=True)
    return ""


@contextlib.contextmanager
def net_host(number: int) -> Iterator[NetHost]:
    """`number`: from 1 to 254, of the cable's subnet; one at a time on a machine."""
    name = f"ob{os.getpid()}x{number}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        host = NetHost(name, number)
        try:
            yield host
        finally:
            host.close()
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
