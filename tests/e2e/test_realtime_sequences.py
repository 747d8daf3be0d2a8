"""The recorded table of Realtime sequences: what a client does, and exactly which events the server answers with, in which order.

`realtime_sequences.json` holds a situation a table: `server` (a configuration), `steps`, and `events`. All deltas of one output part
stand as one line with a star, where the first of them came. Steps:

| step | |
| --- | --- |
| `["send", {…}]` | an event as it is; `"$user"`, `"$answer"`, `"$call"`, `"$response"` stand for the last id seen of each |
| `["raw", "text"]`, `["binary", "text"]` | a message as it is |
| `["session", {…}]` | session.update, and session.updated is waited for |
| `["user", "text"]` | an item of the user, and its end is waited for |
| `["respond"]`, `["respond", {…}]` | response.create |
| `["until", "type"]`, `["until", "type", n]` | the n-th such event since the last wait |
| `["speak", "words"]` | the words as audio, with 0.3 s of silence in front and 1.2 s behind, faster than they are spoken |
| `["begin", "words"]` | the same without the silence behind |
| `["mu_law", "words"]`, `["a_law", "words"]` | as `speak`, as G.711 |
| `["append", seconds]` | silence |
| `["quiet_until", "type"]` | silence in real time until the event comes |
| `["is", {…}]` | the last event waited for has these fields, nested as given |
| `["sounds_as_in_pcm", "words"]` | the answer so far, in G.711, is the sound that a session in PCM answers to the words spoken |
"""

from __future__ import annotations

import asyncio
import functools
import json
import pathlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import av
import numpy
import pytest

from bench.realtime_socket import Event, RealtimeSocket, connected
from tests.e2e.conftest import Serve
from tests.support.cascade import skip_without_packages
from tests.support.realtime_events import EventChecker

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 90.0
TABLE = json.loads((pathlib.Path(__file__).parent / "realtime_sequences.json").read_text())
MODELS = {"probe": "probe", "quickstart": "cascade", "qwen3_omni": "qwen3-omni-tiny"}
SETS = {
    "probe": ["stages.source.faults=true", "stages.relay.faults=true"],
    "quickstart": ["stages.asr.threads=1"],
}
SPOKEN = "(response.output_audio_transcript.delta | response.output_audio.delta)*"
PIECE = 4800  # bytes: 0.1 s of PCM16 at 24 kHz


def shown(events: Sequence[Event]) -> list[str]:
    """A line an event; of an output part's deltas one, where the first of them came, and one more for each that came too late."""
    lines: list[str] = []
    begun = set()
    over: dict[tuple[str, ...], str] = {}  # what no delta may follow any more, and the event it is over by
    starts = {id(events[number]): response_id for response_id, number in _interrupted(events).items()}
    for event in events:
        kind = event.type
        if kind.endswith(".delta"):
            stem, item_id, response_id = kind.removesuffix(".delta"), event["item_id"], event.fields.get("response_id", "")
            behind = over.get((stem, item_id)) or over.get((response_id,))
            if behind is not None:
                lines.append(f"{kind} behind its {behind}")
                continue
            kind = SPOKEN if kind in SPOKEN else f"{kind}*"
            part = kind, item_id
            if part in begun:
                continue
            begun.add(part)
        elif kind == "response.done":
            over[(event["response"]["id"],)] = kind
        elif id(event) in starts:
            over[(starts[id(event)],)] = kind
        elif "item_id" in event.fields:
            over[(kind.rpartition(".")[0], event["item_id"])] = kind
        lines.append(kind)
    return lines


def _interrupted(events: Sequence[Event]) -> dict[str, int]:
    """Of each response that the user's voice cancelled: the number of the speech_started that did."""
    created: dict[str, int] = {}
    found = {}
    started = -1
    for number, event in enumerate(events):
        if event.type == "input_audio_buffer.speech_started":
            started = number
        elif event.type == "response.created":
            created[event["response"]["id"]] = number
        elif event.type == "response.done" and event["response"]["status"] == "cancelled":
            response_id = event["response"]["id"]
            if event["response"]["status_details"]["reason"] == "turn_detected":
                assert started > created[response_id], "it was cancelled by a turn, and none has begun"
                found[response_id] = started
    return found


