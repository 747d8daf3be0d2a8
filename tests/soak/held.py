"""What a server and a far worker hold while nobody asks anything of them, and what of it is more than before."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib

import psutil

from tests.soak.crew import Crew, kind_of
from tests.support.running_server import SHM

# Bytes of one process, once its allocator has given back what it only kept. Code2Wav grew by up to 35 MiB before that, and shrank again:
# glibc keeps freed pages, of larger batches, between those that are in use. What is left are pages of a process that started at another time.
MEMORY_SLACK = 24 << 20
# Bytes, of four senders: each keeps the segments that it once needed, when a stage behind it stood still.
SHARED_SLACK = 256 << 20
FD_SLACK = 6
THREAD_SLACK = 6  # of an API process's pool, which are made when they are first needed


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    memory: int  # bytes that are no file's and nobody else's
    descriptors: int
    sockets: int
    threads: int


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    processes: dict[str, tuple[Process, ...]]  # by kind
    shared: int  # bytes of segments
    ownerless: tuple[str, ...]  # segments whose process is gone
    dead_maps: tuple[str, ...]  # processes that still map a segment whose file is gone

    @classmethod
    def of(cls, crew: Crew) -> Held:
        processes = crew.processes()
        by_kind = collections.defaultdict(list)
        for name, process in sorted(processes.items()):
            by_kind[kind_of(name)].append(_measured(process))
        pids = {str(process.pid) for process in processes.values()}
        seen = {str(pid) for pid in crew.seen}
        segments = [name for name in _segments() if name.split("-")[1] == crew.server.tag or name.split("-")[3] in seen]
        return cls(
            {kind: tuple(found) for kind, found in by_kind.items()},
            sum(_size(name) for name in segments),
            tuple(name for name in segments if name.split("-")[3] not in pids),
            tuple(name for name, process in processes.items() if _maps_the_dead(process.pid)),
        )

    def left_over(self, before: Held) -> list[str]:
        """What is more than before, in words."""
        found = [f"segments of processes that are gone: {', '.join(self.ownerless)}"] if self.ownerless else []
        found += [f"{name} maps a segment whose owner is gone" for name in self.dead_maps]
        if self.shared > before.shared + SHARED_SLACK:
            found.append(f"segments: {before.shared >> 20} MiB before, {self.shared >> 20} MiB now")
        for kind in sorted(self.processes.keys() | before.processes.keys()):
            then, now = before.processes.get(kind, ()), self.processes.get(kind, ())
            if len(then) != len(now):
                found.append(f"processes of {kind}: {len(then)} before, {len(now)} now")
                continue
            for what, slack in (("memory", MEMORY_SLACK), ("descriptors", FD_SLACK), ("threads", THREAD_SLACK)):
                most, most_now = (max(getattr(process, what) for process in each) for each in (then, now))
                if most_now > most + slack:
                    found.append(f"{kind}: {what} {most} before, {most_now} now")
        return found

    def rows(self) -> dict[str, dict[str, int]]:
        """Kind → the largest of its processes, memory in MiB."""
        return {
            kind: {
                "processes": len(each),
                "memory_mib": max(process.memory for process in each) >> 20,
                "descriptors": max(process.descriptors for process in each),
                "sockets": max(process.sockets for process in each),
                "threads": max(process.threads for process in each),
            }
            for kind, each in self.processes.items()
        }


def _measured(process: psutil.Process) -> Process:
    memory = process.memory_info()
    return Process(memory.rss - memory.shared, process.num_fds(), _sockets(process.pid), process.num_threads())


def _sockets(pid: int) -> int:
    count = 0
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(entry).startswith("socket:")
    return count


def _segments() -> list[str]:
    return sorted(entry.name for entry in SHM.glob("omnibus-*"))


def _size(name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (SHM / name).stat().st_size
    return 0


def _maps_the_dead(pid: int) -> bool:
    lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    return any("/dev/shm/omnibus-" in line and line.endswith("(deleted)") for line in lines)
