"""Speech and transcription on the quickstart's real models, by the unmodified openai client."""

from __future__ import annotations

import base64
import io
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy
import openai
import pytest
import soundfile

from omni_bus.api.audio_decode import decode_audio
from tests.support.cascade import skip_without_packages, words
from tests.support.running_server import Server, eventually

TEXT = "The capital of France is Paris, and the weather there is very nice today."
FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
SENTENCES = (
    "What is the capital of France?",
    "Please tell me a short story about a cat.",
    "Good morning, how are you today?",
    "The weather in London is cold and wet.",
)


@pytest.fixture(scope="module")
def server(shared_server: Any) -> Server:
    skip_without_packages()
    started: Server = shared_server("quickstart.toml", sets=("stages.asr.threads=1",), ready_s=240.0)
    return started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300.0) as made:
        yield made


def speak(client: openai.OpenAI, text: str, **fields: Any) -> bytes:
    with client.audio.speech.with_streaming_response.create(
        model="cascade", voice="heart", input=text, **{"response_format": "wav", **fields}
    ) as answer:
        return answer.read()


def transcribe(client: openai.OpenAI, file: bytes, name: str = "speech.wav", **fields: Any) -> Any:
    return client.audio.transcriptions.create(model="cascade", file=(name, file), **fields)


def running_requests(server: Server) -> int:
    return sum(server.get("/v1/status")["requests"].values())


@pytest.fixture(scope="module")
def long(client: openai.OpenAI) -> tuple[bytes, str]:
    """More than one of Whisper's windows: a WAV file and what it says."""
    text = " ".join(SENTENCES * 5)
    return speak(client, text), text


@pytest.mark.parametrize("response_format", FORMATS)
def test_what_is_spoken_is_heard_again(client: openai.OpenAI, response_format: str) -> None:
    file = speak(client, TEXT, response_format=response_format)
    if response_format == "pcm":
        buffer = io.BytesIO()
        soundfile.write(buffer, numpy.frombuffer(file, "<i2"), 24_000, format="WAV")
        file = buffer.getvalue()
    heard = transcribe(client, file, f"speech.{response_format}")
    assert words(heard.text) == words(TEXT)
    assert heard.usage.type == "duration" and 3.0 < heard.usage.seconds < 8.0


@pytest.mark.parametrize("voice", ["heart", "alloy"])
def test_the_whole_body_at_once_is_the_same(client: openai.OpenAI, voice: str) -> None:
    """Also by a name of OpenAI's, which means the model's first voice."""
    answer = client.audio.speech.create(model="cascade", voice=voice, input=TEXT, response_format="wav")
    assert answer.read() == speak(client, TEXT)
    assert answer.response.headers["content-type"] == "audio/wav"


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_speed_is_heard(client: openai.OpenAI, speed: float) -> None:
    plain, other = (len(speak(client, TEXT, response_format="pcm", **said)) for said in ({}, {"speed": speed}))
    assert other == pytest.approx(plain / speed, rel=0.03)
    assert set(words(transcribe(client, speak(client, TEXT, speed=speed)).text)) >= {"capital", "france", "paris", "weather"}


def test_speech_leaves_while_it_is_still_being_made(client: openai.OpenAI, server: Server) -> None:
    """A long text: its first bytes are here when the synthesiser has not yet spoken it all."""
    text = " ".join(SENTENCES * 20)
    with client.audio.speech.with_streaming_response.create(
        model="cascade", voice="heart", input=text, response_format="mp3"
    ) as answer:
        pieces = answer.iter_bytes(4096)
        first = next(pieces)
        running = running_requests(server)
        rest = b"".join(pieces)
    assert first and running == 1, "the bus is still at it"
    assert len(first) < 0.2 * len(first + rest)
    assert len(decode_audio(first + rest, False, "file")) / 4 / 16_000 > 100


def test_events_carry_the_audio_and_the_usage(client: openai.OpenAI) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="cascade", voice="heart", input=TEXT, response_format="pcm", stream_format="sse"
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"} and len(deltas) > 3
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == speak(client, TEXT, response_format="pcm")
    assert done["type"] == "speech.audio.done" and done["usage"]["input_tokens"] > 10


def test_a_seed_fixes_the_samples(client: openai.OpenAI) -> None:
    first, again, other = (speak(client, TEXT, extra_body={"seed": seed}) for seed in (1, 1, 2))
    assert first == again != other


def test_a_client_that_goes_away_frees_the_synthesiser(client: openai.OpenAI, server: Server) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="cascade", voice="heart", input=" ".join(SENTENCES * 20), response_format="pcm"
    ) as answer:
        next(answer.iter_bytes(4096))
        assert running_requests(server) == 1
    eventually(lambda: running_requests(server) == 0, 20, "the request is gone")
    assert words(transcribe(client, speak(client, TEXT)).text) == words(TEXT)


