"""POST /v1/audio/speech over a scripted bus: what the bus is asked for, the bytes and events that come back, and how it fails."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pathlib
import re
from typing import Any

import aiohttp
import numpy
import pytest
import soundfile

from omni_bus.api import submission, transcription_request
from omni_bus.api.audio_decode import decode_audio
from omni_bus.api.speech_request import FORMATS, SpeechBody
from omni_bus.errors import NoReadyReplica, StageFailed
from omni_bus.payloads import ChatInput, Message, TextPart
from tests.support.scripted_bus import FOREVER, MODEL, PCM_CHUNK, StreamItem, audio, heard, text

TONE = bytes((0.3 * numpy.sin(2 * numpy.pi * 440 * numpy.arange(2400) / 24_000) * 32767).astype("<i2").tobytes())
ROUTE = "/v1/audio/speech"
SPOKEN = (heard(""), text("Hello.", "stop"), *[audio(TONE)] * 10, audio(b"", last=True))  # one second
GOOD = {"model": MODEL, "input": "Hello.", "voice": "ethan"}
CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


async def speak(server: Any, **fields: Any) -> tuple[int, str, bytes]:
    """Status, content type and body of a good request with `fields` over it."""
    async with server.http.post(f"{server.url}{ROUTE}", json={**GOOD, **fields}) as answer:
        return answer.status, answer.content_type, await answer.read()


async def refused(server: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    status, content_type, body = await speak(server, **fields)
    assert content_type == "application/json"
    return status, json.loads(body)["error"]


async def events(server: Any, **fields: Any) -> list[dict[str, Any]]:
    status, content_type, body = await speak(server, stream_format="sse", **fields)
    assert (status, content_type) == (200, "text/event-stream")
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize("response_format", CONTENT_TYPES)
async def test_the_body_is_the_audio(server: Any, response_format: str) -> None:
    server.bus.script = SPOKEN
    status, content_type, body = await speak(server, response_format=response_format)
    assert (status, content_type) == (200, CONTENT_TYPES[response_format])
    if response_format == "pcm":
        assert body == TONE * 10
        return
    samples = numpy.frombuffer(bytes(decode_audio(body, False, "file")), "<f4")
    assert len(samples) / 16_000 == pytest.approx(1.0, abs=0.08)
    assert numpy.abs(numpy.fft.rfft(samples)).argmax() * 16_000 / len(samples) == pytest.approx(440, abs=2)


async def test_mp3_is_what_nobody_asked_for(server: Any) -> None:
    server.bus.script = SPOKEN
    _, content_type, body = await speak(server)
    assert content_type == "audio/mpeg" and decode_audio(body, False, "file")


async def test_what_the_bus_is_asked_for(server: Any) -> None:
    server.bus.script = SPOKEN
    await speak(server, input="  Read me.\n", voice={"id": "CHELSIE"}, instructions="Whisper.", seed=7, timeout=9, unheard_of=1)
    asked = server.bus.submissions[0]
    [message] = asked.payload.messages
    assert asked.payload == ChatInput((message,), say="  Read me.\n")
    assert message == Message("user", (TextPart("Read the text aloud, word for word. Whisper."),))
    assert asked.options.modalities == ("audio",) and asked.options.voice == "chelsie" and asked.options.seed == 7
    assert 8 < asked.deadline_s <= 9 and asked.tensors == {}
    async with server.http.post(
        f"{server.url}{ROUTE}", json={"model": MODEL, "input": "Hi"}, headers={"X-Request-Timeout": "5"}
    ) as answer:
        assert answer.status == 200
    asked = server.bus.submissions[1]
    assert asked.payload.messages == (Message("user", (TextPart("Read the text aloud, word for word."),)),)
    assert asked.options.voice is None
    assert 4 < asked.deadline_s <= 5


@pytest.mark.parametrize("voice", ["alloy", "Nova", {"id": "fable"}])
async def test_a_voice_of_openais_stands_for_the_models_first(server: Any, voice: object) -> None:
    server.bus.script = SPOKEN
    status, _, body = await speak(server, voice=voice)
    assert status == 200 and body
    assert server.bus.submissions[0].options.voice == "Ethan"


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 4.0])
async def test_speed_changes_the_length_and_keeps_the_pitch(server: Any, speed: float) -> None:
    server.bus.script = (*[audio(TONE)] * 40, audio(b"", last=True))
    _, _, body = await speak(server, speed=speed, response_format="wav")
    samples, rate = soundfile.read(io.BytesIO(body))
    assert rate == 24_000 and len(samples) / rate == pytest.approx(4 / speed, rel=0.03)
    assert numpy.abs(numpy.fft.rfft(samples)).argmax() * rate / len(samples) == pytest.approx(440, abs=3)
    assert await server.metric("omni_bus_audio_seconds_total") == pytest.approx(4 / speed)


async def test_events_carry_the_same_bytes_and_end_with_the_usage(server: Any) -> None:
    server.bus.script = SPOKEN
    *deltas, done = await events(server, response_format="pcm")
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"} and len(deltas) == 10
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == TONE * 10
    assert done == {"type": "speech.audio.done", "usage": {"input_tokens": 9, "output_tokens": 3, "total_tokens": 12}}
    *deltas, _ = await events(server, response_format="mp3")
    file = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert all(delta["audio"] for delta in deltas) and decode_audio(file, False, "file")


@pytest.mark.parametrize("response_format", CONTENT_TYPES)
async def test_each_piece_leaves_as_it_comes(server: Any, response_format: str) -> None:
    """The bus has given half a second, and never gives more: the client has the file's beginning all the same."""
    server.bus.script = (*[audio(TONE)] * 5, FOREVER)
    async with (
        asyncio.timeout(60),
        server.http.post(f"{server.url}{ROUTE}", json={**GOOD, "response_format": response_format}) as answer,
    ):
        assert answer.headers["Transfer-Encoding"] == "chunked" and await answer.content.readany()
    async with asyncio.timeout(60):
        await server.bus.streams[0].cancelled.wait()


