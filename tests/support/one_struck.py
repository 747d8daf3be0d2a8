"""One process of a running server struck in a way of docs/failures.md, and what the server says of itself before and behind it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import resource
from collections.abc import Iterator, Sequence

import psutil

from tests.soak.strikes import FULL, IN_A_STEP
from tests.support.cut_socket import cut_unix_sockets
from tests.support.running_server import Server, eventually

BACK_S = 120.0
# A way to go → what requests on a worker that goes in it end in.
ENDS_IN = {
    "kill": "replica_lost",
    "stop": "replica_lost",
    "hang": "replica_lost",
    "cut": "replica_lost",
    "raise": "stage_failed",
    "no memory": "out_of_memory",
}
ENDS_ITS_PROCESS = frozenset({"kill", "stop", "hang"})
IN_USE = ("running", "waiting", "kv_blocks_used", "slots_used", "segments_used", "held")


def strike(process: psutil.Process, way: str) -> None:
    """One of ENDS_IN; "hang", "raise" and "no memory" in the next step that has a request in it."""
    match way:
        case "kill":
            process.kill()
        case "stop":
            process.suspend()
        case "cut":
            assert cut_unix_sockets(process.pid, "broker.sock") >= 1
        case _:
            process.send_signal(IN_A_STEP[way])


@contextlib.contextmanager
def held(server: Server, names: Sequence[str]) -> Iterator[None]:
    """They stand still within the block, for less time than the server needs to notice. One of them may be killed meanwhile."""
    processes = server.processes()
    for name in names:
        processes[name].suspend()
    try:
        yield
    finally:
        for name in names:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes[name].resume()


@contextlib.contextmanager
def no_shared_memory(process: psutil.Process) -> Iterator[None]:
    """Linux's own limit on a file's size (RLIMIT_FSIZE): no segment can be made, as where /dev/shm is full, and nobody else feels it."""
    process.rlimit(resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def segments_of(server: Server, process: psutil.Process) -> list[str]:
    return [name for name in server.segments() if name.split("-")[3] == str(process.pid)]


def pids(server: Server) -> dict[str, int]:
    return {name: process.pid for name, process in server.processes().items()}


def open_requests(server: Server) -> dict[str, int]:
    """Worker → requests that are bound to it and have not finished there."""
    stages = server.get("/v1/status")["stages"]
    return {replica["worker"]: replica["requests"] for stage in stages for replica in stage["replicas"]}


async def until_open(server: Server, workers: Sequence[str], count: int) -> dict[str, int]:
    """Until they have so many requests between them; what each worker then has."""
    found: dict[str, int] = {}

    def reached() -> bool:
        found.update(open_requests(server))
        return sum(found[worker] for worker in workers) == count

    await asyncio.to_thread(eventually, reached, BACK_S, f"{' and '.join(workers)} have {count} requests")
    return found


def run_again(server: Server) -> int:
    """How many requests the broker has started anew on another replica, or on the same one once it was back."""
    return (server.run_dir / "broker.log").read_text().count(" retried first_output_s=")


async def settled(server: Server, names: frozenset[str]) -> None:
    """All those processes are there and serve, and no request holds anything: no KV block, slot, segment or chunk."""
    await asyncio.to_thread(eventually, lambda: _settled(server, names), BACK_S, "all are ready, and nothing is held")


def _settled(server: Server, names: frozenset[str]) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        status = server.get("/v1/status")
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        running = pids(server)
        in_use = any((each["load"] or {}).get(key, 1) for each in replicas for key in IN_USE)
        ready = all(each["state"] == "ready" and each["pid"] == running.get(each["worker"]) for each in replicas)
        return not any(status["requests"].values()) and not in_use and ready and set(running) == names and server.ready()
    return False


def died_by(server: Server, victim: str, way: str) -> bool:
    """Whether the server says why it ended that process, where it was not its own death."""
    if way == "stop":
        return f"{victim} does not answer; ending it by force" in server.stderr
    if way == "hang":
        return "in hang" in (server.run_dir / f"{victim}.log").read_text().rpartition("Timeout (")[2]
    return True