def holds(found: Any, wanted: Any) -> bool:
    """Whether `found` has what `wanted` names, however much more it has."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and holds(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(holds, found, wanted))
    return bool(found == wanted)


@functools.cache
def speech(words: str) -> bytes:
    from bench.spoken import spoken

    wav = spoken(words)
    return b"\0" * 14_400 + wav[wav.index(b"data") + 8 :]


SILENCE = b"\0" * 57_600


def g711(pcm: bytes, law: str) -> bytes:
    """PCM16 at 24 kHz to G.711 at 8 kHz. law: mulaw or alaw."""
    frame = av.AudioFrame.from_ndarray(numpy.frombuffer(pcm, "<i2")[None], format="s16", layout="mono")
    frame.sample_rate = 24_000
    codec = av.CodecContext.create(f"pcm_{law}", "w")
    codec.sample_rate, codec.format, codec.layout = 8_000, "s16", "mono"
    resampler = av.AudioResampler("s16", "mono", 8_000)
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    return b"".join(bytes(packet) for part in frames for packet in codec.encode(part))


def from_g711(data: bytes, law: str) -> numpy.ndarray:
    """int16 [samples] at 8 kHz. law: mulaw or alaw."""
    codec = av.CodecContext.create(f"pcm_{law}", "r")
    codec.sample_rate, codec.layout = 8_000, "mono"
    frames = codec.decode(av.Packet(data))
    return numpy.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])


def at_8_khz(pcm: bytes) -> numpy.ndarray:
    """PCM16 at 24 kHz as int16 [samples] at 8 kHz."""
    frame = av.AudioFrame.from_ndarray(numpy.frombuffer(pcm, "<i2")[None], format="s16", layout="mono")
    frame.sample_rate = 24_000
    resampler = av.AudioResampler("s16", "mono", 8_000)
    return numpy.concatenate(
        [part.to_ndarray().reshape(-1) for part in (*resampler.resample(frame), *resampler.resample(None))]
    )


def assert_same_sound(heard: numpy.ndarray, ideal: numpy.ndarray) -> None:
    """int16 [samples] both: speech, equally long and loud, and of one shape wherever it begins within 10 ms."""
    one, other = heard.astype(float), ideal.astype(float)
    loud, wanted = (float(numpy.sqrt(numpy.mean(samples**2))) for samples in (one, other))
    assert wanted > 300, "the answer in PCM is no speech"
    assert abs(len(one) - len(other)) <= 80, (len(one), len(other))
    assert wanted / 2 < loud < wanted * 2, (loud, wanted)
    count = min(len(one), len(other)) - 160
    middle = other[80 : 80 + count]
    alike = max(float(numpy.corrcoef(one[at : at + count], middle)[0, 1]) for at in range(161) if at + count <= len(one))
    assert alike > 0.95, f"correlation {alike:.3f}"


class Client:
    """One situation's client. server: of the address and the name of its model."""

    def __init__(self, socket: RealtimeSocket, server: tuple[str, str]) -> None:
        self.socket = socket
        self.server = server
        self.since = 0
        self.last: Event | None = None

    async def do(self, step: list[Any]) -> None:
        kind, *arguments = step
        match kind, arguments:
            case "send", [event]:
                event = self.filled(event)
                await self.socket.send(event.pop("type"), **event)
            case "raw", [text]:
                await self.socket.socket.send_str(text)
            case "binary", [text]:
                await self.socket.socket.send_bytes(text.encode())
            case "session", [session]:
                await self.socket.send("session.update", session={"type": "realtime", **session})
                await self.until("session.updated")
            case "user", [text]:
                item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
                await self.socket.send("conversation.item.create", item=item)
                await self.until("conversation.item.done")
            case "respond", []:
                await self.socket.send("response.create")
            case "respond", [response]:
                await self.socket.send("response.create", response=self.filled(response))
            case "until", [name, *count]:
                for _ in range(count[0] if count else 1):
                    await self.until(name)
            case "begin", [words]:
                await self.append(speech(words))
            case "speak", [words]:
                await self.append(speech(words) + SILENCE)
            case "mu_law" | "a_law", [words]:
                await self.append(g711(speech(words) + SILENCE, kind.replace("_", "")))
            case "append", [seconds]:
                await self.append(b"\0" * int(48_000 * seconds))
            case "quiet_until", [name]:
                quiet = asyncio.create_task(self.quiet())
                try:
                    await self.until(name)
                finally:
                    quiet.cancel()
                    await asyncio.gather(quiet, return_exceptions=True)
            case "is", [fields]:
                assert self.last is not None and holds(self.last.fields, fields), self.last
            case "sounds_as_in_pcm", [words]:
                await self.compare(words)
            case _:
                raise ValueError(step)

    async def until(self, name: str) -> None:
        self.last = await self.socket.until(name, since=self.since, limit=LIMIT_S)
        self.since = self.socket.events.index(self.last) + 1

    async def compare(self, words: str) -> None:
        assert self.last is not None and self.last.type == "response.done"
        response = self.last["response"]
        law = {"audio/pcmu": "mulaw", "audio/pcma": "alaw"}[response["audio"]["output"]["format"]["type"]]
        async with connected(*self.server) as socket:
            client = Client(socket, self.server)
            await client.do(["speak", words])
            await client.do(["until", "response.done"])
            assert client.last is not None
            assert client.last["response"]["audio"]["output"]["format"]["type"] == "audio/pcm"
            said, wanted = (one["output"][0]["content"][0]["transcript"] for one in (response, client.last["response"]))
            assert said == wanted
            assert_same_sound(from_g711(spoken_by(self.socket), law), at_8_khz(spoken_by(socket)))

    async def append(self, pcm: bytes) -> None:
        for start in range(0, len(pcm), PIECE):
            await self.socket.append(pcm[start : start + PIECE])

    async def quiet(self) -> None:
        while True:
            await self.socket.append(b"\0" * PIECE)
            await asyncio.sleep(0.1)

    def filled(self, value: Any) -> Any:
        """With ids in place of $user, $answer, $call, $response."""
        if isinstance(value, dict):
            return {key: self.filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.filled(inner) for inner in value]
        found = {}
        for event in self.socket.events:
            if event.type == "conversation.item.added":
                item = event["item"]
                found[{"user": "$user", "assistant": "$answer"}.get(item.get("role"), "$item")] = item["id"]
                if item["type"] == "function_call":
                    found["$call"] = item["call_id"]
            elif event.type == "response.created":
                found["$response"] = event["response"]["id"]
        return found.get(value, value) if isinstance(value, str) else value


