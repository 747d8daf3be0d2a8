"""Clients that go away or do not read: their request is cancelled or waits, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from omni_bus.api import submission
from tests.support.scripted_bus import FOREVER, GOOD, ScriptedStream, audio, text

PATIENCE_S = 60.0


async def send(
    server: Any, *, sock: socket.socket | None = None, **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A chat request over a bare socket."""
    if sock is None:
        reader, writer = await asyncio.open_connection(server.host, server.port)
    else:
        await asyncio.get_running_loop().sock_connect(sock, (server.host, server.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def submitted(server: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        await server.bus.asked.wait()
    return server.bus.streams[-1]


@pytest.mark.parametrize("how", ["close", "reset", "half close"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [(FOREVER,), (text("a"), FOREVER)], ids=["before any output", "in mid-answer"])
async def test_a_client_that_goes_away_cancels(server: Any, script: Any, stream: bool, how: str) -> None:
    server.bus.script = script
    reader, writer = await send(server, stream=stream)
    asked = await submitted(server)
    if stream and script[0] is not FOREVER:
        await reader.readuntil(b'"a"')
    if how == "reset":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        writer.transport.abort()
    elif how == "close":
        writer.close()
    else:
        writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        await asked.cancelled.wait()
    await server.until_metric("omni_bus_cancels_total", 1)
    await server.until_metric('omni_bus_requests_total{route="/v1/chat/completions",status="499"}', 1)
    writer.close()
    server.bus.script = GOOD
    assert (await server.chat())[0] == 200
    await server.until_metric("omni_bus_requests_in_flight", 1)  # the scrape itself


async def test_a_reader_that_closes_while_much_is_under_way_cancels(server: Any) -> None:
    server.bus.script = [audio()] * 100_000
    reader, writer = await send(server, stream=True, modalities=["audio"])
    await reader.readexactly(100_000)
    writer.transport.abort()
    stream = await submitted(server)
    async with asyncio.timeout(PATIENCE_S):
        await stream.cancelled.wait()
    taken = stream.taken
    await asyncio.sleep(0.05)
    assert stream.taken == taken < 100_000


async def test_a_slow_reader_stalls_only_itself(server: Any) -> None:
    """100,000 chunks are half a GB: far more than all the buffers between us and the reader."""
    server.bus.script = [audio()] * 100_000
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    sock.setblocking(False)
    reader, writer = await send(server, sock=sock, stream=True, modalities=["audio"])
    stalled = await submitted(server)
    await reader.readuntil(b'"audio"')
    async with asyncio.timeout(PATIENCE_S):
        taken = -1
        while taken != stalled.taken:
            taken = stalled.taken
            await asyncio.sleep(0.1)
    assert 0 < taken < 5_000, "the API holds no more than the sockets' buffers"
    server.bus.script = GOOD
    for _ in range(3):
        assert (await server.chat())[0] == 200
    assert stalled.taken == taken and not stalled.cancelled.is_set()
    while stalled.taken == taken:  # it reads again, and goes on
        assert await reader.read(64 * 1024)
    writer.transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        await stalled.cancelled.wait()


async def test_a_reader_that_never_reads_is_dropped_after_its_deadline(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "GRACE_S", 0.1)
    server.bus.script = [audio()] * 100_000
    _, writer = await send(server, stream=True, modalities=["audio"], timeout=0.4)
    stream = await submitted(server)
    async with asyncio.timeout(PATIENCE_S):
        await stream.cancelled.wait()
    await server.until_metric('omni_bus_requests_total{route="/v1/chat/completions",status="408"}', 1)
    assert await server.metric('omni_bus_failures_total{code="deadline_exceeded"}') == 1
    assert await server.metric("omni_bus_cancels_total") == 0
    writer.transport.abort()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bus_that_misses_the_deadline_does_not_hold_the_client(
    server: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(submission, "GRACE_S", 0.05)
    server.bus.script = (FOREVER,)
    status, answer = await server.chat(stream=stream, timeout=0.1)
    assert (status, answer["error"]["code"]) == (408, "deadline_exceeded")
    assert server.bus.streams[0].cancelled.is_set()


async def test_a_bus_that_never_acknowledges_a_cancel_does_not_hold_the_answer(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(stream: ScriptedStream) -> None:
        stream.cancelled.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(submission, "GRACE_S", 0.05)
    monkeypatch.setattr(ScriptedStream, "cancel", never)
    server.bus.script = (FOREVER,)
    status, answer = await server.chat(timeout=0.1)
    assert (status, answer["error"]["code"]) == (408, "deadline_exceeded")


async def test_an_upload_that_stops_is_given_up(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_bus.api import body

    monkeypatch.setattr(body, "READ_S", 0.1)
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    )
    async with asyncio.timeout(PATIENCE_S):
        assert b" 408 " in await reader.readline()
    writer.close()
