"""`omni-bus up` for a measurement: ready within a limit or not at all, its logs kept, no process of it left behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from omni_bus.process import die_with_parent

READY = re.compile(rb"omni-bus: ready on (http://\S+)")
STOP_S = 20.0  # the server itself stops in order within 5


class MeasuredServer:
    """A child process and all of its own children. `scratch`: a directory with a short path, for run directory and logs."""

    def __init__(self, config: pathlib.Path, port: int, sets: Sequence[str], scratch: pathlib.Path) -> None:
        self.address = ""
        self._scratch = scratch
        self._log = scratch / "up.log"
        self._ever: set[int] = set()
        command = [sys.executable, "-m", "omni_bus", "up", str(config), "--port", str(port)]
        command += [part for setting in sets for part in ("--set", setting)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "XDG_RUNTIME_DIR": str(scratch)},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def wait_ready(self, limit: float) -> float | None:
        """Seconds until it served; None where it ended, or did not within `limit` seconds."""
        assert self._process.stdout is not None
        began, said = time.monotonic(), b""
        while not (found := READY.search(said)):
            left = began + limit - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            block = os.read(self._process.stdout.fileno(), 65536)
            if not block:
                return None
            said += block
        self.address = found[1].decode()
        self._ever |= descendants(self._process.pid)
        return time.monotonic() - began

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the supervisor does."""
        return self._process.poll() is None

    def tails(self, lines: int = 120) -> str:
        """The last lines of what the supervisor and each process said."""
        parts = []
        for log in (self._log, *sorted(self._scratch.glob("omni-bus-*/*.log"))):
            tail = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-lines:]
            parts.append("\n".join((f"==== {log.name}", *tail)))
        return "\n".join(parts)

    def stop(self) -> list[int]:
        """Stop in order, and whatever will not, at once. Returns the processes that had to be killed."""
        self._ever |= descendants(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        killed = [pid for pid in (self._process.pid, *sorted(self._ever)) if alive(pid)]
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return killed


def descendants(pid: int) -> set[int]:
    """Process ids of the children of `pid`, and of theirs."""
    parents: dict[int, int] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and was not waited for does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
