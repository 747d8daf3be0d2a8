"""`make soak`: random processes of a server are killed, stopped and cut off under 16 streams, and at the end all is as before.

    python -m tests.soak.chaos --pipeline qwen3-omni-tiny --minutes 8 --seed 1

Every request must end exactly once, whole or with an error that has a name; only the end of an API process may break a connection.
Between rounds of faults everybody must be served again. The same seed draws the same faults.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import psutil

from tests.support.cut_socket import cut_unix_sockets
from tests.support.running_server import SHM, Server, running
from tests.support.steady_load import BROKEN, SteadyLoad
from tests.support.steady_voice import SETS as VOICE_SETS
from tests.support.steady_voice import STAGES, Answer, SteadyVoice

LOST_AFTER_S = 3.0
BACK_S = 240.0  # for everybody to be served again after a round
ROUND = 8  # faults
NAMED = {"done", "replica_lost", "no_ready_replica", "broker_lost", BROKEN}
SETS = (
    "bus.heartbeat_s=0.5",
    f"bus.lost_after_s={LOST_AFTER_S}",
    "bus.restart_backoff_s=0.1",
    "api.processes=2",
)
# Bytes. A process that was started again has other pages in memory than the one before it, and one that served alone for a while keeps
# for some time what larger batches needed: Code2Wav comes and goes by 50 MiB, without a trend.
MEMORY_SLACK = 96 << 20
# Bytes, of four senders: each keeps the segments that it once needed, when a stage behind it stood still.
SHARED_SLACK = 256 << 20
FD_SLACK = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """What is put under load: a deployment of two replicas a stage, and how to load it."""

    config: str
    sets: tuple[str, ...]
    load: Callable[[str], SteadyLoad]  # from the server's address


@contextlib.contextmanager
def probe() -> Iterator[Subject]:
    keys = ("faults=true", "threads=1", "replicas=2")
    sets = [f"stages.{stage}.{key}" for stage in ("source", "relay", "sink") for key in keys]
    yield Subject(
        "probe.toml", (*sets, "stages.source.tensor_bytes=100000"), lambda url: SteadyLoad(url, words=60, text_only=4)
    )


@contextlib.contextmanager
def qwen3_omni_tiny() -> Iterator[Subject]:
    from omni_bus.stages.qwen3_omni import fixture

    expected: dict[int, Answer] = {}
    with tempfile.TemporaryDirectory(prefix="omni-soak-") as base:
        checkpoint = pathlib.Path(base) / "tiny"
        fixture.write(checkpoint, "tiny", 2, lambda fraction, detail: None)
        sets = [f"stages.{stage}.{key}" for stage in STAGES for key in ("threads=1", "replicas=2")]
        yield Subject(
            "qwen3_omni_tiny.toml",
            (f"model.path={checkpoint}", *VOICE_SETS, *sets),
            lambda url: SteadyVoice(url, expected),
        )


SUBJECTS = {"probe": probe, "qwen3-omni-tiny": qwen3_omni_tiny}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    at: float
    victim: str
    way: str  # kill | stop | pause | cut


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a server holds while nobody asks anything of it. `memory`: bytes that are no file's and nobody else's; by process."""

    memory: dict[str, int]
    descriptors: dict[str, int]
    shared: int  # bytes of its segments
    foreign_segments: tuple[str, ...]  # of processes that are none of its own
    dead_maps: tuple[str, ...]  # processes that still map a segment whose file is gone

    @classmethod
    def of(cls, server: Server) -> Held:
        processes = server.processes()
        pids = {str(process.pid) for process in processes.values()}
        return cls(
            {name: process.memory_info().rss - process.memory_info().shared for name, process in processes.items()},
            {name: process.num_fds() for name, process in processes.items()},
            sum((SHM / name).stat().st_size for name in server.segments()),
            tuple(name for name in server.segments() if name.split("-")[3] not in pids),
            tuple(name for name, process in processes.items() if maps_the_dead(process.pid)),
        )

    def left_over(self, before: Held) -> list[str]:
        """What is more than before, in words."""
        found = [f"segments of processes that are gone: {', '.join(self.foreign_segments)}"] if self.foreign_segments else []
        found += [f"{name} maps a segment whose owner is gone" for name in self.dead_maps]
        if self.shared > before.shared + SHARED_SLACK:
            found.append(f"segments: {before.shared >> 20} MiB before, {self.shared >> 20} MiB now")
        if self.memory.keys() != before.memory.keys():
            found.append(f"processes: {sorted(before.memory)} before, {sorted(self.memory)} now")
        for name, memory in self.memory.items():
            if memory > before.memory.get(name, 0) + MEMORY_SLACK:
                found.append(f"{name}: {before.memory.get(name, 0) >> 20} MiB before, {memory >> 20} MiB now")
            if self.descriptors[name] > before.descriptors.get(name, 0) + FD_SLACK:
                found.append(f"{name}: {before.descriptors.get(name, 0)} descriptors before, {self.descriptors[name]} now")
        return found

    def __str__(self) -> str:
        memory = ", ".join(f"{name} {size >> 20}" for name, size in sorted(self.memory.items()))
        descriptors = ", ".join(f"{name} {count}" for name, count in sorted(self.descriptors.items()))
        return f"MiB of memory: {memory}; of segments: {self.shared >> 20}; open descriptors, sockets with them: {descriptors}"


