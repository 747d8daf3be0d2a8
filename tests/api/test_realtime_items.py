"""Items over a socket: audio that a client asks back for, and images that it names by URL."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy
import pytest
from aiohttp import web

from bench.realtime_socket import RealtimeSocket, connected
from omni_bus.api.realtime import remote_images
from tests.api.conftest import Server, StartServer
from tests.support.realtime_events import EventChecker
from tests.support.scripted_bus import MODEL

PNG = b"\x89PNG" + bytes(1000)
TONE = (numpy.sin(numpy.arange(24_000) * 2 * numpy.pi * 300 / 24_000) * 12_000).astype("<i2")


@pytest.fixture
async def host() -> AsyncIterator[str]:
    """A web server with one picture at any address but /none."""

    async def picture(request: web.Request) -> web.Response:
        return web.Response(status=404) if request.path == "/none" else web.Response(body=PNG)

    app = web.Application()
    app.router.add_get("/{name}", picture)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def looks_at(*urls: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": url} for url in urls]}


async def pictures(server: Server, socket: RealtimeSocket) -> list[bytes]:
    """What the model is shown when it is asked next."""
    since = socket.count
    await socket.send("response.create")
    await socket.until("response.done", since=since)
    return [bytes(tensor.data) for tensor in server.bus.submissions[-1].tensors.values()]


async def test_a_users_audio_comes_back(server: Server) -> None:
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
        await socket.append(TONE.tobytes())
        await socket.send("input_audio_buffer.commit")
        item_id = (await socket.until("input_audio_buffer.committed"))["item_id"]
        await socket.send("conversation.item.retrieve", item_id=item_id)
        [part] = (await socket.until("conversation.item.retrieved"))["item"]["content"]
        again = numpy.frombuffer(base64.b64decode(part["audio"]), "<i2")
        assert len(again) == pytest.approx(len(TONE), abs=48)
        count = min(len(again), len(TONE)) - 500
        assert numpy.abs(again[500:count].astype(int) - TONE[500:count]).max() < 300
        added = await socket.until("conversation.item.added")
        assert "audio" not in added["item"]["content"][0], "only where it is asked for"


async def test_an_image_by_url_is_fetched_before_what_comes_behind_it(start: StartServer, host: str) -> None:
    server = await start(allow_private_media=True)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("conversation.item.create", item=looks_at(f"{host}/a.png"))
        assert await pictures(server, socket) == [PNG]
        await socket.send(
            "response.create", response={"conversation": "none", "input": [looks_at(f"{host}/b.png", f"{host}/c.png")]}
        )
        await socket.until("response.done", where=lambda event: event["response"]["conversation_id"] is None)
        assert [bytes(tensor.data) for tensor in server.bus.submissions[-1].tensors.values()] == [PNG, PNG]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("/none", "media_unreachable"),
        ("http://user:secret@127.0.0.1/x", "media_url_refused"),
        ("ftp://127.0.0.1/x", "invalid_request"),
        ("HTTP://", "media_url_refused"),
    ],
)
async def test_an_image_that_cannot_be_had_changes_nothing(start: StartServer, host: str, url: str, code: str) -> None:
    server = await start(allow_private_media=True)
    address = f"{host}{url}" if url.startswith("/") else url
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        for kind, fields, where in (
            ("conversation.item.create", {"item": looks_at(address)}, "item"),
            ("response.create", {"response": {"input": [looks_at(address)]}}, "response.input[0]"),
        ):
            since = socket.count
            await socket.send(kind, **fields)
            error = (await socket.until("error", since=since))["error"]
            assert (error["code"], error["param"]) == (code, f"{where}.content[0].image_url")
            assert "secret" not in error["message"] and host.rpartition(":")[2] not in error["message"]
        assert await pictures(server, socket) == []


async def test_the_servers_own_network_is_no_picture(server: Server, host: str) -> None:
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("conversation.item.create", item=looks_at(f"{host}/a.png"))
        assert (await socket.until("error"))["error"]["code"] == "media_url_refused"


async def test_one_event_fetches_only_so_much(start: StartServer, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_images, "MAX_BYTES", 2 * len(PNG))
    server = await start(allow_private_media=True)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("conversation.item.create", item=looks_at(*(f"{host}/{number}" for number in range(3))))
        error = (await socket.until("error"))["error"]
        assert (error["code"], error["param"]) == ("too_large", "item.content[2].image_url")
