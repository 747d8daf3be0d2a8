"""/v1/realtime as a socket: who may open one, what closes it, and what its limits say. The bus behind it answers from scripts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bench.realtime_socket import RealtimeSocket, SocketClosed, connected
from omni_bus.api import voice_connection
from omni_bus.api.realtime import connection
from omni_bus.api.voice_socket import CONNECTIONS, close_all
from tests.api.conftest import Server, StartServer
from tests.support.realtime_events import EventChecker
from tests.support.scripted_bus import FOREVER, MODEL, audio, text

PATIENCE_S = 60.0
PCM = b"\x01\x00" * 4800


async def refused(server: Server, *, model: str = MODEL, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and error of an upgrade that is refused."""
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    url = f"{server.url}/v1/realtime?model={model}"
    async with server.http.get(url, headers={**upgrade, **headers}) as answer:
        assert answer.content_type == "application/json", answer
        return answer.status, (await answer.json())["error"]


async def closed(socket: RealtimeSocket) -> int | None:
    """Wait for the server's close."""
    with pytest.raises(SocketClosed):
        await socket.until("nothing that ever comes")
    return socket.socket.close_code


async def gone(server: Server) -> None:
    """Until no session is left."""
    async with asyncio.timeout(PATIENCE_S):
        while server.app[CONNECTIONS] or len(server.bus.leases):  # noqa: ASYNC110 - no event tells a test of it
            await asyncio.sleep(0.01)


def _file(task: asyncio.Task[Any]) -> str:
    return str(task.get_coro().cr_code.co_filename)  # type: ignore[union-attr]


async def respond(socket: RealtimeSocket) -> None:
    await socket.send("response.create")
    await socket.until("response.output_audio.delta")


# ---- who may open one


async def test_another_model_is_404_before_the_upgrade(server: Server) -> None:
    status, error = await refused(server, model="gpt-realtime")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert MODEL in error["message"]


async def test_a_plain_request_is_told_what_this_is(server: Server) -> None:
    async with server.http.get(f"{server.url}/v1/realtime?model={MODEL}") as answer:
        assert answer.status == 400
        assert "WebSocket" in (await answer.json())["error"]["message"]


async def test_a_plain_request_is_told_first_what_a_websocket_would_be_refused_for(start: StartServer) -> None:
    """A page learns nothing of why its WebSocket was refused, and asks again without one."""
    server = await start(max_sessions=1)

    async def plain(model: str = MODEL, **headers: str) -> tuple[int, str]:
        async with server.http.get(f"{server.url}/v1/realtime?model={model}", headers=headers) as answer:
            return answer.status, (await answer.json())["error"]["code"]

    assert await plain("gpt-realtime") == (404, "model_not_found")
    assert await plain(Origin="https://evil.example") == (403, "origin_refused")
    async with connected(server.url, MODEL):
        assert await plain() == (503, "overloaded")
    await gone(server)
    assert (await plain())[0] == 400
    assert await server.metric("omni_bus_voice_sessions") == 0
    async with connected(server.url, MODEL):
        pass


@pytest.fixture
async def keyed(start: StartServer, tmp_path: Any) -> Server:
    file = tmp_path / "keys"
    file.write_text("sk-one\nsk-two\n")
    return await start(api_keys_file=str(file))


async def test_a_key_in_the_header_or_among_the_subprotocols(keyed: Server) -> None:
    assert (await refused(keyed))[0] == 401
    assert (await refused(keyed, Authorization="Bearer sk-three"))[0] == 401
    assert (await refused(keyed, **{"Sec-WebSocket-Protocol": "realtime, openai-insecure-api-key.sk-three"}))[0] == 401
    async with connected(keyed.url, MODEL, Authorization="Bearer sk-one"):
        pass
    protocols = ("realtime", "openai-insecure-api-key.sk-two", "openai-beta.realtime-v1")
    async with keyed.http.ws_connect(f"{keyed.url}/v1/realtime?model={MODEL}", protocols=protocols) as socket:
        assert socket.protocol == "realtime"
        assert json.loads((await socket.receive(PATIENCE_S)).data)["type"] == "session.created"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://[", "https://127.0.0.1"])
async def test_a_page_of_another_site_is_refused(server: Server, origin: str) -> None:
    status, error = await refused(server, Origin=origin)
    assert (status, error["code"]) == (403, "origin_refused")


