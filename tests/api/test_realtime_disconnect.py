"""Realtime clients that go away at once: their session ends whole, whatever it was about to wait for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.support.scripted_bus import FOREVER, text

LIMIT_S = 30


async def opened(server: Any) -> aiohttp.ClientWebSocketResponse:
    """A session whose answer has begun and does not end."""
    socket = await server.http.ws_connect(f"{server.url}/v1/realtime?model=scripted")
    await socket.receive_json()
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    await socket.send_str(json.dumps({"type": "conversation.item.create", "item": item}))
    await socket.send_str(json.dumps({"type": "response.create"}))
    while (await socket.receive_json())["type"] != "response.output_audio_transcript.delta":
        pass
    return socket  # type: ignore[no-any-return]


def left_running() -> list[str]:
    return [
        repr(task)
        for task in asyncio.all_tasks()
        if "omni_bus/api/voice" in repr(task) or "omni_bus/api/realtime" in repr(task)
    ]


@pytest.mark.parametrize("how", ["abort", "close and abort", "close"])
async def test_no_task_of_a_session_outlives_its_socket(server: Any, how: str) -> None:
    """aiohttp cancels a handler when its connection is lost, also one that is ending its session at that moment."""
    server.bus.script = (text("a"), FOREVER)
    async with asyncio.timeout(LIMIT_S):
        sockets = [await opened(server) for _ in range(20)]
        for socket in sockets:
            assert socket._response.connection is not None
            transport = socket._response.connection.transport
            if how == "close":
                await socket.close()
            else:
                if how == "close and abort":
                    asyncio.ensure_future(socket.close())  # noqa: RUF006
                    await asyncio.sleep(0)
                assert transport is not None
                transport.abort()
        for stream in server.bus.streams:
            await stream.cancelled.wait()
        for _ in range(500):
            if not left_running() and not await server.metric("omni_bus_voice_sessions"):
                break
            await asyncio.sleep(0.02)
    assert not left_running()
    assert await server.metric("omni_bus_voice_sessions") == 0
