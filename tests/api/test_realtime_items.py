"""Items over a socket: audio that a client asks back for, and images that it names by URL."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy
import pytest
from aiohttp import web

from bench.realtime_socket import RealtimeSocket, connected
from omni_bus.api.realtime import remote_images
from omni_bus.api.voice.arrivals import MAX_ON_THE_WAY
from tests.api.conftest import Server, StartServer
from tests.api.voice.conftest import spoken
from tests.support.cascade import skip_without_packages
from tests.support.realtime_events import EventChecker
from tests.support.scripted_bus import FOREVER, MODEL, audio, text

PNG = b"\x89PNG" + bytes(1000)
TONE = (numpy.sin(numpy.arange(24_000) * 2 * numpy.pi * 300 / 24_000) * 12_000).astype("<i2")


@pytest.fixture
def gate() -> asyncio.Event:
    """Until it is set, /slow is not answered."""
    return asyncio.Event()


@pytest.fixture
async def host(gate: asyncio.Event) -> AsyncIterator[str]:
    """A web server with one picture at any address but /none."""

    async def picture(request: web.Request) -> web.Response:
        if request.path == "/slow":
            await gate.wait()
        return web.Response(status=404) if request.path == "/none" else web.Response(body=PNG)

    app = web.Application()
    app.router.add_get("/{name}", picture)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def looks_at(*urls: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": url} for url in urls]}


def says(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


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
        ("http://user:secret@127.0.0.1/x", "media_url_refused"),
        ("ftp://127.0.0.1/x", "invalid_request"),
        ("HTTP://", "media_url_refused"),
    ],
)
async def test_an_image_that_is_refused_changes_nothing(start: StartServer, host: str, url: str, code: str) -> None:
    server = await start(allow_private_media=True)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        for kind, fields, where in (
            ("conversation.item.create", {"item": looks_at(url)}, "item"),
            ("response.create", {"response": {"input": [looks_at(url)]}}, "response.input[0]"),
        ):
            since = socket.count
            await socket.send(kind, **fields)
            error = (await socket.until("error", since=since))["error"]
            assert (error["code"], error["param"]) == (code, f"{where}.content[0].image_url")
            assert "secret" not in error["message"]
        assert "conversation.item.added" not in socket.types()
        assert await pictures(server, socket) == []


async def test_an_image_that_cannot_be_had_takes_its_item_away(start: StartServer, host: str) -> None:
    server = await start(allow_private_media=True)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        since = socket.count
        await socket.send("conversation.item.create", event_id="mine", item=looks_at(f"{host}/a.png", f"{host}/none"))
        deleted = await socket.until("conversation.item.deleted")
        assert socket.types(since) == ["conversation.item.added", "error", "conversation.item.deleted"]
        added, error = socket.events[since], socket.events[since + 1]["error"]
        assert added["item"]["status"] == "in_progress" and deleted["item_id"] == added["item"]["id"]
        assert (error["code"], error["param"]) == ("media_unreachable", "item.content[1].image_url")
        assert error["event_id"] == "mine" and host.rpartition(":")[2] not in error["message"]
        assert await pictures(server, socket) == []
        asked = len(server.bus.submissions)
        await socket.send("response.create", response={"conversation": "none", "input": [looks_at(f"{host}/none")]})
        failed = await socket.until("response.done", where=lambda event: event["response"]["conversation_id"] is None)
        assert failed["response"]["status"] == "failed"
        error = failed["response"]["status_details"]["error"]
        assert error["code"] == "media_unreachable" and len(server.bus.submissions) == asked


async def test_a_session_goes_on_while_an_image_is_fetched(start: StartServer, host: str, gate: asyncio.Event) -> None:
    """And the answer that was asked for behind the picture waits for it, and has the items of that moment in their order."""
    server = await start(allow_private_media=True)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        since = socket.count
        await socket.send("conversation.item.create", item=looks_at(f"{host}/slow"))
        await socket.send("conversation.item.create", item=says("What is this?"))
        await socket.send("response.create")
        await socket.send("conversation.item.create", item=says("too late"))
        await socket.send("session.update", session={"instructions": "Be brief."})
        await socket.until("session.updated")
        assert socket.types(since) == [
            *("conversation.item.added", "conversation.item.added", "conversation.item.done", "response.created"),
            *("conversation.item.added", "conversation.item.done", "session.updated"),
        ]
        first = socket.events[since]["item"]["id"]
        await socket.send("conversation.item.retrieve", item_id=first)
        assert (await socket.until("conversation.item.retrieved"))["item"]["status"] == "in_progress"
        assert not server.bus.submissions
        gate.set()
        done = await socket.until("conversation.item.done", where=lambda event: event["item"]["id"] == first)
        assert done["item"]["status"] == "completed" and done["previous_item_id"] is None
        assert (await socket.until("response.done"))["response"]["status"] == "completed"
        [asked] = server.bus.submissions
        assert [bytes(tensor.data) for tensor in asked.tensors.values()] == [PNG]
        parts = [part for message in asked.payload.messages for part in message.parts]
        assert [getattr(part, "text", "picture") for part in parts] == ["picture", "What is this?"]


async def test_an_answer_that_waits_for_an_image_can_be_cancelled(start: StartServer, host: str) -> None:
    server = await start(allow_private_media=True)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("conversation.item.create", item=looks_at(f"{host}/slow"))
        await socket.send("response.create")
        await socket.until("response.created")
        await socket.send("response.cancel")
        response = (await socket.until("response.done"))["response"]
        assert (response["status"], response["usage"]["total_tokens"]) == ("cancelled", 0)
        assert not server.bus.submissions


async def test_an_image_that_is_deleted_before_it_came_keeps_nobody_waiting(start: StartServer, host: str) -> None:
    server = await start(allow_private_media=True)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("conversation.item.create", item=looks_at(f"{host}/slow"))
        await socket.send("conversation.item.create", item=says("Hello"))
        await socket.send("response.create")
        await socket.until("response.created")
        item_id = (await socket.until("conversation.item.added"))["item"]["id"]
        await socket.send("conversation.item.delete", item_id=item_id)
        await socket.until("conversation.item.deleted")
        assert (await socket.until("response.done"))["response"]["status"] == "completed"
        assert "error" not in socket.types() and not server.bus.submissions[-1].tensors


@pytest.mark.parametrize("how", ["cancel", "speech"])
async def test_many_images_on_their_way_make_nobody_deaf(start: StartServer, host: str, gate: asyncio.Event, how: str) -> None:
    """One more is refused by name, and an interruption is heard while a slow host keeps all the others."""
    if how == "speech":
        skip_without_packages()
    server = await start(allow_private_media=True)
    server.bus.scripts.append((text("A long story"), audio(), FOREVER))
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("response.create")
        await socket.until("response.output_audio.delta")
        since = socket.count
        for number in range(MAX_ON_THE_WAY + 1):
            await socket.send("conversation.item.create", event_id=f"picture_{number}", item=looks_at(f"{host}/slow"))
        error = (await socket.until("error"))["error"]
        assert (error["code"], error["event_id"]) == ("too_many_images", f"picture_{MAX_ON_THE_WAY}")
        assert socket.types(since).count("conversation.item.added") == MAX_ON_THE_WAY
        if how == "cancel":
            await socket.send("response.cancel")
        else:
            question = spoken("What is the capital of France?")
            for at in range(0, len(question), 4800):
                await socket.append(question[at : at + 4800])
            await socket.until("input_audio_buffer.speech_started")
        response = (await socket.until("response.done"))["response"]
        reason = {"cancel": "client_cancelled", "speech": "turn_detected"}[how]
        assert (response["status"], response["status_details"]["reason"]) == ("cancelled", reason)
        gate.set()

        def done() -> int:
            return socket.types(since).count("conversation.item.done")

        await socket.until("conversation.item.done", since=since, where=lambda event: done() > MAX_ON_THE_WAY)
        await socket.send("conversation.item.create", item=looks_at(f"{host}/one.png"))
        await socket.until("conversation.item.done", since=since, where=lambda event: done() > MAX_ON_THE_WAY + 1)
        assert await pictures(server, socket) == [PNG] * (MAX_ON_THE_WAY + 1)


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
