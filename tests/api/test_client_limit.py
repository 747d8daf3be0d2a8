"""`max_requests_per_client`: one request more than a client may have is refused, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from omni_bus.errors import NoReadyReplica
from tests.support.scripted_bus import FOREVER, GOOD, text

GOOD_BODY = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


@dataclasses.dataclass(frozen=True)
class Who:
    """A client as it shows itself."""

    address: str = "127.0.0.1"
    key: str | None = None

    @contextlib.asynccontextmanager
    async def asks(self, server: Any, **fields: object) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        connector = aiohttp.TCPConnector(local_addr=(self.address, 0))
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.post(f"{server.url}/v1/chat/completions", json={**GOOD_BODY, **fields}, headers=headers) as answer,
        ):
            yield answer


ONE, OTHER = Who("127.0.0.1"), Who("127.0.0.2")
FIRST, SECOND = Who(key="sk-first"), Who(key="sk-second")
FIRST_ELSEWHERE = Who("127.0.0.2", "sk-first")
CASES = {  # limit, who has requests in flight, who asks once more, the status
    "no limit": (0, [ONE] * 5, ONE, 200),
    "under it": (3, [ONE] * 2, ONE, 200),
    "at it": (2, [ONE] * 2, ONE, 429),
    "one alone": (1, [ONE], ONE, 429),
    "another address": (1, [ONE], OTHER, 200),
    "another address that is at it too": (1, [ONE, OTHER], OTHER, 429),
    "the same key": (1, [FIRST], FIRST, 429),
    "the same key from another address": (1, [FIRST], FIRST_ELSEWHERE, 429),
    "another key from the same address": (1, [FIRST], SECOND, 200),
    "an unknown key": (1, [FIRST], Who(key="sk-third"), 401),
}


@pytest.mark.parametrize("case", CASES)
async def test_who_is_refused(start: Any, tmp_path: pathlib.Path, case: str) -> None:
    limit, running, asking, status = CASES[case]
    api: dict[str, object] = {"max_requests_per_client": limit}
    if any(who.key for who in running):
        (tmp_path / "keys.txt").write_text("sk-first\nsk-second\n")
        api["api_keys_file"] = str(tmp_path / "keys.txt")
    server = await start(**api)
    async with contextlib.AsyncExitStack() as stack:
        server.bus.script = (text("a"), FOREVER)
        for who in running:
            answer = await stack.enter_async_context(who.asks(server, stream=True))
            assert answer.status == 200
        server.bus.script = GOOD
        async with asking.asks(server) as answer:
            assert answer.status == status
            said = await answer.json()
        if status == 429:
            assert answer.headers["Retry-After"] == "1"
            many = "1 request" if limit == 1 else f"{limit} requests"
            message = f"a client may have {many} in flight at a time; try again when one has ended"
            error = {"message": message, "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
            assert said == {"error": error}
        assert len(server.bus.submissions) == len(running) + (status == 200), "a refused one never reaches the bus"


ENDS = ("whole", "streamed", "refused body", "refused by the bus", "failed", "hung up")


@pytest.mark.parametrize("how", ENDS)
async def test_a_request_that_ends_makes_room(start: Any, how: str) -> None:
    server = await start(max_requests_per_client=1)
    if how == "hung up":
        server.bus.script = (FOREVER,)
        _, writer = await asyncio.open_connection(server.host, server.port)
        body = json.dumps(GOOD_BODY).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(60):
            await server.bus.asked.wait()
            assert (await server.chat())[0] == 429
            writer.close()
            await server.bus.streams[0].cancelled.wait()
        await server.until_metric("omni_bus_cancels_total", 1)
    else:
        server.bus.script = (ValueError("broken"),) if how == "failed" else GOOD
        server.bus.submit_error = NoReadyReplica("none") if how == "refused by the bus" else None
        fields = {"streamed": {"stream": True}, "refused body": {"temperature": "hot"}}.get(how, {})
        async with ONE.asks(server, **fields) as answer:
            await answer.read()
    server.bus.script, server.bus.submit_error = GOOD, None
    assert (await server.chat())[0] == 200


async def test_how_the_server_stands_can_always_be_asked(start: Any) -> None:
    server = await start(max_requests_per_client=1)
    server.bus.script = (text("a"), FOREVER)
    async with ONE.asks(server, stream=True):
        assert (await server.chat())[0] == 429
        for path in ("/health", "/ready", "/metrics", "/v1/status", "/v1/models"):
            async with server.http.get(f"{server.url}{path}") as answer:
                assert answer.status == 200, path
        assert await server.metric('omni_bus_failures_total{code="rate_limit_exceeded"}') == 1
        assert await server.metric('omni_bus_requests_total{route="/v1/chat/completions",status="429"}') == 1


async def test_a_body_that_is_still_being_sent_counts(start: Any) -> None:
    server = await start(max_requests_per_client=1)
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    )
    await server.until_metric("omni_bus_requests_in_flight", 2)
    assert (await server.chat())[0] == 429
    writer.close()