def test_text_and_both_kinds_of_json(client: openai.OpenAI) -> None:
    file = speak(client, TEXT, response_format="flac")
    assert words(str(transcribe(client, file, response_format="text"))) == words(TEXT)
    said = transcribe(client, file, response_format="verbose_json", timestamp_granularities=["segment", "word"], language="en")
    assert said.language == "english" and words(said.text) == words(TEXT)
    assert said.segments and all(segment.avg_logprob < 0 and segment.tokens for segment in said.segments)
    assert 0 <= said.segments[0].start < said.segments[-1].end <= said.duration
    assert said.words and words(" ".join(word.word for word in said.words)) == words(TEXT)
    assert all(0 <= word.start <= word.end <= said.duration for word in said.words)


def test_segments_of_a_long_audio_grow_and_cover_it(client: openai.OpenAI, long: tuple[bytes, str]) -> None:
    file, text = long
    said = transcribe(client, file, response_format="verbose_json")
    times = [time for segment in said.segments for time in (segment.start, segment.end)]
    assert said.duration > 31 and times == sorted(times)
    assert times[0] < 1.0 and said.duration - 2.0 < times[-1] <= said.duration
    got, wanted = words(said.text), words(text)
    assert sum(got.count(word) >= wanted.count(word) - 1 for word in set(wanted)) >= len(set(wanted)) - 1
    assert words(" ".join(segment.text for segment in said.segments)) == got


SRT = re.compile(r"(\d+)\n(\d\d):(\d\d):(\d\d),(\d{3}) --> (\d\d):(\d\d):(\d\d),(\d{3})\n(.+)\n")
VTT = re.compile(r"(\d\d):(\d\d):(\d\d)\.(\d{3}) --> (\d\d):(\d\d):(\d\d)\.(\d{3})\n(.+)\n")


def seconds(fields: tuple[str, ...]) -> float:
    hours, minutes, whole, thousandths = map(int, fields)
    return 3600 * hours + 60 * minutes + whole + thousandths / 1000


def test_subtitles_say_the_same_at_the_same_times(client: openai.OpenAI, long: tuple[bytes, str]) -> None:
    file, _ = long
    srt = str(transcribe(client, file, response_format="srt"))
    vtt = str(transcribe(client, file, response_format="vtt"))
    assert not SRT.sub("", srt).strip() and vtt.startswith("WEBVTT\n\n") and not VTT.sub("", vtt[8:]).strip()
    by_srt = [(seconds(found[1:5]), seconds(found[5:9]), found[9]) for found in SRT.findall(srt)]
    by_vtt = [(seconds(found[:4]), seconds(found[4:8]), found[8]) for found in VTT.findall(vtt)]
    assert by_srt == by_vtt and [int(found[0]) for found in SRT.findall(srt)] == list(range(1, len(by_srt) + 1))
    times = [time for begin, end, _ in by_srt for time in (begin, end)]
    assert times == sorted(times) and len(by_srt) > 3


def test_a_streamed_transcript_comes_window_by_window(client: openai.OpenAI, long: tuple[bytes, str]) -> None:
    file, text = long
    arrived: list[tuple[float, Any]] = [(time.monotonic(), event) for event in transcribe(client, file, stream=True)]
    *deltas, (_, done) = arrived
    assert {event.type for _, event in deltas} == {"transcript.text.delta"} and len(deltas) >= 2
    assert done.type == "transcript.text.done" and "".join(event.delta for _, event in deltas) == done.text
    assert deltas[0][0] < deltas[-1][0], "the first is not held back for the last"
    assert abs(len(words(done.text)) - len(words(text))) <= 4


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"language": "de"}, 422, "language"),
        ({"response_format": "json", "timestamp_granularities": ["word"]}, 400, "timestamp_granularities"),
        ({"stream": True, "response_format": "srt"}, 400, "stream"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        transcribe(client, speak(client, "Hello."), **fields)
    assert refused.value.status_code == status and refused.value.param == param


def test_refusals_of_speech(client: openai.OpenAI) -> None:
    for fields, status, param in (
        ({"voice": "nobody"}, 422, "voice"),
        ({"speed": 9}, 400, "speed"),
        ({"input": "a" * 4097}, 400, "input"),
        ({"model": "tts-1"}, 404, "model"),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            client.audio.speech.create(**{"model": "cascade", "voice": "heart", "input": "Hi.", **fields})  # type: ignore[arg-type]
        assert refused.value.status_code == status and refused.value.param == param
