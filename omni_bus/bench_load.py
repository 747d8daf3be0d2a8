"""The load of `omni-bus bench`: streaming chats, in a closed loop or as they arrive, each measured as its client sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from typing import Any

from omni_bus.errors import OmniBusError
from omni_bus.http_client import request
from omni_bus.speech_stream import SpeechStream

WORDS = (
    *("amber", "bridge", "candle", "distant", "early", "forest", "garden", "harbour", "island", "juniper", "kettle", "lantern"),
    *("meadow", "north", "orchard", "paper", "quiet", "river", "silver", "timber", "under", "valley", "winter", "yellow"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What each request asks."""

    url: str
    model: str
    ours: bool
    prompt: str | None
    prompt_words: int
    audio: dict[str, Any] | None  # a content part
    speech: bool
    text_tokens: int | None
    temperature: float | None = None  # of the text; None = 0 where its length is held, else the server's
    frames: int | None
    speech_stage: str
    seed: int

    def body(self, index: int) -> dict[str, Any]:
        """The JSON of request number `index`; the same for the same seed."""
        draw = random.Random(f"{self.seed} {index}")
        text = self.prompt or " ".join(draw.choice(WORDS) for _ in range(self.prompt_words))
        content: Any = [self.audio, {"type": "text", "text": text}] if self.audio else text
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": self.seed + index,
            **(
                {"modalities": ["text", "audio"], "audio": {"format": "pcm16" if self.ours else "pcm"}}
                if self.speech
                else {"modalities": ["text"]}
            ),
            **self._sampling(),
        }

    def _sampling(self) -> dict[str, Any]:
        text: dict[str, Any] = {"max_tokens": self.text_tokens, "ignore_eos": True} if self.text_tokens else {}
        if text or self.temperature is not None:
            text["temperature"] = self.temperature or 0.0
        speech = {"max_tokens": self.frames, "ignore_eos": True} if self.frames and self.speech else {}
        if self.ours:
            return {**text, **({"sampling": {self.speech_stage: speech}} if speech else {})}
        return {**text, **({"sampling_params_list": [text, speech, {"temperature": 0.0}]} if text or speech else {})}


@dataclasses.dataclass(slots=True)
class Measured:
    """One request. Seconds count from the moment it was sent; packets are (arrival, length of the audio in it)."""

    error: str | None = None
    first_text_s: float | None = None
    last_text_s: float | None = None
    prompt_tokens: int = 0  # the server's count
    cached_tokens: int = 0  # of them, not computed for this request; the server's count
    text_tokens: int = 0  # the server's count, else the number of text deltas
    first_chunks_ms: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # by edge, since the broker had the request; ours only
    packets: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    end_s: float = 0.0

    @property
    def audio_s(self) -> float:
        return sum(length for _, length in self.packets)


async def closed_loop(load: Load, concurrency: int, count: int, *, first: int = 0) -> tuple[list[Measured], float]:
    """`count` requests, `concurrency` at any time until they run out; returns them and the seconds it took."""
    numbers = iter(range(first, first + count))
    measured: list[Measured] = []

    async def stream() -> None:
        for index in numbers:
            result = await one(load, index)
            measured.append(result)

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(min(concurrency, count))))
    return measured, time.perf_counter() - start


async def open_loop(load: Load, rate: float, count: int, *, first: int = 0) -> tuple[list[Measured], float]:
    """`count` requests at `rate` a second on average, Poisson, whatever becomes of those before; the same times for the same seed."""
    draw = random.Random(f"{load.seed} arrivals {first}")
    start = due = time.perf_counter()
    running: list[asyncio.Task[Measured]] = []
    async with asyncio.TaskGroup() as group:
        for index in range(first, first + count):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.append(group.create_task(one(load, index)))
            due += draw.expovariate(rate)
    return [task.result() for task in running], time.perf_counter() - start


async def one(load: Load, index: int) -> Measured:
    measured, stream, texts = Measured(), SpeechStream(), 0
    start = time.perf_counter()
    try:
        async with request("POST", f"{load.url}/v1/chat/completions", load.body(index)) as response:
            async for event in response.events():
                now = time.perf_counter() - start
                if "error" in event:
                    measured.error = str(event["error"].get("message", "the answer failed"))
                    break
                text, pcm = stream.read(event)
                if text:
                    texts += 1
                    measured.first_text_s = now if measured.first_text_s is None else measured.first_text_s
                    measured.last_text_s = now
                if pcm:
                    measured.packets.append((now, len(pcm) / 2 / stream.sample_rate))
    except (OmniBusError, ValueError) as error:
        measured.error = str(error)
    measured.end_s = time.perf_counter() - start
    measured.prompt_tokens = int(stream.usage.get("prompt_tokens") or 0)
    measured.cached_tokens = int((stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    measured.first_chunks_ms = (stream.usage.get("omni_bus") or {}).get("first_chunk_ms") or {}
    measured.text_tokens = int(stream.usage.get("completion_tokens") or texts)
    if measured.error is None and load.speech and not measured.packets:
        measured.error = "no audio came"
    return measured
