"""Sixteen streams at once on a tiny Qwen3-Omni, each kept as it was heard: its text and samples, when they came, and how it ended."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np

from omni_bus.speech_stream import SAMPLE_RATE, SpeechStream
from tests.support.chat_http import wav
from tests.support.qwen3_omni import png
from tests.support.running_server import Server
from tests.support.steady_load import BROKEN

PLACES = range(16)
HALVES = (PLACES[:8], PLACES[8:])
TEXT_ONLY = range(0, 16, 4)
SPEAKERS = [place for place in PLACES if place not in TEXT_ONLY]
TOKENS, FRAMES = 24, 26
FIRST = 16  # of harbours 16 to 31. Where two experts of a layer weigh the same to the last bit, as for 5, the batch decides
PATIENCE_S = 200.0


@dataclasses.dataclass(slots=True)
class Heard:
    """One stream. `packets`: (arrival on the monotonic clock, length) of its sound, in seconds. `end`: "done", an error's code, or
    BROKEN; "" while it runs. `port`: of its connection, at this end."""

    place: int
    text: str = ""
    pcm: bytes = dataclasses.field(default=b"", repr=False)  # 16 bits, mono
    packets: list[tuple[float, float]] = dataclasses.field(default_factory=list, repr=False)
    end: str = ""
    port: int = 0

    @property
    def silence_s(self) -> float:
        """The longest underrun of a listener who plays from the first packet on. Of single ones, since on a machine that cannot keep up
        all of them together say how slow it is, and one alone says for how long there was nothing to come."""
        longest, played_until = 0.0, self.packets[0][0] if self.packets else 0.0
        for arrival, length in self.packets:
            longest = max(longest, arrival - played_until)
            played_until = max(played_until, arrival) + length
        return longest

    def has_begun(self) -> bool:
        return bool(self.text)

    def is_heard(self) -> bool:
        """By its own modalities: a text is read, a voice is heard."""
        return bool(self.pcm if self.place in SPEAKERS else self.text)


class Sixteen:
    """`async with Sixteen(server) as streams:` listens to all that was begun in the block, to each one's end."""

    def __init__(self, server: Server, media: Mapping[int, dict[str, Any]] | None = None) -> None:
        """`media`: place → a part of content that its question is about."""
        self.heard = [Heard(place) for place in PLACES]
        self._server = server
        self._media = media or {}
        self._news = asyncio.Event()
        self._listening: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        # A connection for each stream: one that is kept alive would stay with one API process.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0), timeout=aiohttp.ClientTimeout(total=PATIENCE_S)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await asyncio.gather(*self._listening)
        finally:
            for listening in self._listening:
                listening.cancel()
            await self._http.close()

    def begin(self, places: Iterable[int] = PLACES) -> None:
        self._listening += [asyncio.create_task(self._listen(self.heard[place])) for place in places]

    async def until(self, reached: Callable[[Heard], bool], places: Iterable[int] = PLACES) -> None:
        """Each of them has got there, or has ended."""
        wanted = [self.heard[place] for place in places]
        async with asyncio.timeout(PATIENCE_S):
            while not all(reached(each) or each.end for each in wanted):
                await self._news.wait()
                self._news.clear()
                for listening in self._listening:
                    if listening.done():
                        listening.result()

    def body(self, place: int) -> dict[str, Any]:
        """Greedy, and of a fixed length, so that a place has one answer."""
        speech = place in SPEAKERS
        said: Any = f"Tell me of harbour number {FIRST + place}."
        if place in self._media:
            said = [self._media[place], {"type": "text", "text": said}]
        talker = {"temperature": 0.0, "max_tokens": FRAMES, "ignore_eos": True}
        return {
            "model": "tiny",
            "messages": [{"role": "user", "content": said}],
            "modalities": ["text", "audio"] if speech else ["text"],
            "stream": True,
            "temperature": 0.0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            **({"audio": {"voice": "ethan", "format": "pcm16"}, "sampling": {"talker": talker}} if speech else {}),
        }

    async def _listen(self, into: Heard) -> None:
        try:
            async with self._http.post(f"{self._server.url}/v1/chat/completions", json=self.body(into.place)) as response:
                if response.status != 200:
                    into.end = (await response.json())["error"]["code"]
                    return
                assert response.connection is not None and response.connection.transport is not None
                into.port = response.connection.transport.get_extra_info("sockname")[1]
                await self._read(response, into)
        except (aiohttp.ClientError, ConnectionError):
            into.end = into.end or BROKEN
        finally:
            self._news.set()
        assert into.end, "a stream ended without saying how"

    async def _read(self, response: aiohttp.ClientResponse, into: Heard) -> None:
        speech = SpeechStream()
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            said = line.removeprefix(b"data:").strip()
            if said == b"[DONE]":
                into.end = into.end or "done"
                continue
            event = json.loads(said)
            assert not into.end, f"after its end as {into.end}: {event}"
            if "error" in event:
                into.end = event["error"]["code"]
                continue
            text, pcm = speech.read(event)
            into.text += text
            if pcm:
                into.pcm += pcm
                into.packets.append((time.monotonic(), len(pcm) / 2 / SAMPLE_RATE))
            self._news.set()


class Undisturbed:
    """What each place hears where nothing fails, and the longest underrun of all such runs."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.silence_s = 0.0

    async def run(self, server: Server, *, halves: bool = False) -> None:
        """Once more, all at once or the second half when the first is heard. AssertionError where an answer is not what it was."""
        async with Sixteen(server) as streams:
            if halves:
                streams.begin(HALVES[0])
                await streams.until(Heard.is_heard, HALVES[0])
            streams.begin(HALVES[1] if halves else PLACES)
        assert ends(streams.heard) == {"done"}
        self.heard = self.heard or streams.heard
        self.check(streams.heard)
        self.silence_s = max(self.silence_s, longest_silence_s(streams.heard))

    def check(self, heard: Iterable[Heard]) -> None:
        """Who ended "done" heard all of it, text for text and sample for sample; who broke heard how it begins."""
        for each in heard:
            expected = self.heard[each.place]
            assert expected.text.startswith(each.text), f"place {each.place}: another text"
            assert expected.pcm.startswith(each.pcm), f"place {each.place}: another sound"
            if each.end == "done":
                assert (each.text, each.pcm) == (expected.text, expected.pcm), f"place {each.place}: not all of it"
                assert each.text and bool(each.pcm) == (each.place in SPEAKERS)


def ends(heard: Iterable[Heard]) -> set[str]:
    return {each.end for each in heard}


def lost(heard: Iterable[Heard]) -> list[Heard]:
    return [each for each in heard if each.end != "done"]


def longest_silence_s(heard: Iterable[Heard]) -> float:
    """In those that ended well."""
    return max((each.silence_s for each in heard if each.end == "done"), default=0.0)


def sound(place: int) -> dict[str, Any]:
    """Eight seconds of a hum of its own for each place, as a part of content. Its features are larger than what travels inline."""
    hum = 0.3 * np.sin(2 * np.pi * (120 + 40 * place) * np.arange(8 * 16_000) / 16_000)
    data = base64.b64encode(wav(hum.astype(np.float32))).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def picture(place: int) -> dict[str, Any]:
    """A shade of grey as a part of content: 19 MB of patches, so that a segment of shared memory holds those of one."""
    data = base64.b64encode(png(np.full((896, 896, 3), 16 * place, np.uint8))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
