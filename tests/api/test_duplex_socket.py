"""/v1/duplex, message by message: what a client may send and what it gets. The bus behind it answers from scripts."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy
import pytest

from omni_bus.api import voice_connection
from omni_bus.api.duplex import server_messages
from omni_bus.api.voice import events
from omni_bus.api.voice.events import SessionEvent
from omni_bus.api.voice.items import Item
from omni_bus.api.voice_socket import CONNECTIONS, close_all
from omni_bus.payloads import TextPart
from tests.api.conftest import Server, StartServer
from tests.support.duplex_socket import AUDIO, CONTROL, EVENT, HELLO, TEXT, DuplexSocket, SocketClosed, connected
from tests.support.scripted_bus import FOREVER, MODEL, audio, heard, text

PATIENCE_S = 60.0
SECOND = (10_000 * numpy.sin(numpy.arange(24_000) * 0.05)).astype("<i2").tobytes()
WORDS = ("One ", "two ", "three ", "four")
STORY = (
    *(text(word) for word in WORDS),
    *(audio(SECOND, spoken=len("".join(WORDS[: count + 1]))) for count in range(4)),
    FOREVER,
)
YES = (text("Yes", "stop"), audio(SECOND[:9600]), audio(b"", last=True))


async def error_of(socket: DuplexSocket, since: int) -> tuple[str, str]:
    fields = (await socket.until("error", since=since)).fields
    return fields["code"], fields["message"]


async def closed(socket: DuplexSocket) -> int | None:
    with pytest.raises(SocketClosed):
        await socket.until("nothing that ever comes")
    return socket.socket.close_code


async def gone(server: Server) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while server.app[CONNECTIONS] or len(server.bus.leases):  # noqa: ASYNC110 - no event tells a test of it
            await asyncio.sleep(0.01)


def said_by(server: Server, role: str) -> list[str]:
    """The words of each message of that role in the prompt of the last answer."""
    messages = server.bus.submissions[-1].payload.messages
    return [
        "".join(part.text for part in message.parts if isinstance(part, TextPart))
        for message in messages
        if message.role == role
    ]


# ---- the hello


async def test_the_hello_says_what_holds(start: StartServer) -> None:
    server = await start(session_event_mb=2, voice_lead_s=1.5)
    async with connected(server.url) as socket:
        hello = await socket.hello(model=MODEL)
        assert hello.pop("session").startswith("sess_")
        assert hello.pop("turn_detection")["type"] == "server_vad"
        limits = hello.pop("limits")
        assert limits == {"message_bytes": 2**21, "messages_per_s": 200, "buffer_s": 120, "idle_s": 600, "session_s": 3600}
        assert hello == {
            "version": 1,
            "model": MODEL,
            "input_rate": 24_000,
            "output_rate": 24_000,
            "output": "both",
            "voice": "Ethan",
            "transcripts": False,
            "lead_ms": 1500,
            "audio_bytes": 4800,
        }


async def test_every_field_of_a_hello_is_taken(server: Server) -> None:
    async with connected(server.url) as socket:
        hello = await socket.hello(
            input_rate=8000,
            output_rate=16000,
            instructions="Be brief.",
            voice="Chelsie",
            output="audio",
            turn_detection=None,
            transcripts=True,
            lead_ms=300,
            max_output_tokens=7,
            something_later="is ignored",
        )
        assert (hello["input_rate"], hello["output_rate"], hello["audio_bytes"]) == (8000, 16000, 3200)
        assert (hello["voice"], hello["output"], hello["turn_detection"], hello["transcripts"]) == (
            "chelsie",
            "audio",
            None,
            True,
        )
        assert hello["lead_ms"] == 300
        await socket.say("hi")
        await socket.until("answer_done")
    [asked] = server.bus.submissions
    assert asked.options.voice == "chelsie" and asked.options.modalities == ("text", "audio")
    assert asked.options.sampling["thinker"].max_tokens == 7
    assert said_by(server, "system") == ["Be brief."]


async def test_a_voice_of_openais_stands_for_the_models_first(server: Server) -> None:
    async with connected(server.url) as socket:
        assert (await socket.hello(voice="verse"))["voice"] == "Ethan"


WRONG_HELLOS: dict[str, tuple[dict[str, Any], str, str]] = {
    "another version": ({"version": 2}, "unsupported_version", "version"),
    "no version": ({"version": None}, "invalid_request", "version"),
    "another model": ({"model": "other"}, "model_not_found", MODEL),
    "a rate": ({"input_rate": 44100}, "invalid_request", "input_rate"),
    "a rate out": ({"output_rate": "24000"}, "invalid_request", "output_rate"),
    "a voice": ({"voice": "nobody"}, "model_refused", "voice"),
    "an output": ({"output": "smell"}, "invalid_request", "output"),
    "turns": ({"turn_detection": {"type": "server_vad", "threshold": 2}}, "invalid_request", "turn_detection.threshold"),
    "a lead": ({"lead_ms": 100}, "invalid_request", "lead_ms"),
}


@pytest.mark.parametrize("name", WRONG_HELLOS)
async def test_a_wrong_hello_is_refused_and_may_be_followed_by_a_right_one(server: Server, name: str) -> None:
    fields, code, said = WRONG_HELLOS[name]
    async with connected(server.url) as socket:
        await socket.send(HELLO, json.dumps({"version": 1, **fields}).encode())
        found, message = await error_of(socket, 0)
        assert found == code and said in message
        assert (await socket.hello())["input_rate"] == 24_000


async def test_a_model_without_a_voice_answers_in_text(start: StartServer) -> None:
    server = await start(output_modalities=("text",))
    server.bus.script = (text("Yes", "stop"),)
    async with connected(server.url) as socket:
        assert (await socket.hello())["output"] == "text"
        await socket.say("hi")
        await socket.until("answer_done")
        assert socket.names(1) == ["answer_started", "text", "answer_done"]


# ---- turns


async def test_a_text_turn_message_by_message(server: Server) -> None:
    server.bus.script = (text("Yé"), audio(SECOND), text("s", "stop"), audio(b"", last=True))
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.say("hi")
        done = (await socket.until("answer_done")).fields
        started = (await socket.until("answer_started")).fields
        assert done == {
            "type": "answer_done",
            "id": started["id"],
            "status": "completed",
            "reason": None,
            "usage": {"input_tokens": 7, "cached_tokens": 4, "output_tokens": 5},
        }
        assert socket.pcm() == SECOND
        assert socket.text() == "Yés"
        assert socket.names(1)[0] == "answer_started" and socket.names()[-1] == "answer_done"


@pytest.mark.parametrize(("output", "kinds"), [("both", {"audio", "text"}), ("audio", {"audio"}), ("text", {"text"})])
async def test_an_answer_comes_as_it_is_wanted(server: Server, output: str, kinds: set[str]) -> None:
    server.bus.script = YES if output != "text" else (text("Yes", "stop"),)
    async with connected(server.url) as socket:
        await socket.hello(output=output)
        await socket.say("hi")
        await socket.until("answer_done")
        assert {message.name for message in socket.messages if message.kind in (AUDIO, TEXT)} == kinds


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000])
async def test_audio_keeps_its_duration_at_every_rate_both_ways(server: Server, rate: int) -> None:
    server.bus.script = (text("Yes", "stop"), audio(SECOND), audio(SECOND), audio(b"", last=True))
    async with connected(server.url) as socket:
        await socket.hello(input_rate=rate, output_rate=rate, turn_detection=None)
        await socket.audio(numpy.full(rate * 3 // 2, 1000, "<i2").tobytes(), size=640)
        await socket.control("commit")
        await socket.until("answer_done")
        assert len(socket.pcm()) / 2 / rate == pytest.approx(2.0, abs=0.001)
        samples = numpy.frombuffer(socket.pcm(), "<i2").astype(float)
        assert numpy.sqrt(numpy.mean(samples**2)) == pytest.approx(10_000 / 2**0.5, rel=0.02)
    [tensor] = server.bus.submissions[0].tensors.values()
    samples = numpy.frombuffer(tensor.data, numpy.float32)
    assert numpy.flatnonzero(samples > 0.01)[-1] / 16_000 == pytest.approx(1.5, abs=0.001)


async def test_push_to_talk_is_written_down_and_answered(start: StartServer) -> None:
    server = await start(ear=True)
    server.bus.script = (heard("What is it?"), *YES)
    async with connected(server.url) as socket:
        await socket.hello(turn_detection=None, transcripts=True)
        await socket.audio(SECOND)
        await socket.control("commit")
        await socket.until("answer_done")
        assert (await socket.until("transcript")).fields["text"] == "What is it?"


async def test_a_commit_of_too_little_and_what_was_cleared(server: Server) -> None:
    async with connected(server.url) as socket:
        await socket.hello(turn_detection=None)
        await socket.audio(SECOND)
        await socket.control("clear")
        await socket.control("commit")
        assert (await error_of(socket, 0))[0] == "input_audio_buffer_commit_empty"
        assert not server.bus.submissions


# ---- interruptions


@pytest.mark.parametrize("how", ["cancel", "say", "commit"])
async def test_nothing_of_an_answer_follows_its_interruption(start: StartServer, how: str) -> None:
    server = await start(voice_lead_s=2.0)
    server.bus.script = STORY
    async with connected(server.url) as socket:
        await socket.hello(turn_detection=None)
        await socket.audio(SECOND)
        await socket.say("A story")
        await socket.until("audio")
        server.bus.script = YES
        await (socket.say("Stop") if how == "say" else socket.control(how))
        interrupted = await socket.until("interrupted")
        since = socket.index(interrupted)
        done = (await socket.until("answer_done")).fields
        assert (done["status"], done["reason"], done["id"]) == ("cancelled", "client_cancelled", interrupted.fields["id"])
        await asyncio.wait_for(server.bus.streams[0].cancelled.wait(), PATIENCE_S)
        if how == "cancel":
            await socket.sync()
            assert socket.names(since) == ["interrupted", "answer_done", "pong"]
            return
        await socket.until("answer_done", since=since, where=lambda message: message.fields["status"] == "completed")
        assert socket.names(since)[:3] == ["interrupted", "answer_done", "answer_started"]
        assert socket.pcm(since) == SECOND[:9600]
        assert said_by(server, "assistant") != ["".join(WORDS)], "the last word had not been sent"


async def test_what_the_client_says_it_has_played_is_what_counts(start: StartServer) -> None:
    """All four seconds are sent at once; the client has played two and a half when it is interrupted, and says so afterwards."""
    server = await start(voice_lead_s=60.0)
    server.bus.script = STORY
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.say("Count")
        while len(socket.pcm()) < 4 * len(SECOND):
            await socket.until("audio", since=socket.count)
        await socket.control("cancel")
        interrupted = (await socket.until("interrupted")).fields
        await socket.control("played", ms=2500, id=interrupted["id"])
        server.bus.script = YES
        await socket.say("Go on")
        await socket.until("answer_done", where=lambda message: message.fields["status"] == "completed")
        assert said_by(server, "assistant") == ["One two"]
        await socket.control("played", ms=1400, id=interrupted["id"])
        since = socket.count
        await socket.say("And now?")
        await socket.until("answer_done", since=since)
        assert said_by(server, "assistant")[0] == "One"


async def test_a_client_that_plays_later_than_our_clock_thinks_is_believed(start: StartServer) -> None:
    server = await start(voice_lead_s=60.0)
    server.bus.script = STORY
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.say("Count")
        while len(socket.pcm()) < 4 * len(SECOND):
            await socket.until("audio", since=socket.count)
        await asyncio.sleep(1.2)
        said = time.monotonic()
        await socket.control("played", ms=0)
        await socket.control("cancel")
        interrupted = await socket.until("interrupted")
        assert interrupted.fields["played_ms"] <= (interrupted.at - said) * 1000 + 1


async def test_a_client_that_has_played_all_of_it_gets_more_at_once(start: StartServer) -> None:
    """Its lead is what bounds how much is sent: reports that say it has played make room."""
    server = await start(voice_lead_s=1.0)
    server.bus.script = (text("Long", "stop"), *(audio(SECOND) for _ in range(60)), audio(b"", last=True))
    async with connected(server.url) as socket:
        await socket.hello()
        begun = time.monotonic()
        await socket.say("Go")
        seen = 0
        while "answer_done" not in socket.names():
            await asyncio.wait_for(socket._changed.wait(), PATIENCE_S)
            socket._changed.clear()
            if len(socket.pcm()) > seen:
                seen = len(socket.pcm())
                await socket.control("played", ms=seen / 48)
        assert len(socket.pcm()) == 60 * len(SECOND)
        assert time.monotonic() - begun < 55, "60 s of audio, paced by the client's own playback"


async def test_what_is_sent_ahead_fits_the_clients_memory(start: StartServer) -> None:
    server = await start(voice_lead_s=5.0)
    server.bus.script = (text("Long", "stop"), *(audio(SECOND) for _ in range(3)), audio(b"", last=True))
    async with connected(server.url) as socket:
        await socket.hello(lead_ms=300)
        begun = time.monotonic()
        await socket.say("Go")
        await socket.until("answer_done")
        sent = 0
        for message in socket.messages:
            if message.kind == AUDIO:
                sent += len(message.body)
                assert sent / 48 <= 300 + (message.at - begun) * 1000
        assert sent == 3 * len(SECOND)


async def test_an_answer_that_has_been_sent_whole_can_still_be_silenced(start: StartServer) -> None:
    server = await start(voice_lead_s=60.0)
    server.bus.script = (text("Yes", "stop"), audio(SECOND * 30), audio(b"", last=True))
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.say("hi")
        done = await socket.until("answer_done")
        await socket.control("cancel")
        interrupted = (await socket.until("interrupted")).fields
        assert interrupted["id"] == done.fields["id"] and interrupted["played_ms"] < 30_000
        await socket.control("cancel")
        await socket.sync()
        assert socket.names().count("interrupted") == 1 and socket.names().count("answer_done") == 1


async def test_a_cancel_before_the_first_sound_and_one_of_nothing(server: Server) -> None:
    server.bus.script = (FOREVER,)
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.control("cancel")
        await socket.sync()
        assert socket.names() == ["hello", "pong"]
        await socket.say("hi")
        await socket.until("answer_started")
        await socket.control("cancel")
        await socket.until("answer_done")
        assert socket.names(2) == ["answer_started", "interrupted", "answer_done"]
        assert (await socket.until("interrupted")).fields["played_ms"] == 0


async def test_an_answer_that_fails_says_why(server: Server) -> None:
    from omni_bus.errors import StageFailed

    server.bus.script = (text("He"), StageFailed("the stage thinker failed"))
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.say("hi")
        done = (await socket.until("answer_done")).fields
        assert done["status"] == "failed"
        assert (await error_of(socket, 0))[0] == done["reason"]


# ---- updates


async def test_an_update_holds_from_the_next_answer_on(server: Server) -> None:
    async with connected(server.url) as socket:
        await socket.hello()
        since = socket.count
        await socket.control(
            "update", output="text", instructions="Be brief.", turn_detection=None, transcripts=True, lead_ms=400
        )
        hello = (await socket.until("hello", since=since)).fields
        assert (hello["output"], hello["turn_detection"], hello["transcripts"], hello["lead_ms"]) == ("text", None, True, 400)
        await socket.say("hi")
        await socket.until("answer_done")
        assert server.bus.submissions[-1].options.modalities == ("text",)


async def test_what_an_update_may_not_change(server: Server) -> None:
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.say("hi")
        await socket.until("answer_done")
        for fields, code in (({"output_rate": 8000}, "cannot_update_rate"), ({"voice": "chelsie"}, "cannot_update_voice")):
            since = socket.count
            await socket.control("update", **fields)
            found, message = await error_of(socket, since)
            assert found == code and next(iter(fields)) in message


# ---- what is wrong


WRONG: dict[str, tuple[bytes, str, str]] = {
    "nothing": (b"", "invalid_message", "empty"),
    "the server's kind": (bytes([EVENT]) + b"{}", "invalid_message", "kind 4"),
    "a second hello": (bytes([HELLO]) + b'{"version": 1}', "hello_twice", "update"),
    "half a sample": (bytes([AUDIO]) + b"abc", "invalid_audio", "3 bytes"),
    "no UTF-8": (bytes([TEXT]) + b"\xff", "invalid_message", "UTF-8"),
    "no words": (bytes([TEXT]) + b" ", "invalid_message", "words"),
    "no JSON": (bytes([CONTROL]) + b"{", "invalid_request", "JSON"),
    "no object": (bytes([CONTROL]) + b"[]", "invalid_request", "object"),
    "no type": (bytes([CONTROL]) + b"{}", "invalid_message", "type"),
    "another type": (bytes([CONTROL]) + b'{"type": "comit"}', "invalid_message", '"commit"'),
    "no time": (bytes([CONTROL]) + b'{"type": "played"}', "invalid_request", "ms"),
    "a negative time": (bytes([CONTROL]) + b'{"type": "played", "ms": -1}', "invalid_request", "ms"),
    "an unknown answer": (bytes([CONTROL]) + b'{"type": "played", "ms": 1, "id": "resp_0"}', "unknown_answer", "id"),
    "no answer yet": (bytes([CONTROL]) + b'{"type": "played", "ms": 1}', "unknown_answer", "id"),
    "deep": (bytes([CONTROL]) + b'{"type": "update", "turn_detection": ' + b"[" * 5000, "invalid_request", ""),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_message_is_an_error_and_the_socket_stays_open(server: Server, name: str) -> None:
    data, code, said = WRONG[name]
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.socket.send_bytes(data)
        found, message = await error_of(socket, 0)
        assert found == code and said in message
        await socket.sync()


async def test_before_the_hello_nothing_else_is_taken(server: Server) -> None:
    async with connected(server.url) as socket:
        for kind in (AUDIO, TEXT, CONTROL):
            since = socket.count
            await socket.send(kind, b"\0\0")
            assert (await error_of(socket, since))[0] == "hello_required"
        await socket.hello()


async def test_unknown_kinds_are_ignored_and_text_messages_are_not(server: Server) -> None:
    async with connected(server.url) as socket:
        await socket.hello()
        for kind in range(5, 256):
            await socket.send(kind, b"anything")
        await socket.sync()
        assert socket.names() == ["hello", "pong"]
        await socket.socket.send_str('{"type": "commit"}')
        assert "binary" in (await error_of(socket, 0))[1]


async def test_a_large_message_is_refused_and_the_socket_stays_open(start: StartServer) -> None:
    server = await start(session_event_mb=1)
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.send(AUDIO, bytes(2**20))
        assert (await error_of(socket, 0))[0] == "too_large"
        await socket.sync()
        since = socket.count
        await socket.send(AUDIO, bytes(2**21))
        assert (await error_of(socket, since))[0] == "too_large"
        assert await closed(socket) == 1009


async def test_audio_beyond_what_is_kept_is_refused(start: StartServer) -> None:
    server = await start(session_buffer_s=2.0)
    async with connected(server.url) as socket:
        await socket.hello(turn_detection=None)
        await socket.audio(SECOND * 3)
        assert (await error_of(socket, 0))[0] == "input_audio_buffer_full"


def test_answers_that_are_silenced_together_are_told_of_once_each() -> None:
    """One that was still played, and the next, of which some had been sent behind it."""
    messages = server_messages.ServerMessages()
    state = events.ResponseState(
        id="resp_2",
        status="cancelled",
        reason="turn_detected",
        conversation_id=None,
        speaks=True,
        voice=None,
        output_format="pcm16",
        max_output_tokens=None,
        metadata=None,
        usage=events.Usage(),
    )
    told = [
        *(
            events.OutputItemAdded(f"resp_{number}", 0, Item.message("assistant", item_id=f"item_{number}"))
            for number in (1, 2)
        ),
        events.AnswerInterrupted("item_2", 0.0),
        events.AnswerInterrupted("item_1", 500.0),
        events.ResponseDone(state),
    ]
    sent = [json.loads(message[1:]) for event in told for message in messages.render(event)]
    assert [(one["type"], one["id"]) for one in sent] == [
        *(("interrupted", "resp_2"), ("interrupted", "resp_1"), ("answer_done", "resp_2")),
    ]


def test_an_answer_that_calls_much_is_still_known_by_what_it_said() -> None:
    messages = server_messages.ServerMessages()
    items = [Item.message("assistant", item_id="said"), *(Item.function_call("look") for _ in range(20))]
    for index, item in enumerate(items):
        assert not list(messages.render(events.OutputItemAdded("resp_1", index, item)))
    assert messages.item_of("resp_1") == "said"
    [told] = [json.loads(message[1:]) for message in messages.render(events.AnswerInterrupted("said", 80.0))]
    assert told == {"type": "interrupted", "id": "resp_1", "played_ms": 80}


def test_every_event_of_a_session_has_a_message_or_is_left_out_on_purpose() -> None:
    said = (
        *(events.OutputAudioDelta, events.OutputTranscriptDelta, events.OutputTextDelta, events.UserSpeechStarted),
        *(events.UserSpeechStopped, events.InputTranscriptDone, events.InputTranscriptFailed, events.ResponseCreated),
        *(events.OutputItemAdded, events.AnswerInterrupted, events.ResponseDone, events.ErrorRaised),
    )

    told = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, SessionEvent)}
    assert told - {SessionEvent, events.InPart} == {*server_messages._UNTOLD, *said}


# ---- doors, limits and ends


async def test_keys(start: StartServer, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one\n")
    server = await start(api_keys_file=str(file))
    for headers in ({}, {"Authorization": "Bearer sk-two"}):
        async with server.http.get(f"{server.url}/v1/duplex", headers=headers) as answer:
            assert answer.status == 401
    async with connected(server.url, Authorization="Bearer sk-one") as socket:
        await socket.hello()
    protocols = ("duplex", "openai-insecure-api-key.sk-one")
    async with server.http.ws_connect(f"{server.url}/v1/duplex", protocols=protocols) as plain:
        assert plain.protocol == "duplex"


async def test_a_page_of_another_site_and_a_plain_request_are_refused(server: Server) -> None:
    async with server.http.get(f"{server.url}/v1/duplex", headers={"Origin": "https://evil.example"}) as answer:
        assert answer.status == 403
    async with server.http.get(f"{server.url}/v1/duplex") as answer:
        assert answer.status == 400 and "WebSocket" in (await answer.json())["error"]["message"]


async def test_sessions_are_counted_together_with_those_of_realtime(start: StartServer) -> None:
    server = await start(max_sessions_per_client=2)
    async with connected(server.url) as socket, server.http.ws_connect(f"{server.url}/v1/realtime"):
        await socket.hello()
        with pytest.raises(Exception, match="429"):
            await server.http.ws_connect(f"{server.url}/v1/duplex")


async def test_too_many_messages_and_too_long_a_silence_close_the_socket(start: StartServer) -> None:
    server = await start(session_events_per_s=1)
    async with connected(server.url) as socket:
        for _ in range(30):
            await socket.send(99)
        assert (await error_of(socket, 0))[0] == "too_many_events"
        assert await closed(socket) == 1008
    server = await start(session_idle_s=0.2)
    async with connected(server.url) as socket:
        assert (await error_of(socket, 0))[0] == "session_idle"
        assert await closed(socket) == 1008
    await gone(server)


async def test_a_stop_of_the_server_closes_with_1012(server: Server) -> None:
    server.bus.script = (text("Hello"), audio(), FOREVER)
    async with connected(server.url) as socket:
        await socket.hello()
        await socket.say("hi")
        await socket.until("audio")
        await close_all(server.app)
        assert await closed(socket) == 1012
    await asyncio.wait_for(server.bus.streams[0].cancelled.wait(), PATIENCE_S)


async def test_a_fault_of_ours_closes_with_1011(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(voice_connection, "CLOSE_S", 0.5)
    async with connected(server.url) as socket:
        await socket.hello()

        def broken(name: str, **fields: object) -> bytes:
            raise TypeError("a fault")

        monkeypatch.setattr(server_messages, "event_message", broken)
        await socket.say("hi")
        assert await closed(socket) == 1011
    assert "a fault" in caplog.text


async def test_fifty_sockets_closed_in_mid_answer_leave_nothing(server: Server) -> None:
    server.bus.script = (text("Hello"), audio(), FOREVER)

    async def one(number: int) -> None:
        async with connected(server.url) as socket:
            await socket.hello()
            await socket.say("hi")
            await socket.until("audio")
            if number % 2:
                response = socket.socket._response.connection
                assert response is not None and response.transport is not None
                response.transport.abort()  # without a word, as a device that loses its network

    await asyncio.wait_for(asyncio.gather(*map(one, range(50))), 2 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        for stream in server.bus.streams:
            await stream.cancelled.wait()
    await gone(server)
    assert len(server.bus.streams) == 50
    assert await server.metric("omni_bus_voice_sessions") == 0
    left = [
        repr(task) for task in asyncio.all_tasks() if "omni_bus/api/voice" in repr(task) or "omni_bus/api/duplex" in repr(task)
    ]
    assert not left
