"""GET /v1/status/watch: what comes when, who may watch, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from omni_bus.api import status_watch
from omni_bus.api.keys import METRICS
from omni_bus.api.status_watch import WATCHERS
from omni_bus.errors import BrokerLost

LIMIT_S = 30.0  # a hang


@contextlib.asynccontextmanager
async def watching(server: Any, interval: float = 60.0) -> AsyncIterator[aiohttp.ClientResponse]:
    async with asyncio.timeout(LIMIT_S), server.http.get(f"{server.url}/v1/status/watch?interval={interval}") as answer:
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        yield answer


async def event(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    line = await answer.content.readline()
    assert line.startswith(b"data: ") and await answer.content.readline() == b"\n"
    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return found


async def test_the_first_event_is_what_status_says(server: Any) -> None:
    async with server.http.get(f"{server.url}/v1/status") as answer:
        status = await answer.json()
    async with watching(server) as stream:
        assert await event(stream) == status


async def test_a_change_is_told_long_before_the_interval_is_over(server: Any) -> None:
    async with watching(server) as stream:
        assert (await event(stream))["missing"] == []
        server.bus.missing = ("talker",)
        server.bus.changed()
        assert (await event(stream))["missing"] == ["talker"]


async def test_without_a_change_there_is_an_event_each_interval(server: Any) -> None:
    async with watching(server, 0.2) as stream:
        assert [(await event(stream))["ready"] for _ in range(4)] == [True] * 4


async def test_a_broker_that_does_not_answer_is_told_and_the_stream_goes_on(server: Any) -> None:
    async with watching(server, 0.2) as stream:
        await event(stream)
        server.bus.status_error = BrokerLost("the broker is gone")
        while "error" not in (seen := await event(stream)):
            pass
        assert seen["error"]["code"] == "broker_lost"
        server.bus.status_error = None
        while "error" in (seen := await event(stream)):
            pass
        assert seen["ready"] is True


async def test_one_that_leaves_is_forgotten_and_counts_as_no_cancel(server: Any) -> None:
    async with watching(server, 0.2) as stream:
        await event(stream)
        assert len(server.app[WATCHERS]._changed) == 1
        assert server.app[METRICS].in_flight == 0, "who only looks is no load"
        assert await server.metric("omni_bus_status_watchers") == 1
        assert await server.metric("omni_bus_requests_in_flight") == 1, "the scrape itself"
    async with asyncio.timeout(LIMIT_S):
        while server.app[WATCHERS]._changed:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await server.metric("omni_bus_status_watchers") == 0
    assert await server.metric("omni_bus_requests_in_flight") == 1
    assert await server.metric("omni_bus_cancels_total") == 0
    assert await server.metric('omni_bus_requests_total{route="/v1/status/watch",status="200"}') == 1


async def test_the_servers_stop_ends_the_stream_in_order(server: Any) -> None:
    async with watching(server) as stream:
        await event(stream)
        await server.app.shutdown()
        assert await stream.content.read() == b"", "whole, and not broken off"


async def test_one_too_many_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_watch, "MOST", 1)
    async with watching(server) as stream:
        await event(stream)
        async with server.http.get(f"{server.url}/v1/status/watch") as refused:
            assert refused.status == 503 and (await refused.json())["error"]["code"] == "overloaded"


@pytest.mark.parametrize("interval", ["", "x", "nan", "0.1", "61", "-1", "inf"])
async def test_an_interval_that_is_none_is_refused_by_name(server: Any, interval: str) -> None:
    async with server.http.get(f"{server.url}/v1/status/watch?interval={interval}") as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"], error["message"]) == (
        400,
        "interval",
        "interval must be a number of seconds from 0.2 to 60",
    )


async def test_who_has_no_key_may_not_watch(start: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("sk-only\n")
    server = await start(api_keys_file=str(keys))
    async with server.http.get(f"{server.url}/v1/status/watch") as answer:
        assert answer.status == 401
