"""docs/failures.md, the rows of a full /dev/shm: one process of a server gets no more shared memory under 16 streams.

The system is Linux's own limit on a file's size (RLIMIT_FSIZE), set on the running process, as in tests/workers/test_shared_memory_full.py.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.running_server import Server, eventually, running
from tests.support.steady_load import SteadyLoad

SPEECH, TEXT_ONLY = 12, 4  # streams
TENSOR = 4 << 20  # seven of them fill the first segment, and each step of twelve rows makes twelve
SOME = 1 << 20  # bytes of a file; the log stays far below
BACK_S = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    sets = [f"stages.{stage}.threads=1" for stage in ("source", "relay", "sink")]
    more = [f"stages.source.tensor_bytes={TENSOR}", "stages.source.faults=true", "bus.restart_backoff_s=0.1"]
    with running("probe.toml", sets=[*sets, *more]) as server:
        yield server


def load_on(server: Server) -> SteadyLoad:
    return SteadyLoad(server.url, count=SPEECH + TEXT_ONLY, words=6, text_only=TEXT_ONLY)


def limit_files(process: psutil.Process, size: int) -> None:
    process.rlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def new_source(server: Server) -> psutil.Process:
    """One that has made no segment yet."""
    before = server.processes()["source.0"]
    before.kill()

    def another() -> bool:
        [source] = [stage for stage in server.get("/v1/status")["stages"] if stage["name"] == "source"]
        return any(replica["state"] == "ready" and replica["pid"] != before.pid for replica in source["replicas"])

    eventually(another, BACK_S, "another source is ready")
    return server.processes()["source.0"]


def segments_of(server: Server, process: psutil.Process) -> list[str]:
    return [name for name in server.segments() if name.split("-")[3] == str(process.pid)]


def idle(server: Server) -> bool:
    status = server.get("/v1/status")
    loads = [replica["load"] or {} for stage in status["stages"] for replica in stage["replicas"]]
    return not any(status["requests"].values()) and not any(load.get("segments_used", 1) for load in loads)


async def test_without_a_first_segment_speech_is_refused_by_name_and_texts_go_on(server: Server) -> None:
    source = new_source(server)
    assert segments_of(server, source) == []
    limit_files(source, SOME)
    async with load_on(server) as load:
        async with asyncio.timeout(BACK_S):
            while (
                len({stream.place for stream in load.streams if stream.end == "overloaded"}) < SPEECH or not load.ends()["done"]
            ):
                load.check()
                await asyncio.sleep(0.02)
        assert segments_of(server, source) == [], "what could not be made whole is not left behind"
        limit_files(source, resource.RLIM_INFINITY)
        lifted = time.monotonic()
        await load.serves(BACK_S)
    assert set(load.ends()) == {"done", "overloaded"}
    assert {stream.end for stream in load.streams if stream.modalities == ("text",) or stream.began > lifted} == {"done"}
    assert server.processes()["source.0"].pid == source.pid
    eventually(lambda: idle(server), BACK_S, "nothing is held")


async def test_without_a_further_segment_chunks_wait_and_nothing_is_lost(server: Server) -> None:
    source = new_source(server)
    await asyncio.to_thread(server.chat, "one", audio=True)
    assert len(segments_of(server, source)) == 1
    limit_files(source, SOME)
    async with load_on(server) as load:
        await load.serves(BACK_S)
    assert set(load.ends()) == {"done"}
    assert len(segments_of(server, source)) == 1
    limit_files(source, resource.RLIM_INFINITY)
    eventually(lambda: idle(server), BACK_S, "nothing is held")
    async with load_on(server) as load:
        await load.serves(BACK_S)
    assert set(load.ends()) == {"done"}
    assert len(segments_of(server, source)) > 1, "they would have had more, had there been any"
