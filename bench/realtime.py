"""End of speech → first audio through the Realtime socket, with and without work done during speech; interruption → silence; load.

    python -m bench.realtime [--turns 12] [--sessions 1,8,32] [--out bench/results]

Speech is sent in real time. By hand: the client commits and asks for the answer at the moment its last sample is sent. By the
server's turn detection (server_vad, 500 ms of silence): from the same moment, and from the server's speech_stopped. Both settings of
`api.voice_prepare` are measured in one run, on two servers that take turns. An answer is cancelled at its first audio. The weights of
the Qwen3-Omni are random and small.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import aiohttp

from bench.demo import ROOT, free_port, serving
from bench.quickstart import machine, percentile
from bench.realtime_socket import RATE, Event, RealtimeSocket, connected
from bench.spoken import QUESTION, spoken

SHORT = QUESTION
LONG = (  # one sentence, so that nobody takes a pause for its end
    "I was in town this morning and met an old friend whom I had not seen for many years and we talked about the weather and "
    "about our work and about the children and then had a cup of coffee in a small place by the river where he told me that he "
    "will move to another country next year and so I would like to know what is the capital of France?"
)
STORY = "Please tell me a long story about a cat and a dog."
TURNS_A_SESSION = 4  # so that some turns have a history and some have none
PLAYED_S = 1.0  # of an answer when it is interrupted
SILENCE_S = 30.0  # of silence that may follow speech until the server has answered
PIECE_MS = 20  # of what the microphone sends under turn detection
LENGTH = (
    "stages.thinker.sampling.ignore_eos=true",
    "stages.talker.sampling.ignore_eos=true",
    "stages.talker.sampling.max_tokens=60",
)
LOOKS = 100  # for the last stage to let go, ten a second
DICE = random.Random(0)
SERVER_VAD = {"type": "server_vad", "silence_duration_ms": 500}


@dataclasses.dataclass(frozen=True)
class Model:
    """A pipeline under measurement. settings: of `omni-bus up`; question: what its users say."""

    name: str
    model: str
    config: str
    question: str
    max_tokens: int
    settings: tuple[str, ...] = ()


def pcm(text: str) -> bytes:
    """The text as speech: PCM16, mono, 24 kHz, without the voice's own silence around it."""
    import numpy

    samples = numpy.frombuffer(spoken(text)[44:], "<i2")
    loud = numpy.flatnonzero(numpy.abs(samples.astype(int)) > 500)
    return samples[loud[0] : loud[-1] + 1].tobytes()


