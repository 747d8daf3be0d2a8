"""Speech and transcription where the model is no TTS model and no recogniser: the tiny Qwen3-Omni, by the openai client.

Its weights are random: what is said and written down has no sense, but it has its length, its order and its usage.
"""

from __future__ import annotations

import base64
import io
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy
import openai
import pytest
import soundfile

from tests.support.running_server import Server, running

MODEL = "tiny-omni"
FRAMES = 24  # of 80 ms, at most
TEXT = "Hello there, this is to be read aloud."


@pytest.fixture(scope="module")
def server(omni_checkpoint: pathlib.Path) -> Iterator[Server]:
    """Code2Wav in float64: its samples do not depend on how many frames it had at a time."""
    sets = [
        f"model.path={omni_checkpoint}",
        f"model.name={MODEL}",
        f"stages.talker.sampling={{max_tokens = {FRAMES}}}",
        "stages.code2wav.dtype=float64",
    ]
    with running("qwen3_omni_tiny.toml", sets=sets) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300.0) as made:
        yield made


def events(client: openai.OpenAI, **fields: Any) -> tuple[bytes, dict[str, Any]]:
    """The audio and the usage."""
    said = {"input": TEXT, "voice": "ethan", "response_format": "pcm", "extra_body": {"seed": 3}, **fields}
    with client.audio.speech.with_streaming_response.create(model=MODEL, stream_format="sse", **said) as answer:
        *deltas, done = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"} and done["type"] == "speech.audio.done"
    return b"".join(base64.b64decode(delta["audio"]) for delta in deltas), done["usage"]


def sound(seconds: float) -> bytes:
    buffer = io.BytesIO()
    samples = 0.1 * numpy.sin(numpy.arange(int(seconds * 16_000)) * 0.1)
    soundfile.write(buffer, samples.astype(numpy.float32), 16_000, format="WAV")
    return buffer.getvalue()


def test_the_talker_reads_the_text(client: openai.OpenAI) -> None:
    pcm, usage = events(client)
    assert 0 < len(pcm) // 2 <= FRAMES * 1920 and usage["output_tokens"] > 0
    assert usage["input_tokens"] > len(TEXT) // 8 and usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    again, _ = events(client)
    other, _ = events(client, input="Something else altogether.")
    assert pcm == again != other, "the text is what is spoken"
    with client.audio.speech.with_streaming_response.create(
        model=MODEL, voice="ethan", input=TEXT, response_format="pcm", extra_body={"seed": 3}
    ) as answer:
        assert answer.read() == pcm


def test_instructions_reach_the_talker(client: openai.OpenAI) -> None:
    """It reads no system message, so that they stand in the user's turn."""
    plain, usage = events(client)
    told, more = events(client, instructions="Speak slowly, as if to a child.")
    assert told != plain and more["input_tokens"] > usage["input_tokens"] + 5


@pytest.mark.parametrize("response_format", ["mp3", "wav"])
def test_files_of_it(client: openai.OpenAI, response_format: str) -> None:
    answer = client.audio.speech.create(
        model=MODEL,
        voice="ethan",
        input=TEXT,
        response_format=response_format,
        extra_body={"seed": 3},  # type: ignore[arg-type]
    )
    samples, rate = soundfile.read(io.BytesIO(answer.read()))
    assert rate == 24_000 and 0 < len(samples) <= (FRAMES + 2) * 1920


def test_the_thinker_is_asked_for_a_transcript(client: openai.OpenAI) -> None:
    said = client.audio.transcriptions.create(model=MODEL, file=("a.wav", sound(1.0)))
    assert said.usage is not None and said.usage.type == "tokens" and said.usage.output_tokens > 0
    assert said.usage.input_tokens > 12, "the audio's own tokens are among them"
    longer = client.audio.transcriptions.create(model=MODEL, file=("a.wav", sound(4.0)))
    assert longer.usage is not None and longer.usage.type == "tokens"
    assert longer.usage.input_tokens >= said.usage.input_tokens + 36, "12.5 a second"
    streamed = list(client.audio.transcriptions.create(model=MODEL, file=("a.wav", sound(1.0)), stream=True))
    done = streamed[-1]
    assert done.type == "transcript.text.done" and done.text.strip() == said.text
    assert "".join(event.delta for event in streamed[:-1]) == done.text  # type: ignore[union-attr]


def test_it_gives_no_times(client: openai.OpenAI) -> None:
    said: Any = client.audio.transcriptions.create(model=MODEL, file=("a.wav", sound(1.0)), response_format="verbose_json")
    assert said.segments is None and said.duration == pytest.approx(1.0)
    for name in ("srt", "vtt"):
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            client.audio.transcriptions.create(model=MODEL, file=("a.wav", sound(1.0)), response_format=name)  # type: ignore[call-overload]
        assert refused.value.param == "response_format"