def maps_the_dead(pid: int) -> bool:
    lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    return any("/dev/shm/omnibus-" in line and line.endswith("(deleted)") for line in lines)


class Chaos:
    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._draw = random.Random(seed)
        self._roles = set(server.processes())
        self.faults: list[Fault] = []

    async def round(self) -> None:
        for _ in range(ROUND):
            await asyncio.sleep(self._draw.uniform(0.1, 2.0))
            await self._strike()

    def whole(self) -> bool:
        """All processes are there, all replicas ready, and nothing is held for any request."""
        if set(self._server.processes()) != self._roles or not self._server.ready():
            return False
        status = self._server.get("/v1/status")
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        return all(replica["state"] == "ready" for replica in replicas)

    def idle(self) -> bool:
        status = self._server.get("/v1/status")
        loads = [replica["load"] or {} for stage in status["stages"] for replica in stage["replicas"]]
        keys = ("running", "waiting", "segments_used", "held", "slots_used", "kv_blocks_used")
        return not any(status["requests"].values()) and not any(load.get(key, 1) for load in loads for key in keys)

    async def _strike(self) -> None:
        victim = self._draw.choice(sorted(self._roles))
        way = self._draw.choice(("pause", "cut") if victim == "supervisor" else ("kill", "kill", "stop", "pause", "cut"))
        pause_s = self._draw.uniform(0.1, 1.5)
        process = self._server.processes().get(victim)
        if process is None:
            return  # it is just being started again
        self.faults.append(Fault(time.monotonic(), victim, way))
        print(f"{way:5s} {victim}", flush=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            if way == "kill":
                process.kill()
            elif way == "stop":
                process.suspend()  # for good: others have to notice
            elif way == "pause":
                process.suspend()
                await asyncio.sleep(pause_s)
                process.resume()
            else:
                cut_unix_sockets(process.pid, "broker.sock")


async def until(check: object, what: str) -> None:
    """Wait for what `check` says, which asks the server over HTTP; nothing tells us of it."""
    assert callable(check)
    end = time.monotonic() + BACK_S
    while True:
        with contextlib.suppress(OSError):
            if await asyncio.to_thread(check):
                return
        assert time.monotonic() < end, f"not within {BACK_S:g} s: {what}"
        await asyncio.sleep(0.2)


def judge(load: SteadyLoad, faults: list[Fault]) -> list[str]:
    """Ends that nothing explains, in words."""
    ends = load.ends()
    found = [f"{count} ended with {code}" for code, count in ends.items() if code not in NAMED]
    found += [f"a stream of place {stream.place} never ended" for stream in load.streams if not stream.end]
    hits = [fault.at for fault in faults if fault.victim.startswith("api.") and fault.way != "cut"]
    for stream in load.streams:
        if stream.end == BROKEN and not any(stream.began - 5 * LOST_AFTER_S < hit < stream.ended for hit in hits):
            found.append("a connection broke though no API process had been touched")
    return found


async def soak(server: Server, load_on: Callable[[str], SteadyLoad], minutes: float, seed: int) -> list[str]:
    chaos = Chaos(server, seed)
    async with load_on(server.url) as load:  # what a server has after its first load is what it keeps
        await load.serves(BACK_S)
    await until(lambda: chaos.whole() and chaos.idle(), "it is idle before the first fault")
    before = Held.of(server)
    rounds, began = 0, time.monotonic()
    async with load_on(server.url) as load:
        while time.monotonic() < began + 60 * minutes:
            await load.all_run()
            await chaos.round()
            await until(chaos.whole, "all processes are back")
            print(f"round {rounds}: all served again {await load.serves(BACK_S):.1f} s after all were back", flush=True)
            rounds += 1
    await until(lambda: chaos.whole() and chaos.idle(), "it is idle after the last fault")
    await asyncio.sleep(LOST_AFTER_S)  # a heartbeat, with which workers let go of segments whose owners are gone
    ways = collections.Counter(f"{fault.way} {fault.victim.partition('.')[0]}" for fault in chaos.faults)
    print(f"{len(chaos.faults)} faults in {rounds} rounds: {', '.join(f'{n} {what}' for what, n in sorted(ways.items()))}")
    ends = load.ends()
    print(f"{sum(ends.values())} requests: {', '.join(f'{count} {code}' for code, count in ends.most_common())}")
    after = Held.of(server)
    print(f"idle before, {before}\nidle after, {after}\nno request, row, KV block, slot or segment in use, before as after")
    return judge(load, chaos.faults) + after.left_over(before)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.chaos", description=__doc__)
    parser.add_argument("--pipeline", choices=sorted(SUBJECTS), default="probe")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{arguments.minutes:g} minutes of faults on {arguments.pipeline}, seed {arguments.seed}", flush=True)
    if not SHM.is_dir() or not pathlib.Path("/proc/self/fd").is_dir():
        print("the soak needs Linux, with /proc and /dev/shm", file=sys.stderr)
        return 2
    with SUBJECTS[arguments.pipeline]() as subject, running(subject.config, sets=(*subject.sets, *SETS)) as server:
        found = asyncio.run(soak(server, subject.load, arguments.minutes, arguments.seed))
        for line in found:
            print(f"WRONG: {line}")
        said = server.stderr
    errors = [line for line in said.splitlines() if "internal error" in line or "Traceback" in line]
    for line in errors:
        print(f"WRONG: the supervisor said: {line}")
    return 1 if found or errors else 0


if __name__ == "__main__":
    sys.exit(main())
