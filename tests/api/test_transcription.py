"""POST /v1/audio/transcriptions over a scripted bus: forms, what the bus is asked for, every format, and how it fails."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
from typing import Any

import aiohttp
import numpy
import pytest
import soundfile

from omni_bus.api import body as body_module
from omni_bus.api import form as form_module
from omni_bus.client import StreamItem
from omni_bus.errors import NoReadyReplica, StageFailed
from omni_bus.payloads import (
    ChatInput,
    InputTranscript,
    MediaPart,
    Message,
    TextPart,
    TranscriptSegment,
    TranscriptWish,
    TranscriptWord,
)
from omni_bus.sampling import SamplingParams
from tests.support.scripted_bus import FOREVER, MODEL, text

ROUTE = "/v1/audio/transcriptions"
SECONDS = 2.5


def wav(seconds: float = SECONDS, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, numpy.full(int(seconds * rate), 0.25, numpy.float32), rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def heard(words: str, *segments: TranscriptSegment, last: bool = False) -> StreamItem:
    return StreamItem("ear->client", InputTranscript(words, segments, "english" if words else ""), {}, last)


SEGMENTS = (
    TranscriptSegment(0.0, 1.25, "Good morning <all>,", (1, 2), 0.0, -0.25, 1.1, 0.01),
    TranscriptSegment(1.25, 3601.5, "1 --> 2", (3,)),
)
HEARD = (
    heard("Good morning <all>,", SEGMENTS[0]),
    heard("1 --> 2", SEGMENTS[1]),
    heard("", last=True),
)
TEXT = "Good morning <all>, 1 --> 2"
WRITTEN = (text(" Good"), text(" morning."), text("", "stop"))


@pytest.fixture
async def ear(start: Any) -> Any:
    """A server with a recogniser; `server` is one without."""
    server = await start(ear=True)
    server.bus.script = HEARD
    return server


def form(*fields: tuple[str, str], file: bytes | None = None, model: str | None = MODEL) -> aiohttp.FormData:
    data = aiohttp.FormData()
    if model is not None:
        data.add_field("model", model)
    for name, value in fields:
        data.add_field(name, value)
    data.add_field("file", wav() if file is None else file, filename="../../etc/passwd", content_type="audio/wav")
    return data


async def ask(server: Any, *fields: tuple[str, str], **said: Any) -> tuple[int, str, bytes]:
    headers = said.pop("headers", None)
    async with server.http.post(f"{server.url}{ROUTE}", data=form(*fields, **said), headers=headers) as answer:
        return answer.status, answer.content_type, await answer.read()


async def raw(server: Any, body: bytes, content_type: str = "multipart/form-data; boundary=x") -> tuple[int, dict[str, Any]]:
    """A body as it stands; its refusal."""
    headers = {"Content-Type": content_type}
    async with asyncio.timeout(60), server.http.post(f"{server.url}{ROUTE}", data=body, headers=headers) as answer:
        assert answer.content_type == "application/json"
        return answer.status, (await answer.json())["error"]


async def events(server: Any, *fields: tuple[str, str]) -> list[dict[str, Any]]:
    status, content_type, body = await ask(server, ("stream", "true"), *fields)
    assert (status, content_type) == (200, "text/event-stream")
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_json_of_a_recogniser(ear: Any) -> None:
    status, content_type, body = await ask(ear)
    assert (status, content_type) == (200, "application/json")
    assert json.loads(body) == {"text": TEXT, "usage": {"type": "duration", "seconds": SECONDS}}
    [asked] = ear.bus.submissions
    assert asked.options.modalities == ("transcript",)
    assert asked.payload == ChatInput((Message("user", (MediaPart("audio", 0),)),), transcript=TranscriptWish())
    samples = numpy.frombuffer(bytes(asked.tensors["media0"].data), "<f4")
    assert len(samples) == SECONDS * 16_000 and numpy.allclose(samples, 0.25)


async def test_json_of_a_language_model_that_hears(server: Any) -> None:
    server.bus.script = WRITTEN
    status, _, body = await ask(
        server, ("language", "FR"), ("prompt", "Ville-d'Avray"), ("temperature", "0.5"), ("timeout", "7")
    )
    assert status == 200
    usage = {"type": "tokens", "input_tokens": 7, "output_tokens": 2, "total_tokens": 9}
    assert json.loads(body) == {"text": "Good morning.", "usage": usage}
    [asked] = server.bus.submissions
    [message] = asked.payload.messages
    audio, instruction = message.parts
    assert audio == MediaPart("audio", 0) and isinstance(instruction, TextPart)
    assert "word for word" in instruction.text and " fr." in instruction.text and "Ville-d'Avray" in instruction.text
    assert asked.options.modalities == ("text",) and asked.payload.transcript is None
    assert asked.options.sampling == {"thinker": SamplingParams(temperature=0.5, max_tokens=64 + 30)}
    assert 6 < asked.deadline_s <= 7


async def test_the_wish_reaches_the_recogniser(ear: Any) -> None:
    await ask(ear, ("language", "en"), ("prompt", "Smythe"), ("temperature", "0.25"), ("response_format", "verbose_json"))
    assert ear.bus.submissions[0].payload.transcript == TranscriptWish(
        times=True, language="en", prompt="Smythe", temperature=0.25
    )


async def test_text(ear: Any) -> None:
    status, content_type, body = await ask(ear, ("response_format", "text"))
    assert (status, content_type, body.decode()) == (200, "text/plain", f"{TEXT}\n")


async def test_srt(ear: Any) -> None:
    _, content_type, body = await ask(ear, ("response_format", "srt"))
    assert content_type == "text/plain" and body.decode() == (
        "1\n00:00:00,000 --> 00:00:01,250\nGood morning <all>,\n\n2\n00:00:01,250 --> 01:00:01,500\n1 -> 2\n"
    )


async def test_vtt(ear: Any) -> None:
    _, content_type, body = await ask(ear, ("response_format", "vtt"))
    assert content_type == "text/vtt" and body.decode() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nGood morning &lt;all&gt;,\n\n00:00:01.250 --> 01:00:01.500\n1 -&gt; 2\n"
    )


async def test_subtitles_of_silence_are_empty(ear: Any) -> None:
    for name, body in (("srt", ""), ("vtt", "WEBVTT\n"), ("text", "\n")):
        ear.bus.script = (heard("", last=True),)
        assert (await ask(ear, ("response_format", name)))[2].decode() == body


async def test_verbose_json(ear: Any) -> None:
    _, _, body = await ask(ear, ("response_format", "verbose_json"), ("timestamp_granularities[]", "segment"))
    said = json.loads(body)
    segments = said.pop("segments")
    assert said == {
        "task": "transcribe",
        "language": "english",
        "duration": SECONDS,
        "text": TEXT,
        "usage": {"type": "duration", "seconds": SECONDS},
    }
    assert segments[0] == {
        "id": 0,
        "seek": 0,
        "start": 0.0,
        "end": 1.25,
        "text": "Good morning <all>,",
        "tokens": [1, 2],
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 1.1,
        "no_speech_prob": 0.01,
    }
    assert [segment["id"] for segment in segments] == [0, 1] and segments[1]["seek"] == 125


@pytest.mark.parametrize("with_segments", [True, False], ids=["both", "words_alone"])
async def test_verbose_json_with_words(ear: Any, with_segments: bool) -> None:
    first = TranscriptSegment(
        0.0, 1.25, "Good morning", words=(TranscriptWord(0.25, 0.5, "Good"), TranscriptWord(0.5, 1.0, "morning"))
    )
    second = TranscriptSegment(1.25, 2.5, "all.", words=(TranscriptWord(1.5, 2.0, "all."),))
    ear.bus.script = (heard("Good morning", first), heard("all.", second), heard("", last=True))
    asked = [("timestamp_granularities[]", "word"), *[("timestamp_granularities[]", "segment")] * with_segments]
    _, _, body = await ask(ear, ("response_format", "verbose_json"), *asked)
    said = json.loads(body)
    assert said["words"] == [
        {"word": "Good", "start": 0.25, "end": 0.5},
        {"word": "morning", "start": 0.5, "end": 1.0},
        {"word": "all.", "start": 1.5, "end": 2.0},
    ]
    assert ("segments" in said) == with_segments
    assert ear.bus.submissions[0].payload.transcript == TranscriptWish(times=True, words=True)


async def test_words_need_times(server: Any) -> None:
    status, _, body = await ask(server, ("response_format", "verbose_json"), ("timestamp_granularities[]", "word"))
    error = json.loads(body)["error"]
    assert status == 422 and error["param"] == "timestamp_granularities" and "gives no times" in error["message"]


async def test_verbose_json_without_times_has_no_segments(server: Any) -> None:
    server.bus.script = WRITTEN
    _, _, body = await ask(server, ("response_format", "verbose_json"), ("language", "de"))
    said = json.loads(body)
    assert "segments" not in said and (said["language"], said["text"]) == ("de", "Good morning.")
    server.bus.script = WRITTEN
    assert json.loads((await ask(server, ("response_format", "verbose_json")))[2])["language"] == "und"


async def test_a_recognisers_events(ear: Any) -> None:
    *deltas, done = await events(ear)
    assert [delta["type"] for delta in deltas] == ["transcript.text.delta"] * 2
    assert [delta["delta"] for delta in deltas] == ["Good morning <all>,", " 1 --> 2"]
    assert done == {"type": "transcript.text.done", "text": TEXT}


async def test_a_language_models_events(server: Any) -> None:
    server.bus.script = WRITTEN
    *deltas, done = await events(server, ("response_format", "text"))
    assert [delta["delta"] for delta in deltas] == ["Good", " morning."] and done["text"] == "Good morning."
    assert done["usage"] == {"type": "tokens", "input_tokens": 7, "output_tokens": 2, "total_tokens": 9}


async def test_each_delta_leaves_as_it_comes(ear: Any) -> None:
    ear.bus.script = (HEARD[0], FOREVER)
    async with asyncio.timeout(60):
        answer = await ear.http.post(f"{ear.url}{ROUTE}", data=form(("stream", "true")))
        assert b"Good morning" in await answer.content.readany()
        answer.close()
        await ear.bus.streams[0].cancelled.wait()
    assert await ear.metric(f'omni_bus_requests_total{{route="{ROUTE}",status="499"}}') == 1


async def test_a_client_that_goes_away_cancels_a_whole_transcript(ear: Any) -> None:
    ear.bus.script = (FOREVER,)
    async with asyncio.timeout(60):
        asking = asyncio.ensure_future(ask(ear))
        await ear.bus.asked.wait()
        asking.cancel()
        await ear.bus.streams[0].cancelled.wait()


async def test_failures(ear: Any) -> None:
    ear.bus.script = (NoReadyReplica("stage ear has no ready replica"),)
    for fields in ((), (("stream", "true"),)):
        status, _, body = await ask(ear, *fields)
        assert status == 503 and json.loads(body)["error"]["code"] == "no_ready_replica"
    ear.bus.script = (HEARD[0], StageFailed("stage ear failed"))
    assert (await ask(ear))[0] == 500
    assert (await events(ear))[-1]["error"]["message"] == "stage ear failed"


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ([("response_format", "xml")], 400, "response_format", "json, text, srt, verbose_json, vtt"),
        ([("response_format", "diarized_json")], 400, "response_format", "must be one of"),
        ([("stream", "maybe")], 400, "stream", "true, false"),
        ([("stream", "true"), ("response_format", "srt")], 400, "stream", "json or text"),
        ([("temperature", "warm")], 400, "temperature", "from 0 to 1"),
        ([("temperature", "nan")], 400, "temperature", "from 0 to 1"),
        ([("temperature", "1.5")], 400, "temperature", "from 0 to 1"),
        ([("language", "English")], 400, "language", "ISO 639"),
        ([("prompt", "a" * 4097)], 400, "prompt", "up to 4096"),
        ([("timestamp_granularities[]", "segment")], 400, "timestamp_granularities", "verbose_json only"),
        (
            [("timestamp_granularities[]", "letter"), ("response_format", "verbose_json")],
            400,
            "timestamp_granularities",
            "segment or word",
        ),
        ([("model", "twice")], 400, "model", "given once"),
        ([("timeout", "0")], 400, "timeout", "above 0"),
        ([("prompt", "é" * 40_000)], 400, "prompt", "up to 64 KiB"),
    ],
)
async def test_what_is_refused(ear: Any, fields: list[tuple[str, str]], status: int, param: str, says: str) -> None:
    got, content_type, body = await ask(ear, *fields)
    error = json.loads(body)["error"]
    assert (got, content_type, error["param"]) == (status, "application/json", param) and says in error["message"], error
    assert not ear.bus.submissions


@pytest.mark.parametrize("name", ["srt", "vtt"])
async def test_subtitles_need_times(server: Any, name: str) -> None:
    status, _, body = await ask(server, ("response_format", name))
    error = json.loads(body)["error"]
    assert status == 422 and error["param"] == "response_format" and "gives no times" in error["message"]


async def test_other_models_and_models_that_do_not_hear(ear: Any, start: Any) -> None:
    status, _, body = await ask(ear, model="whisper-1")
    assert status == 404 and json.loads(body)["error"]["code"] == "model_not_found"
    status, _, body = await ask(ear, model=None)
    assert status == 400 and json.loads(body)["error"]["param"] == "model"
    deaf = await start(input_kinds=("text",))
    status, _, body = await ask(deaf)
    assert status == 422 and json.loads(body)["error"]["param"] == "file"


@pytest.mark.parametrize(
    ("file", "status", "says"),
    [
        (b"", 400, "empty"),
        (b"not audio at all", 415, "send wav"),
        (b"RIFF\0\0\0\0WAVEfmt ", 415, "damaged"),
        (wav(0), 415, "no audio"),
    ],
)
async def test_files_that_hold_no_audio(ear: Any, file: bytes, status: int, says: str) -> None:
    got, _, body = await ask(ear, file=file)
    error = json.loads(body)["error"]
    assert (got, error["param"]) == (status, "file") and says in error["message"]
    assert not re.search(r"passwd|/", error["message"])


PART = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
MODEL_PART = PART % (b"model", MODEL.encode())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "malformed"),
        (b"nothing of the kind", "malformed"),
        (b"--x", "a name"),
        (b"--x\r\n", "a name"),
        (b"--y\r\n\r\n--y--\r\n", "malformed"),
        (b"--x--\r\n", "model: is required"),
        (MODEL_PART + b"--x--\r\n", "file: is required"),
        (MODEL_PART + PART % (b"file", b"abc"), "malformed"),
        (MODEL_PART + b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc', "malformed"),
        (b"--x\r\nno header\r\n\r\nabc\r\n--x--\r\n", "malformed"),
        (b"--x\r\nA: b\r\n\r\nabc\r\n--x--\r\n", "a name"),
        (PART % (b"\xff\xfe", b"abc") + b"--x--\r\n", "a name"),
        (b"--x\r\nContent-Type: multipart/mixed; boundary=z\r\n\r\n--z--\r\n--x--\r\n", "a name"),
        (b"--x\r\nContent-Type: multipart/mixed\r\n\r\n--z--\r\n--x--\r\n", "malformed"),
        (b"--x\r\n" + b"A: b\r\n" * 500 + b"\r\nabc\r\n--x--\r\n", "malformed"),
        (b"--x\r\nA: " + b"b" * 100_000 + b"\r\n\r\nabc\r\n--x--\r\n", "malformed"),
        (PART % (b"prompt", b"\xff\xfe") + b"--x--\r\n", "UTF-8"),
        (PART % (b"_charset_", b"x" * 100) + MODEL_PART + b"--x--\r\n", "malformed"),
        ((PART % (b"file", b"abc")) * 2 + b"--x--\r\n", "given once"),
        ((PART % (b"other", b"abc")) * 65 + b"--x--\r\n", "up to 64 fields"),
        (MODEL_PART * 2 + PART % (b"file", b"abc") + b"--x--\r\n", "given once"),
    ],
)
async def test_malformed_forms(ear: Any, body: bytes, says: str) -> None:
    status, error = await raw(ear, body)
    assert status == 400 and says in error["message"], error
    assert (await ask(ear))[0] == 200, "the next one is served"


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "multipart/form-data",
        "multipart/mixed; boundary=x",
        "multipart/form-data; boundary=" + "x" * 71,
        "text/plain",
    ],
)
async def test_other_content_types(ear: Any, content_type: str) -> None:
    status, error = await raw(ear, b"--x--\r\n", content_type)
    assert status == 400 and ("multipart/form-data" in error["message"] or "malformed" in error["message"])


@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader", "ignore::aiohttp.BadContentDispositionParam")
async def test_random_forms_never_break_the_server(ear: Any) -> None:
    draw = numpy.random.default_rng(0)
    good = MODEL_PART + PART % (b"file", wav(0.01)) + b"--x--\r\n"
    for _ in range(300):
        body = bytearray(good)
        for _ in range(int(draw.integers(1, 8))):
            at, what = int(draw.integers(0, len(body))), int(draw.integers(0, 3))
            if what == 0:
                body[at] = int(draw.integers(0, 256))
            elif what == 1:
                del body[at : at + int(draw.integers(1, 40))]
            else:
                body[at:at] = draw.choice([b"\r\n", b"--x", b"--x--", b"\0", b'"', b"Content-Length: 3\r\n"])
        async with (
            asyncio.timeout(60),
            ear.http.post(
                f"{ear.url}{ROUTE}", data=bytes(body), headers={"Content-Type": "multipart/form-data; boundary=x"}
            ) as answer,
        ):
            assert answer.status in (200, 400, 404, 413, 415), await answer.text()
    assert (await ask(ear))[0] == 200


def test_what_a_malformed_form_held_is_not_logged() -> None:
    """aiohttp warns of bad headers, which here are the client's."""
    code = (
        "import warnings, aiohttp, omni_bus.api.form; "
        "[warnings.warn(kind('secret')) for kind in (aiohttp.BadContentDispositionHeader, aiohttp.BadContentDispositionParam)]"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


async def test_a_large_body_is_refused_whether_it_says_so_or_not(start: Any) -> None:
    server = await start(ear=True, max_body_mb=1)
    async with asyncio.timeout(60):
        status, _, body = await ask(server, file=b"RIFF" + bytes(2 * 2**20))
    assert status == 413 and "1 MiB" in json.loads(body)["error"]["message"]

    async def chunks() -> Any:
        yield MODEL_PART + b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nRIFF'
        for _ in range(64):
            yield bytes(64 * 1024)

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    async with asyncio.timeout(60):
        try:
            async with server.http.post(f"{server.url}{ROUTE}", data=chunks(), headers=headers) as answer:
                assert answer.status == 413
        except aiohttp.ClientConnectionError:  # it may close on what it will not read
            assert await server.metric('omni_bus_failures_total{code="too_large"}') == 2


async def test_an_upload_that_stops_is_given_up(ear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "READ_S", 0.1)
    reader, writer = await asyncio.open_connection(ear.host, ear.port)
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 500\r\n\r\n"
    writer.write(head.encode() + MODEL_PART)
    async with asyncio.timeout(60):
        assert b" 408 " in await reader.readline()
    writer.close()


async def test_what_is_read_counts_in_the_intake_and_is_given_back(ear: Any) -> None:
    from omni_bus.api.keys import INTAKE

    intake = ear.app[INTAKE]
    limit, intake.limit = intake.limit, 60_000
    status, _, body = await ask(ear)
    assert status == 503 and json.loads(body)["error"]["code"] == "overloaded"
    intake.limit = limit
    assert (await ask(ear))[0] == 200 and intake.held == 0


async def test_a_parts_own_length_is_ignored_and_bare_list_names_are_read(ear: Any) -> None:
    """As RFC 7578 has it: only the boundary ends a part."""
    body = (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\nContent-Length: -5\r\n\r\nscripted\r\n'
        + PART % (b"response_format", b"verbose_json")
        + PART % (b"timestamp_granularities", b"segment")
        + PART % (b"unheard_of", b"1")
        + PART % (b"file", wav())
        + b"--x--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    async with ear.http.post(f"{ear.url}{ROUTE}", data=body, headers=headers) as answer:
        assert answer.status == 200 and (await answer.json())["segments"]
    assert form_module.MAX_PARTS == 64


async def test_metrics_of_a_transcript(ear: Any, server: Any) -> None:
    await ask(ear)
    for name, count in (("ttft_seconds", 1), ("e2el_seconds", 1), ("tpot_seconds", 0), ("ttfp_seconds", 0)):
        assert await ear.metric(f"omni_bus_{name}_count") == count, name
    server.bus.script = WRITTEN
    await ask(server)
    assert await server.metric("omni_bus_tpot_seconds_count") == 1