async def test_a_client_that_goes_away_cancels(server: Any) -> None:
    for sse in ("audio", "sse"):
        server.bus.script = (*[audio(TONE)] * 5, FOREVER)
        async with asyncio.timeout(60):
            answer = await server.http.post(f"{server.url}{ROUTE}", json={**GOOD, "stream_format": sse})
            assert await answer.content.readany()
            answer.close()
            await server.bus.streams[-1].cancelled.wait()
    assert await server.metric('omni_bus_requests_total{route="/v1/audio/speech",status="499"}') == 2


async def test_nothing_to_hear_is_still_a_file(server: Any) -> None:
    server.bus.script = (text("😀", "stop"), audio(b"", last=True))
    status, _, body = await speak(server, input="😀", response_format="wav")
    assert status == 200 and len(body) == 44 and body[:4] == b"RIFF"
    assert [event["type"] for event in await events(server, input="😀")] == ["speech.audio.done"]


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
@pytest.mark.parametrize(
    ("error", "status"),
    [(NoReadyReplica("stage talker has no ready replica"), 503), (StageFailed("x"), 500), (RuntimeError("/secret"), 500)],
)
async def test_a_failure_before_the_first_audio_is_a_status(
    server: Any, error: Exception, status: int, stream_format: str
) -> None:
    server.bus.script = (text("Hello.", "stop"), error)
    got, failure = await refused(server, stream_format=stream_format)
    assert got == status and "secret" not in failure["message"]


async def test_a_failure_in_mid_audio_breaks_the_body_off(server: Any) -> None:
    """A body that ended in order would be taken for the whole."""
    server.bus.script = (audio(TONE), StageFailed("stage vocoder failed"))
    with pytest.raises(aiohttp.ClientError):
        await speak(server, response_format="pcm")
    assert await server.metric('omni_bus_failures_total{code="stage_failed"}') == 1
    assert await server.metric('omni_bus_requests_total{route="/v1/audio/speech",status="500"}') == 1


async def test_a_failure_in_mid_stream_is_an_event(server: Any) -> None:
    server.bus.script = (audio(TONE), StageFailed("stage vocoder failed"))
    *_, last = await events(server, response_format="pcm")
    assert last["error"]["code"] == "stage_failed" and last["error"]["message"] == "stage vocoder failed"


