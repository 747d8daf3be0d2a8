"""Spoken turns through the Realtime socket as bench/realtime.py measures them: alone, beside others, and interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

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
LANES = 2  # sessions of each kind that speak at once, their ends spread evenly
PLAYED_S = 1.0  # of an answer when it is interrupted
SILENCE_S = 30.0  # of silence that may follow speech until the server has answered
ANSWER_S = 2.0  # at least, from one turn's end to the next one's beginning, its answer's first sound included
PIECE_MS = 20  # of what the microphone sends under turn detection
LOOKS = 100  # for the last stage to let go, ten a second
DICE = random.Random(0)
SERVER_VAD = {"type": "server_vad", "silence_duration_ms": 500}


@dataclasses.dataclass(frozen=True)
class Model:
    """A pipeline under measurement. settings: of `omni-bus up`; question: what its users say; apart_s: between the ends of two
    turns that are measured alone; load_s: of the question, as sessions at once say it; rounds: their number → how often."""

    name: str
    model: str
    config: str
    question: str
    max_tokens: int
    apart_s: float
    load_s: float
    rounds: dict[int, int]
    settings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn that was answered aloud. Milliseconds to its first audio, from each moment counted from; how many positions of its
    prompt, and of how many, the text stage computed after the end of speech."""

    first: bool
    since: dict[str, float]
    computed: int
    prompt: int


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


async def first_audio(socket: RealtimeSocket, since: int) -> tuple[Event, dict[str, Any]] | None:
    """And the usage of the answer, whose rest is cancelled. None where one ends without a sound."""
    event = await socket.until("response.output_audio.delta", "response.done", since=since)
    if event.type == "response.done":
        return None
    await socket.send("response.cancel", response_id=event["response_id"])
    done = await socket.until("response.done", since=since)
    return event, done["response"]["usage"]


async def take_turn(socket: RealtimeSocket, speech: bytes, vad: bool, first: bool) -> Turn | None:
    """None where the answer has no sound."""
    since = socket.count
    if vad:
        end = await socket.speak(speech, PIECE_MS)
        silence = asyncio.create_task(socket.speak(bytes(int(SILENCE_S * RATE) * 2), PIECE_MS))
        try:
            answer = await first_audio(socket, since)
        finally:
            silence.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await silence
        stopped, *more = (event for event in socket.events[since:] if event.type == "input_audio_buffer.speech_stopped")
        assert not more, "the question was taken for more than one"
        moments = {"end_of_speech": end, "speech_stopped": stopped.at}
    else:
        moments = {"end_of_speech": await socket.speak(speech)}
        await socket.send("input_audio_buffer.commit")
        await socket.send("response.create")
        answer = await first_audio(socket, since)
    if answer is None:
        return None
    event, usage = answer
    prompt = usage["input_tokens"]
    return Turn(
        first=first,
        since={name: (event.at - moment) * 1000 for name, moment in moments.items()},
        computed=prompt - usage["input_token_details"]["cached_tokens"],
        prompt=prompt,
    )


async def turns(servers: Sequence[str], model: Model, speech: bytes, count: int) -> list[dict[str, list[Turn]]]:
    """For each server, `count` turns ended by hand ("by_hand") and as many by turn detection ("by_vad"), in sessions of four.

    What else this machine does meets all alike: LANES sessions of each kind with each server speak at once, by one clock, and never
    two of them come to an end together.
    """
    found: list[dict[str, list[Turn]]] = [{"by_hand": [], "by_vad": []} for _ in servers]
    loop = asyncio.get_running_loop()
    lanes = [(at, vad) for _ in range(LANES) for vad in (False, True) for at in range(len(servers))]
    period = max(len(speech) / 2 / RATE + ANSWER_S, model.apart_s * len(lanes))
    rounds = -(-count // LANES)
    begin = loop.time() + 1.0

    async def lane(number: int, at: int, vad: bool) -> None:
        for opened in range(0, rounds, TURNS_A_SESSION):
            async with session(servers[at], model, SERVER_VAD if vad else None, model.max_tokens) as socket:
                for turn in range(opened, min(opened + TURNS_A_SESSION, rounds)):
                    sound = as_if_new(speech, DICE)
                    await asyncio.sleep(begin + (turn + number / len(lanes)) * period - loop.time())
                    taken = await take_turn(socket, sound, vad, turn == opened)
                    if taken is not None:
                        found[at]["by_vad" if vad else "by_hand"].append(taken)

    await asyncio.gather(*(lane(number, at, vad) for number, (at, vad) in enumerate(lanes)))
    return found


async def load(address: str, model: Model, speech: bytes, sessions: int) -> list[Turn]:
    """All sessions speak at once, two turns each, spread over a second. A turn that is not answered in time is left out."""
    answered: list[Turn] = []

    async def one(number: int) -> None:
        async with session(address, model, None, model.max_tokens) as socket:
            await asyncio.sleep(number / sessions)
            with contextlib.suppress(TimeoutError):
                for first in (True, False):
                    taken = await take_turn(socket, as_if_new(speech, DICE), False, first)
                    if taken is not None:
                        answered.append(taken)

    await asyncio.gather(*map(one, range(sessions)))
    return answered


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
