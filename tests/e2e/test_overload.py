"""Whole servers with more to do than they take: who waits, in which order, who is refused and told when to come back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.support.running_server import Server, eventually, running

SECONDS = 60.0
STAGES = ("source", "relay", "sink")
ONE_PROCESS = [f"stages.{stage}.process=all" for stage in STAGES]
HELD = "!repeat:1000000"  # an answer that goes on until its client hangs up: it is never read


def body(words: str, **said: object) -> dict[str, object]:
    return {"model": "probe", "messages": [{"role": "user", "content": words}], **said}


class Crowd:
    """Clients of one server, each known by its key."""

    def __init__(self, server: Server, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.http = http

    def post(self, key: str, words: str, **said: object) -> Any:
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": words if words.isalpha() else "held"}
        return self.http.post(f"{self.server.url}/v1/chat/completions", json=body(words, **said), headers=headers)

    @contextlib.asynccontextmanager
    async def holding(self, key: str) -> AsyncIterator[None]:
        """A request that runs for as long as the block lasts."""
        answer = await self.post(key, HELD, stream=True)
        assert answer.status == 200
        await answer.content.readline()
        yield
        answer.close()

    async def ask(self, key: str, name: str) -> int:
        """Asks for `name`; returns the status."""
        async with self.post(key, name) as answer:
            if answer.status == 200:
                assert (await answer.json())["choices"][0]["message"]["content"] == f"{name} "
            return int(answer.status)

    def done(self, *names: str) -> list[str]:
        """Those of these that the broker completed, in its order: two API processes may tell their clients in another."""
        lines = self.server.run_dir.joinpath("broker.log").read_text().splitlines()
        ended = [line for line in lines if " label=" in line and " done " in line]
        return [name for line in ended for name in names if f"_{name} " in line]

    async def until_done(self, *names: str) -> None:
        """Until the broker has completed these, in this order."""
        while len(self.done(*names)) < len(names):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert self.done(*names) == list(names)

    async def refused(self, key: str) -> tuple[int, str, int]:
        """Status, code and Retry-After of a request that is refused."""
        async with self.post(key, "refused") as answer:
            return answer.status, (await answer.json())["error"]["code"], int(answer.headers["Retry-After"])

    async def status(self) -> dict[str, Any]:
        async with self.http.get(f"{self.server.url}/v1/status", headers={"Authorization": "Bearer sk-one"}) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def waiting(self, **wanted: int) -> None:
        """Until so many wait."""
        while (await self.status())["waiting"] != {"interactive": 0, "batch": 0, **wanted}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two API processes on one broker that runs one request at a time and lets four wait; a client may have four, the server one session."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-one\nsk-two\nsk-archive priority=batch\n")
    sets = [
        *ONE_PROCESS, "stages.source.faults=true", "api.processes=2", f"api.api_keys_file={keys}",
        "api.max_requests_per_client=4", "api.max_sessions=1", "bus.max_requests=1", "bus.max_waiting=4",
    ]  # fmt: skip
    with running("probe.toml", sets=sets) as server:
        yield server


@contextlib.asynccontextmanager
async def crowd(server: Server) -> AsyncIterator[Crowd]:
    async with asyncio.timeout(2 * SECONDS), aiohttp.ClientSession() as http:
        yield Crowd(server, http)


async def test_they_wait_in_order_and_past_the_bound_they_are_refused_by_name(full: Server) -> None:
    async with crowd(full) as clients:
        async with clients.holding("sk-one"):
            asked = [asyncio.create_task(clients.ask("sk-archive", "archived"))]
            await clients.waiting(batch=1)
            for number, name in enumerate(("first", "second", "third"), start=1):
                asked.append(asyncio.create_task(clients.ask("sk-one", name)))
                await clients.waiting(batch=1, interactive=number)
            assert await clients.refused("sk-one") == (429, "rate_limit_exceeded", 1), "its fifth, over both processes"
            status, code, seconds = await clients.refused("sk-archive")
            assert (status, code) == (503, "overloaded")
            assert 1 <= seconds <= 60
            asked.append(asyncio.create_task(clients.ask("sk-two", "fourth")))
            assert await asked[0] == 503, "a batch request gives way to one that somebody waits for"
            await clients.waiting(interactive=4)
            async with clients.http.get(f"{full.url}/metrics", headers={"Authorization": "Bearer sk-one"}) as answer:
                assert 'priority="interactive"} 4.0' in await answer.text()
        assert await asyncio.gather(*asked[1:]) == [200] * 4
        await clients.until_done("first", "second", "third", "fourth")
        await clients.waiting()


async def test_a_client_who_hangs_up_while_it_waits_leaves_the_queue(full: Server) -> None:
    async with crowd(full) as clients:
        async with clients.holding("sk-one"):
            gone = asyncio.create_task(clients.ask("sk-one", "gone"))
            await clients.waiting(interactive=1)
            stays = asyncio.create_task(clients.ask("sk-two", "stays"))
            await clients.waiting(interactive=2)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            await clients.waiting(interactive=1)
        assert await stays == 200
        assert clients.done("gone") == []


async def test_sessions_are_counted_over_both_api_processes(full: Server) -> None:
    url, headers = f"{full.url}/v1/realtime?model=probe", {"Authorization": "Bearer sk-one"}
    async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as http:
        async with http.ws_connect(url, headers=headers) as socket:
            assert (await socket.receive_json(loads=json.loads))["type"] == "session.created"
            for _ in range(6):  # the kernel gives each to either process
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await http.ws_connect(url, headers=headers)
                assert refused.value.status == 503
        while True:  # the first one's place is free when its process has seen it go
            try:
                async with http.ws_connect(url, headers=headers):
                    return
            except aiohttp.WSServerHandshakeError:
                await asyncio.sleep(0.05)


WORDS = " ".join(f"w{number}" for number in range(20))  # 1.6 s of audio
CLIENTS = 6


class Watcher:
    """The most that was seen of a stage's streams and of the queue, until the block ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.streams = 0
        self.waiting = 0

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(SECONDS)

    def _look(self) -> None:
        while not self._end.wait(0.05):
            status = self._server.get("/v1/status")
            self.streams = max(self.streams, *(r["streams"] for stage in status["stages"] for r in stage["replicas"]))
            self.waiting = max(self.waiting, sum(status["waiting"].values()))


def test_no_more_are_spoken_to_than_the_stages_can_carry() -> None:
    """The sink's step takes 60 ms for up to two rows and makes 80 ms of audio in each: it can carry two, and learns by a third."""
    sets = ["stages.sink.step_ms=60", "stages.sink.max_batch=2", "bus.admit_rtf=0.9", "bus.heartbeat_s=0.2"]
    with running("probe.toml", sets=sets) as server:
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool, Watcher(server) as watched:
            answers = list(pool.map(lambda _: server.answer(WORDS, audio=True), range(CLIENTS)))
        assert answers == [f"{WORDS} "] * CLIENTS
        assert 1 <= watched.streams <= 3
        assert watched.waiting >= 1

        def measured() -> bool:
            status = server.get("/v1/status")
            rtf = next(stage["replicas"][0]["predicted_rtf"] for stage in status["stages"] if stage["name"] == "sink")
            return rtf is not None and rtf > 0.2

        eventually(measured, SECONDS, "the sink was measured")
        eventually(lambda: not any(server.get("/v1/status")["waiting"].values()), SECONDS, "nobody waits")