async def test_a_deadline_ends_it(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "GRACE_S", 0.05)
    server.bus.script = (FOREVER,)
    status, error = await refused(server, timeout=0.1)
    assert (status, error["code"]) == (408, "deadline_exceeded")
    server.bus.script = (audio(TONE), FOREVER)
    with pytest.raises(aiohttp.ClientError):
        await speak(server, timeout=0.3, response_format="pcm")
    assert await server.metric('omni_bus_requests_total{route="/v1/audio/speech",status="408"}') == 2


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"model": "other"}, 404, "model", "it serves 'scripted'"),
        ({"model": 3}, 400, "model", "expected `str`"),
        ({"input": None}, 400, "input", "expected `str`"),
        ({"input": ""}, 400, "input", "a text to speak"),
        ({"input": " \n"}, 400, "input", "a text to speak"),
        ({"input": "a" * 4097}, 400, "input", "up to 4096 characters; it has 4097"),
        ({"instructions": "a" * 4097}, 400, "instructions", "up to 4096"),
        ({"voice": "nobody"}, 422, "voice", "Ethan, chelsie"),
        ({"voice": {"id": "nobody"}}, 422, "voice", "Ethan, chelsie"),
        ({"voice": 7}, 400, "voice", "expected"),
        ({"response_format": "ogg"}, 400, "response_format", "mp3, opus, aac, flac, wav, pcm"),
        ({"stream_format": "chunked"}, 400, "stream_format", "audio or sse"),
        ({"speed": 0.2}, 400, "speed", "from 0.25 to 4"),
        ({"speed": 4.1}, 400, "speed", "from 0.25 to 4"),
        ({"speed": "fast"}, 400, "speed", "expected `float"),
        ({"seed": 2**70}, 400, "seed", "seed"),
        ({"timeout": 0}, 400, "timeout", "above 0"),
    ],
)
async def test_what_is_refused(server: Any, fields: dict[str, Any], status: int, param: str, says: str) -> None:
    got, error = await refused(server, **fields)
    assert (got, error["param"]) == (status, param) and says in error["message"], error
    assert not server.bus.submissions


async def test_a_missing_field_a_wrong_type_and_a_body_that_is_none(server: Any) -> None:
    for body, param in ((b'{"model": "scripted"}', "input"), (b"[]", None), (b"{", None)):
        async with server.http.post(f"{server.url}{ROUTE}", data=body, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400 and (await answer.json())["error"]["param"] == param
    async with server.http.post(f"{server.url}{ROUTE}", data=b"{}") as answer:
        assert answer.status == 400
    async with server.http.get(f"{server.url}{ROUTE}") as answer:
        assert answer.status == 405


async def test_a_model_without_a_voice_refuses(start: Any) -> None:
    server = await start(output_modalities=("text",))
    status, error = await refused(server)
    assert status == 422 and "does not make audio" in error["message"]


async def test_metrics_of_speech(server: Any) -> None:
    server.bus.script = SPOKEN
    await speak(server)
    for name in ("ttfp_seconds", "e2el_seconds", "rtf"):
        assert await server.metric(f"omni_bus_{name}_count") == 1, name
    assert await server.metric("omni_bus_ttft_seconds_count") == 0, "the text was the client's own"
    assert await server.metric("omni_bus_audio_seconds_total") == pytest.approx(1.0)
    assert await server.metric('omni_bus_requests_total{route="/v1/audio/speech",status="200"}') == 1


async def test_a_slow_reader_stalls_the_bus_and_not_the_server(server: Any) -> None:
    item: StreamItem = audio(PCM_CHUNK)
    server.bus.script = [item] * 100_000  # half a GB
    async with asyncio.timeout(60):
        answer = await server.http.post(f"{server.url}{ROUTE}", json={**GOOD, "response_format": "pcm"})
        await answer.content.readexactly(1000)
        stalled = server.bus.streams[0]
        taken = -1
        while taken != stalled.taken:
            taken = stalled.taken
            await asyncio.sleep(0.2)
        assert taken < 20_000
        server.bus.script = SPOKEN
        assert (await speak(server))[0] == 200
        answer.close()
        await stalled.cancelled.wait()


def test_the_page_names_every_field_and_format() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "speech.md").read_text()
    spoken, written = page.split("## `POST /v1/audio/transcriptions`")
    rows = [row.split("|")[1:3] for row in spoken.splitlines() if row.startswith("| `")]
    assert {name for fields, _ in rows for name in re.findall(r"`(\w+)`", fields)} == set(SpeechBody.__struct_fields__)
    [formats] = [meaning for fields, meaning in rows if "`response_format`" in fields]
    assert [name for name in re.findall(r"`(\w+)`", formats) if name in FORMATS] == list(FORMATS)
    [formats] = [row for row in written.splitlines() if row.startswith("| `response_format` |")]
    assert set(re.findall(r"`(\w+)`", formats)) - {"response_format"} == set(transcription_request.FORMATS)
