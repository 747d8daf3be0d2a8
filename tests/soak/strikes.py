"""Faults: which there are, whom they may strike, how each is done, and which ends of a request each explains."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import random
import resource
import signal
import time
from collections.abc import Iterable

import psutil

from tests.soak.crew import Crew, kind_of
from tests.support.cut_socket import cut_tcp_sockets, cut_unix_sockets
from tests.support.steady_load import BROKEN

INSIDE = pathlib.Path(__file__).parent / "inside"  # what makes a process misbehave at a signal
HANG, RAISE, NO_MEMORY, TRIM = (signal.SIGRTMIN + number for number in range(1, 5))
IN_A_STEP = {"hang": HANG, "raise": RAISE, "no memory": NO_MEMORY}
FULL = 128 << 10  # bytes of a file while shared memory is full: less than one tensor of a sound needs
REMEMBERED_S = (
    90.0  # for how long a fault may explain a refusal: a worker that died again and again is started again after 30 s
)

STARTS_S = 2.0  # Python, on a busy machine

ALWAYS = ("kill", "stop", "pause", "cut")
WAYS = {
    "supervisor": ("pause", "cut"),
    "broker": ALWAYS,
    "api": ALWAYS,
    "far command": ("kill", "leave"),
    "far worker": (*ALWAYS, "raise"),
}
ENDS_ITS_PROCESS = {"kill", "stop", "hang", "leave"}
HEALS_IN_PLACE = {"raise", "no memory", "full"}
OF_A_STAGE = (*ALWAYS, "kill", "hang", "raise", "raise", "no memory", "no memory", "full")


@dataclasses.dataclass(slots=True)
class Fault:
    """Times are monotonic. `back_s`: until another process served in the victim's place, where it was ended; `served_s`: until all
    places had an answer that they had begun to ask for afterwards."""

    at: float
    victim: str
    way: str
    pid: int
    back_s: float | None = None
    served_s: float | None = None

    @property
    def kind(self) -> str:
        return kind_of(self.victim)

    @property
    def of_a_worker(self) -> bool:
        return self.kind not in ("supervisor", "broker", "api")

    def explains(self, end: str) -> bool:
        match end:
            case "replica_lost" | "no_ready_replica":
                return self.kind == "broker" or (self.of_a_worker and self.way not in HEALS_IN_PLACE)
            case "broker_lost":
                return self.kind in ("broker", "api")
            case "stage_failed":
                return self.way == "raise"
            case "out_of_memory":
                return self.way == "no memory"
            case "overloaded":
                return self.way == "full"
            case "stale_tensor":
                return self.of_a_worker and self.way not in HEALS_IN_PLACE
            case "closed_fault" | "closed_restart":
                return self.kind == "api"
        return end == BROKEN and self.kind == "api" and self.way != "cut"


class Strikes:
    """The same seed draws the same faults, as long as those whom they strike are there."""

    def __init__(self, crew: Crew, draw: random.Random) -> None:
        self.faults: list[Fault] = []
        self._crew = crew
        self._draw = draw
        self._kinds = (*crew.stages, *crew.stages, "far worker", "far command", "broker", "api", "supervisor")
        self._full: set[asyncio.Task[None]] = set()

    def pause_s(self) -> float:
        """Before the next one."""
        return self._draw.uniform(0.1, 2.0)

    async def strike(self) -> None:
        kind = self._draw.choice(self._kinds)
        way = self._draw.choice(WAYS.get(kind, OF_A_STAGE))
        which, pause_s = self._draw.random(), self._draw.uniform(0.1, 1.5)
        names = self._crew.of_kind(kind)
        process = self._crew.processes().get(names[int(which * len(names))]) if names else None
        if process is None:
            return  # it is just being started again
        victim = names[int(which * len(names))]
        with contextlib.suppress(psutil.NoSuchProcess):
            if way in IN_A_STEP and not _listens(process, IN_A_STEP[way]):
                return  # it has only just been started
            if way == "leave" and time.time() - process.create_time() < STARTS_S:
                return  # Ctrl-C before the first line of ours: Python itself prints a traceback
            self.faults.append(Fault(time.monotonic(), victim, way, process.pid))
            print(f"{way:9s} {victim}", flush=True)
            await self._do(way, kind, process, pause_s)

    async def over(self) -> None:
        """What lasts for a while has ended."""
        await asyncio.gather(*self._full)

    async def _do(self, way: str, kind: str, process: psutil.Process, pause_s: float) -> None:
        match way:
            case "kill":
                process.kill()
            case "stop":
                process.suspend()  # for good: others have to notice
            case "pause":
                process.suspend()
                await asyncio.sleep(pause_s)
                process.resume()
            case "leave":
                process.send_signal(signal.SIGINT)
            case "full":
                self._full.add(asyncio.create_task(_no_shared_memory(process, 2 * pause_s)))
            case "cut" if kind == "far worker":
                cut_tcp_sockets(process.pid)
            case "cut":
                cut_unix_sockets(process.pid, "broker.sock")
            case _:
                process.send_signal(IN_A_STEP[way])


async def _no_shared_memory(process: psutil.Process, seconds: float) -> None:
    """Linux's own limit on a file's size, set on the running process: a segment cannot be made."""
    with contextlib.suppress(psutil.NoSuchProcess):
        before = process.rlimit(resource.RLIMIT_FSIZE)
        process.rlimit(resource.RLIMIT_FSIZE, (FULL, before[1]))
        await asyncio.sleep(seconds)
        process.rlimit(resource.RLIMIT_FSIZE, before)


def _listens(process: psutil.Process, number: int) -> bool:
    """Whether the process catches that signal by now: before, it would end by it."""
    return bool(_caught(process.pid) >> (number - 1) & 1)


def _caught(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return int(line.split()[1], 16)
    return 0


def trim(processes: Iterable[psutil.Process]) -> None:
    """Have each give back to the system what its allocator only keeps."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if _listens(process, TRIM):
                process.send_signal(TRIM)