async def test_a_name_that_points_here_is_not_our_own(server: Server) -> None:
    """A page may have its own name resolve to 127.0.0.1; then host and origin are the same."""
    status, _ = await refused(server, Origin=f"http://evil.example:{server.port}", Host=f"evil.example:{server.port}")
    assert status == 403


async def test_our_own_page_and_listed_ones_may_connect(start: StartServer) -> None:
    server = await start(cors_origins=("https://app.example",))
    for origin in (server.url, "https://app.example"):
        async with connected(server.url, MODEL, Origin=origin):
            pass
    async with connected(server.url, MODEL, Origin=f"http://localhost:{server.port}", Host=f"localhost:{server.port}"):
        pass


async def test_with_keys_any_page_that_has_one_may_connect(keyed: Server) -> None:
    async with connected(keyed.url, MODEL, Origin="https://app.example", Authorization="Bearer sk-one"):
        pass


# ---- limits


async def test_one_session_too_many_is_503_and_one_of_a_client_429(start: StartServer) -> None:
    server = await start(max_sessions=2, max_sessions_per_client=0)
    async with connected(server.url, MODEL), connected(server.url, MODEL):
        status, error = await refused(server)
        assert (status, error["code"]) == (503, "overloaded")
        assert await server.metric("omni_bus_voice_sessions") == 2
    async with connected(server.url, MODEL):
        pass
    mine = await start(max_sessions_per_client=1)
    async with connected(mine.url, MODEL):
        status, error = await refused(mine)
        assert (status, error["code"]) == (429, "too_many_sessions")


async def test_sessions_are_counted_by_key(start: StartServer, tmp_path: Any) -> None:
    """Behind one address there may be many users, each with a key."""
    file = tmp_path / "keys"
    file.write_text("sk-one\nsk-two\n")
    server = await start(api_keys_file=str(file), max_sessions_per_client=1)
    async with connected(server.url, MODEL, Authorization="Bearer sk-one"):
        status, error = await refused(server, Authorization="Bearer sk-one")
        assert (status, error["code"]) == (429, "too_many_sessions")
        async with connected(server.url, MODEL, Authorization="Bearer sk-two"):
            pass


async def test_more_audio_than_is_kept_without_a_commit_is_refused(start: StartServer) -> None:
    server = await start(session_buffer_s=1.0)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
        for _ in range(6):
            await socket.append(PCM)
        error = (await socket.until("error"))["error"]
        assert (error["code"], error["param"]) == ("input_audio_buffer_full", "audio")
        await socket.send("input_audio_buffer.commit")
        await socket.until("input_audio_buffer.committed")
        assert [event.type for event in socket.events].count("error") == 1, "five pieces of 0.2 s had room"


async def test_a_large_event_is_refused_and_the_socket_stays_open(start: StartServer) -> None:
    server = await start(session_event_mb=1)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("input_audio_buffer.append", audio="A" * (2**20 + 4))
        error = (await socket.until("error"))["error"]
        assert (error["code"], "1 MiB" in error["message"]) == ("too_large", True)
        await socket.send("session.update", session={})
        await socket.until("session.updated")


async def test_an_event_that_is_not_even_read_closes_the_socket_and_says_why(start: StartServer) -> None:
    server = await start(session_event_mb=1)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("input_audio_buffer.append", audio="A" * 2**21)
        assert (await socket.until("error"))["error"]["code"] == "too_large"
        assert await closed(socket) == 1009


async def test_too_many_events_close_the_socket(start: StartServer) -> None:
    server = await start(session_events_per_s=1)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        for _ in range(30):
            await socket.send("input_audio_buffer.clear")
        assert (await socket.until("error"))["error"]["code"] == "too_many_events"
        assert await closed(socket) == 1008


@pytest.mark.parametrize(("limit", "code"), [("session_idle_s", "session_idle"), ("session_s", "session_expired")])
async def test_a_session_that_is_idle_or_over_is_closed(start: StartServer, limit: str, code: str) -> None:
    server = await start(**{limit: 0.2})
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        assert (await socket.until("error"))["error"]["code"] == code
        assert await closed(socket) == 1008
    await gone(server)