def as_if_new(speech: bytes, dice: random.Random) -> bytes:
    """The same with noise nobody hears: what the stages have made of the very same samples before, they take from what they keep."""
    import numpy

    noise = numpy.random.default_rng(dice.randrange(2**32)).integers(-2, 3, len(speech) // 2, dtype=numpy.int16)
    clipped = numpy.clip(numpy.frombuffer(speech, "<i2"), -32_000, 32_000)
    return (clipped + noise).astype("<i2").tobytes()


@contextlib.asynccontextmanager
async def session(
    address: str, model: Model, turn_detection: dict[str, Any] | None, max_tokens: int
) -> AsyncIterator[RealtimeSocket]:
    async with connected(address, model.model) as socket:
        audio = {"input": {"turn_detection": turn_detection, "transcription": None}}
        await socket.send("session.update", session={"type": "realtime", "audio": audio, "max_output_tokens": max_tokens})
        await socket.until("session.updated")
        yield socket


async def first_audio(socket: RealtimeSocket, since: int) -> Event | None:
    """The rest of the answer is cancelled. None where an answer ends without a sound."""
    event = await socket.until("response.output_audio.delta", "response.done", since=since)
    if event.type == "response.done":
        return None
    await socket.send("response.cancel", response_id=event["response_id"])
    await socket.until("response.done", since=since)
    return event


async def turn_by_hand(socket: RealtimeSocket, speech: bytes) -> dict[str, float] | None:
    since = socket.count
    end = await socket.speak(speech)
    await socket.send("input_audio_buffer.commit")
    await socket.send("response.create")
    first = await first_audio(socket, since)
    return {"end_of_speech": (first.at - end) * 1000} if first else None


async def turn_by_vad(socket: RealtimeSocket, speech: bytes) -> dict[str, float] | None:
    since = socket.count
    end = await socket.speak(speech, PIECE_MS)
    silence = asyncio.create_task(socket.speak(bytes(int(SILENCE_S * RATE) * 2), PIECE_MS))
    try:
        first = await first_audio(socket, since)
    finally:
        silence.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await silence
    stopped, *more = (event for event in socket.events[since:] if event.type == "input_audio_buffer.speech_stopped")
    assert not more, "the question was taken for more than one"
    return {"end_of_speech": (first.at - end) * 1000, "speech_stopped": (first.at - stopped.at) * 1000} if first else None


async def turns(servers: Sequence[str], model: Model, speech: bytes, count: int, vad: bool) -> list[dict[str, list[float]]]:
    """`count` turns with each server, turn about, so that what else this machine does meets both alike; in sessions of four.

    Milliseconds to the first audio, by what they are counted from, and for a session's first turn apart from its later ones.
    """
    take, turn_detection = (turn_by_vad, SERVER_VAD) if vad else (turn_by_hand, None)
    found: list[dict[str, list[float]]] = [{} for _ in servers]
    for begun in range(0, count, TURNS_A_SESSION):
        async with contextlib.AsyncExitStack() as open_sessions:
            sockets = [
                await open_sessions.enter_async_context(session(server, model, turn_detection, model.max_tokens))
                for server in servers
            ]
            for number in range(min(TURNS_A_SESSION, count - begun)):
                for socket, figures in zip(sockets, found, strict=True):
                    for name, value in (await take(socket, as_if_new(speech, DICE)) or {}).items():
                        figures.setdefault(f"{'later' if number else 'first'}: {name}", []).append(value)
    return found


async def interruption(address: str, model: Model, interrupting: bytes) -> dict[str, float]:
    """One answer spoken into: milliseconds to what its listener notices, until no stage holds it, and of audio not played by then."""
    before = await cancels(address)
    async with session(address, model, SERVER_VAD, 400) as socket:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": STORY}]}
        await socket.send("conversation.item.create", item=item)
        await socket.send("response.create")
        first = await socket.until("response.output_audio.delta")
        await socket.speak(bytes(int(PLAYED_S * RATE) * 2), PIECE_MS)
        since, onset = socket.count, asyncio.get_running_loop().time()
        speaking = asyncio.create_task(socket.speak(interrupting + bytes(RATE), PIECE_MS))
        try:
            started = await socket.until("input_audio_buffer.speech_started", since=since)
            done = await socket.until("response.done", since=since)
            assert done["response"]["status"] == "cancelled", done
            await asyncio.sleep(0.5)  # in which audio of the old answer would come
            let_go = await released(address, before)
        finally:
            speaking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await speaking
        audio = [
            event
            for event in socket.events
            if event.type == "response.output_audio.delta" and event["item_id"] == first["item_id"]
        ]
        sent_ms = sum(len(event.pcm) for event in audio) / 2 / RATE * 1000
        return {
            "onset_to_speech_started": (started.at - onset) * 1000,
            "speech_started_to_last_audio": max(0.0, audio[-1].at - started.at) * 1000,
            "speech_started_to_done": (done.at - started.at) * 1000,
            "cancel_to_every_stage_let_go": let_go * 1000,
            "sent_ahead": sent_ms - (started.at - first.at) * 1000,
        }


async def cancels(address: str) -> tuple[int, float]:
    """Cancelled responses that the server has seen out of every stage so far, and the seconds that took in all."""
    async with aiohttp.ClientSession() as http, http.get(f"{address}/metrics") as answer:
        text = await answer.text()
    found = re.findall(r"^omni_bus_voice_cancel_seconds_(count|sum) (\S+)$", text, re.MULTILINE)
    figures = {name: float(value) for name, value in found}
    return int(figures.get("count", 0)), figures.get("sum", 0.0)


async def released(address: str, before: tuple[int, float]) -> float:
    """Seconds from the one cancel since `before` until the last stage had acknowledged it."""
    for _ in range(LOOKS):
        count, seconds = await cancels(address)
        if count > before[0]:
            assert count == before[0] + 1, "more than one response was cancelled"
            return seconds - before[1]
        await asyncio.sleep(0.1)
    raise TimeoutError("a stage never let go of a cancelled response")


async def load(address: str, model: Model, speech: bytes, sessions: int, rounds: int) -> dict[str, Any]:
    """All sessions speak at once, their turns spread over a second."""

    async def one(number: int) -> list[float]:
        found: list[float] = []
        async with session(address, model, None, model.max_tokens) as socket:
            await asyncio.sleep(number / sessions)
            for _ in range(rounds):
                found += (await turn_by_hand(socket, as_if_new(speech, DICE)) or {}).values()
        return found

    found = [value for values in await asyncio.gather(*map(one, range(sessions))) for value in values]
    return {"sessions": sessions, "turns": sessions * rounds, "end_of_speech": summary(found)}


def summary(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and the largest in milliseconds, and of how many."""
    if not values:
        return {"n": 0}
    p50, p95 = (round(percentile(list(values), share), 1) for share in (0.5, 0.95))
    return {"p50": p50, "p95": p95, "max": round(max(values), 1), "n": len(values)}


async def measured(servers: Sequence[str], model: Model, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """servers: with work done during speech, and without. One row for each."""
    speech, short = pcm(model.question), pcm(SHORT)
    rows: list[dict[str, Any]] = [
        {"model": model.name, "prepare": prepare, "speech_s": round(len(speech) / 2 / RATE, 1)} for prepare in (True, False)
    ]
    await turns(servers, model, short, 1, vad=False)  # warms both up
    for name, vad in (("by_hand", False), ("by_vad", True)):
        found = await turns(servers, model, speech, arguments.turns, vad)
        for row, figures in zip(rows, found, strict=True):
            row[name] = {key: summary(values) for key, values in figures.items()}
    cuts = [await interruption(servers[0], model, short) for _ in range(arguments.interruptions)]
    rows[0]["interruption"] = {name: summary([cut[name] for cut in cuts]) for name in (cuts[0] if cuts else {})}
    for row in rows:
        row["load"] = []
    for count in arguments.sessions if model.name != "quickstart" else ():
        for row, server in zip(rows, servers, strict=True):
            row["load"].append(await load(server, model, short, count, 2))
    return rows


def measure(model: Model, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    config = ROOT / "configs" / model.config
    with (
        serving(free_port(0), *model.settings, "api.voice_prepare=true", config=config) as prepares,
        serving(free_port(0), *model.settings, "api.voice_prepare=false", config=config) as waits,
    ):
        rows = asyncio.run(measured([prepares.address, waits.address], model, arguments))
    print(json.dumps(rows), flush=True)
    return rows


def cell(figure: dict[str, float] | None) -> str:
    return f"{figure['p50']:.0f} / {figure['p95']:.0f}" if figure and figure["n"] else "–"


def worst(figure: dict[str, float] | None) -> str:
    return f"{cell(figure)} / {figure['max']:.0f}" if figure and figure["n"] else "–"


def tables(rows: Sequence[dict[str, Any]]) -> str:
    columns = (
        ("by hand, first turn", "by_hand", "first: end_of_speech"),
        ("by hand, later turns", "by_hand", "later: end_of_speech"),
        ("by VAD, first turn", "by_vad", "first: end_of_speech"),
        ("by VAD, later turns", "by_vad", "later: end_of_speech"),
        ("later turns, from speech_stopped", "by_vad", "later: speech_stopped"),
    )
    lines = ["## End of speech → first audio, ms, p50 / p95", ""]
    lines += ["| pipeline | speech s | work during speech | " + " | ".join(title for title, _, _ in columns) + " |"]
    lines += ["| --- " * (3 + len(columns)) + "|"]
    for row in rows:
        prepare = "yes" if row["prepare"] else "no"
        cells = " | ".join(cell(row[kind].get(name)) for _, kind, name in columns)
        lines.append(f"| {row['model']} | {row['speech_s']} | {prepare} | {cells} |")
    interruptions = {
        "speech begins → speech_started": "onset_to_speech_started",
        "→ last audio byte": "speech_started_to_last_audio",
        "→ response.done": "speech_started_to_done",
        "→ every stage let go": "cancel_to_every_stage_let_go",
        "audio sent ahead of playback": "sent_ahead",
    }
    lines += ["", "## Interruption → silence, ms, p50 / p95 / max", ""]
    lines += ["| pipeline | " + " | ".join(interruptions) + " |", "| --- " * (1 + len(interruptions)) + "|"]
    lines += [
        f"| {row['model']} | " + " | ".join(worst(row["interruption"].get(name)) for name in interruptions.values()) + " |"
        for row in rows
        if row["prepare"]
    ]
    lines += ["", "## Sessions at once: end of speech (by hand) → first audio, ms, p50 / p95", ""]
    lines += ["| pipeline | work during speech | sessions | first audio | turns with audio |", "| --- " * 5 + "|"]
    for row in rows:
        for one in row.get("load", ()):
            counts = f"{one['end_of_speech']['n']} of {one['turns']}"
            prepare = "yes" if row["prepare"] else "no"
            lines.append(f"| {row['model']} | {prepare} | {one['sessions']} | {cell(one['end_of_speech'])} | {counts} |")
    return "\n".join(lines)


@contextlib.contextmanager
def models() -> Iterator[tuple[Model, Model]]:
    """The quickstart, and a tiny Qwen3-Omni whose checkpoint lives as long as the block."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = pathlib.Path(scratch) / "tiny"
        command = [sys.executable, "-m", "omni_bus", "fixture", "qwen3-omni", str(checkpoint), "--size", "tiny", "--seed", "2"]
        subprocess.run(command, check=True)
        # Answers of one length: 4.8 s of speech.
        full = (f"model.path={checkpoint}", *LENGTH)
        yield (
            Model("quickstart", "cascade", "quickstart.toml", SHORT, 24),
            Model("tiny Qwen3-Omni", "qwen3-omni-tiny", "qwen3_omni_tiny.toml", LONG, 24, full),
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.realtime", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=12, help="of each kind and setting")
    parser.add_argument("--interruptions", type=int, default=8)
    parser.add_argument("--sessions", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--out", type=pathlib.Path, help="a directory for the result, as JSON and Markdown")
    arguments = parser.parse_args()
    before = round(os.getloadavg()[0], 2)
    with models() as each:
        rows = [row for model in each for row in measure(model, arguments)]
    about = machine() | {"load_average": {"before": before, "after": round(os.getloadavg()[0], 2)}}
    text = tables(rows)
    print(text)
    if arguments.out:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        result = {"benchmark": "realtime", "date": today, "machine": about, "turns": arguments.turns, "rows": rows}
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{today}-realtime.json").write_text(json.dumps(result, indent=1) + "\n")
        said = ", ".join(f"{key} {value}" for key, value in about.items())
        title = f"# The Realtime socket, {today}\n\n`python -m bench.realtime {' '.join(sys.argv[1:])}`\n\n{said}\n\n"
        (arguments.out / f"{today}-realtime.md").write_text(f"{title}{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