def spoken_by(socket: RealtimeSocket) -> bytes:
    """All audio of the session's answers, in its format."""
    return b"".join(event.pcm for event in socket.events if event.type == "response.output_audio.delta")


@pytest.fixture(params=sorted(TABLE))
async def situation(request: pytest.FixtureRequest, shared_server: Serve) -> AsyncIterator[tuple[dict[str, Any], Client]]:
    case = TABLE[request.param]
    name = case["server"]
    if name != "probe":
        skip_without_packages()
    if name == "qwen3_omni":
        server = shared_server("qwen3_omni_tiny.toml", sets=[f"model.path={request.getfixturevalue('omni_checkpoint')}"])
    else:
        server = shared_server(f"{name}.toml", sets=SETS[name])
    async with connected(server.url, MODELS[name], check=EventChecker()) as socket:
        yield case, Client(socket, (server.url, MODELS[name]))


async def test_sequence(situation: tuple[dict[str, Any], Client]) -> None:
    case, client = situation
    for step in case["steps"]:
        await client.do(step)
    assert shown(client.socket.events) == case["events"]


def test_the_table_has_every_event_of_both_sides() -> None:
    sent = {step[1]["type"] for case in TABLE.values() for step in case["steps"] if step[0] == "send"}
    answered = {kind for case in TABLE.values() for line in case["events"] for kind in line.strip("()*").split(" | ")}
    assert all(case["events"][0] == "session.created" for case in TABLE.values())
    assert sent >= {
        "conversation.item.create",
        "conversation.item.delete",
        "conversation.item.retrieve",
        "conversation.item.truncate",
        "input_audio_buffer.append",
        "input_audio_buffer.clear",
        "input_audio_buffer.commit",
        "output_audio_buffer.clear",
        "response.cancel",
        "response.create",
        "session.update",
    }
    rendered = set(re.findall(r'return "([a-z_.]+)"', (ROOT / "api" / "realtime" / "server_events.py").read_text()))
    assert answered == rendered | {"session.created", "session.updated"}