async def test_a_client_that_only_listens_is_not_idle(start: StartServer) -> None:
    """An answer of three seconds, sent at once: the time in which its client is quiet begins when it has been played."""
    server = await start(session_idle_s=2.0, voice_lead_s=5)
    server.bus.script = (text("Hello", "stop"), *(audio(b"\1\0" * 24_000) for _ in range(3)), audio(b"", last=True))
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("response.create")
        first = await socket.until("response.output_audio.delta")
        error = await socket.until("error")
        assert error["error"]["code"] == "session_idle"
        assert error.at - first.at > 3.5
        assert "response.done" in socket.types()
        assert await closed(socket) == 1008
    await gone(server)


# ---- what closes it


async def test_a_stop_of_the_server_closes_with_1012(server: Server) -> None:
    server.bus.script = (text("Hello"), audio(), FOREVER)
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await respond(socket)
        assert {_file(task).split("/")[-2] for task in asyncio.all_tasks()} >= {"voice"}, (
            "what the next test looks for is there"
        )
        await close_all(server.app)
        assert await closed(socket) == 1012
    await asyncio.wait_for(server.bus.streams[0].cancelled.wait(), PATIENCE_S)


async def test_two_hundred_sockets_closed_in_mid_response_leave_nothing(server: Server) -> None:
    server.bus.script = (text("Hello"), audio(), FOREVER)

    async def one(number: int) -> None:
        async with server.http.ws_connect(f"{server.url}/v1/realtime?model={MODEL}") as socket:
            await socket.send_str('{"type": "response.create"}')
            async for message in socket:
                if b"output_audio.delta" in message.data.encode():
                    break
            if number % 2:
                assert socket._response.connection is not None
                transport = socket._response.connection.transport
                assert transport is not None
                transport.abort()  # without a word, as a machine that loses its network

    for start in range(0, 200, 50):
        await asyncio.wait_for(asyncio.gather(*(one(start + number) for number in range(50))), PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        for stream in server.bus.streams:
            await stream.cancelled.wait()
    await gone(server)
    assert len(server.bus.streams) == 200
    assert await server.metric("omni_bus_voice_sessions") == 0
    left = [task for task in asyncio.all_tasks() if _file(task).split("/")[-2:-1] in (["voice"], ["realtime"])]
    assert not left


async def test_a_client_that_takes_nothing_is_cut_off_when_it_is_sent_away(
    start: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer fills every buffer on the way, and so would the close."""
    monkeypatch.setattr(voice_connection, "CLOSE_S", 0.3)
    server = await start(session_s=1.0, voice_lead_s=60.0)
    server.bus.script = (*(text("x" * 60_000) for _ in range(400)), FOREVER)
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1)
    writer.write(
        f"GET /v1/realtime?model={MODEL} HTTP/1.1\r\nHost: {server.host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
    )
    event = b'{"type": "response.create"}'
    writer.write(bytes([0x81, 0x80 | len(event), 0, 0, 0, 0]) + event)
    async with asyncio.timeout(PATIENCE_S):
        await server.bus.asked.wait()
        await server.bus.streams[0].cancelled.wait()
    await gone(server)
    assert server.bus.streams[0].taken < 400, "the client's slowness reached the stages"
    writer.close()
    del reader


async def test_a_fault_of_ours_closes_with_1011(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server.url, MODEL) as socket:

        def broken(event: object) -> bytes:
            raise TypeError("a fault")

        monkeypatch.setattr(connection, "render", broken)
        await socket.send("session.update", session={})
        assert await closed(socket) == 1011
    assert "a fault" in caplog.text


async def test_the_whole_event_of_a_client_that_is_wrong_is_named(server: Server) -> None:
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("conversation.item.truncate", event_id="x" * 1000, item_id="i", content_index=0, audio_end_ms="late")
        error = (await socket.until("error"))["error"]
        assert error["param"] == "audio_end_ms"
        assert error["event_id"] == "x" * 512


async def test_heavy_events_are_read_beside_the_loop(server: Server) -> None:
    """A minute of audio in one event: more than is read on the loop."""
    import base64

    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
        await socket.send("input_audio_buffer.append", audio=base64.b64encode(PCM * 300).decode())
        await socket.send("input_audio_buffer.commit")
        await socket.until("input_audio_buffer.committed")
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_audio", "audio": base64.b64encode(PCM * 50).decode()}],
        }
        await socket.send("conversation.item.create", item=item)
        await socket.until("conversation.item.done", since=socket.count)