# ---- what the table is read by


def made(*lines: str, ended: str = "completed") -> list[Event]:
    """Events of one response and its item, by their types."""
    response = {"id": "resp", "status": ended, "status_details": {"reason": "turn_detected"}}
    fields: dict[str, dict[str, Any]] = {"response.created": {"response": response}, "response.done": {"response": response}}
    part = {"response_id": "resp", "item_id": "item"}
    speech = {"item_id": "user"}
    heard = {"item_id": "user", "content_index": 0}
    return [
        Event(
            0.0,
            line,
            fields.get(line) or (part if line.startswith("response.") else heard if "transcription" in line else speech),
        )
        for line in lines
    ]


AUDIO, WORDS, TEXT = "response.output_audio", "response.output_audio_transcript", "response.output_text"
STARTED = "input_audio_buffer.speech_started"
WRITTEN = "conversation.item.input_audio_transcription"


def test_deltas_of_one_part_are_one_line() -> None:
    good = made(
        "response.created", f"{WORDS}.delta", f"{AUDIO}.delta", STARTED, f"{AUDIO}.delta", f"{AUDIO}.done", f"{WORDS}.done"
    )
    assert shown(good) == ["response.created", SPOKEN, STARTED, f"{AUDIO}.done", f"{WORDS}.done"]
    both = made(f"{AUDIO}.delta", f"{AUDIO}.done", f"{WORDS}.delta", f"{WORDS}.done", "response.done")
    assert shown(both) == [SPOKEN, f"{AUDIO}.done", f"{WORDS}.done", "response.done"], "each has a done of its own"


@pytest.mark.parametrize(
    ("late", "lines", "ended"),
    [
        (f"{AUDIO}.delta behind its {AUDIO}.done", (f"{AUDIO}.delta", f"{AUDIO}.done", f"{AUDIO}.delta"), "completed"),
        (f"{WORDS}.delta behind its {WORDS}.done", (f"{AUDIO}.delta", f"{WORDS}.done", f"{WORDS}.delta"), "completed"),
        (f"{TEXT}.delta behind its {TEXT}.done", (f"{TEXT}.delta", f"{TEXT}.done", f"{TEXT}.delta"), "completed"),
        (f"{AUDIO}.delta behind its response.done", (f"{AUDIO}.delta", "response.done", f"{AUDIO}.delta"), "completed"),
        (
            f"{AUDIO}.delta behind its {STARTED}",
            ("response.created", f"{AUDIO}.delta", STARTED, f"{AUDIO}.delta", f"{AUDIO}.done", "response.done"),
            "cancelled",
        ),
        (
            f"{WRITTEN}.delta behind its {WRITTEN}.completed",
            (f"{WRITTEN}.delta", f"{WRITTEN}.completed", f"{WRITTEN}.delta"),
            "completed",
        ),
    ],
)
def test_a_delta_that_comes_too_late_is_a_line_of_its_own(late: str, lines: tuple[str, ...], ended: str) -> None:
    found = shown(made(*lines, ended=ended))
    assert [line for line in found if " behind " in line] == [late]
    assert found.index(late) == len(lines) - 1 - lines[::-1].index(late.split()[0])


@pytest.mark.parametrize("law", ["mulaw", "alaw"])
def test_g711_that_is_garbled_does_not_sound_the_same(law: str) -> None:
    skip_without_packages()
    pcm = speech("What is the capital of France?")
    good, ideal = g711(pcm, law), at_8_khz(pcm)
    assert_same_sound(from_g711(good, law), ideal)
    other = {"mulaw": "alaw", "alaw": "mulaw"}[law]
    for garbled in (
        from_g711(good, other),
        from_g711(good[::-1], law),
        from_g711(bytes(len(good)), law),
        from_g711(good[:-200], law),
        numpy.frombuffer(good, numpy.int8).astype(numpy.int16) * 256,
        from_g711(good, law) // 3,
    ):
        with pytest.raises(AssertionError):
            assert_same_sound(garbled, ideal)
