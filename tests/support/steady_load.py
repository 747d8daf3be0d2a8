"""A number of streams at any time on a server, a probe unless a subclass says otherwise, each held to its every word and sample."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np

from omni_bus.speech_stream import SpeechStream

PACKET = 1920  # samples of one word's sound
BROKEN = "broken"  # the connection ended in the middle: what only the end of an API process can do


@dataclasses.dataclass(slots=True)
class Stream:
    """One request. `end`: "done", the code of the error it ended with, or BROKEN; "" while it runs. Times are monotonic."""

    place: int  # which of the streams that are open at any time
    words: int
    modalities: tuple[str, ...]
    began: float
    events: int = 0
    text: str = ""
    heard: int = 0  # of its sound: packets of a probe, samples of a voice
    end: str = ""
    ended: float = 0.0

    def finish(self, end: str) -> None:
        assert not self.end, f"it ended as {self.end}, and again as {end}"
        self.end, self.ended = end, time.monotonic()


class SteadyLoad:
    """`async with SteadyLoad(url) as load:` keeps `count` streams open until the block ends; then it lets them finish."""

    def __init__(self, url: str, *, count: int = 16, words: int = 300, text_only: int = 0, pause_s: float = 0.05) -> None:
        """`text_only`: how many of them ask for no audio. `pause_s`: before a stream that was refused asks again."""
        self._url = url
        self._count = count
        self._words = words
        self._text_only = text_only
        self._pause_s = pause_s
        self._over = False
        self._loops: list[asyncio.Task[None]] = []
        self._more: list[asyncio.Task[None]] = []
        self.streams: list[Stream] = []

    async def __aenter__(self) -> Self:
        # A connection for each request: one that is kept alive would stay with one API process.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0), timeout=aiohttp.ClientTimeout(total=300)
        )
        self._loops = [asyncio.create_task(self._one_after_the_other(index)) for index in range(self._count)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        try:
            if error is None:
                async with asyncio.timeout(330):
                    await asyncio.gather(*self._loops)
        finally:
            for loop in (*self._loops, *self._more):
                loop.cancel()
            await self._http.close()

    def ask(self, words: int) -> tuple[Stream, asyncio.Task[None]]:
        """One more stream, with speech, beside the others; the task ends with it, and raises what no fault explains."""
        stream = Stream(self._count + len(self._more), words, ("text", "audio"), time.monotonic())
        self._more.append(asyncio.create_task(self._ask(stream)))
        return stream, self._more[-1]

    def running(self) -> list[Stream]:
        return [stream for stream in self.streams if not stream.end]

    async def all_run(self, events: int = 3) -> list[Stream]:
        """Until half as many streams as there are have so many events behind them and more before them; those streams."""
        async with asyncio.timeout(120):
            while True:
                self.check()
                found = [stream for stream in self.running() if stream.events > events]
                if len(found) >= self._count // 2:
                    return found
                await asyncio.sleep(0.005)

    async def stands_still(self, seconds: float) -> None:
        """Until no stream has had an event for so long."""
        async with asyncio.timeout(120):
            before = -1
            while before != (now := sum(stream.events for stream in self.streams)):
                before = now
                await asyncio.sleep(seconds)

    async def serves(self, seconds: float) -> float:
        """Seconds until every place has had an answer that it began to ask for after this call."""
        began = time.monotonic()
        async with asyncio.timeout(seconds):
            while len({stream.place for stream in self.streams if stream.end == "done" and stream.began > began}) < self._count:
                self.check()
                await asyncio.sleep(0.02)
        return time.monotonic() - began

    def check(self) -> None:
        """Raises what a loop met that no fault explains."""
        for loop in self._loops:
            if loop.done():
                loop.result()

    def ends(self, *, since: float = 0.0) -> collections.Counter[str]:
        return collections.Counter(stream.end for stream in self.streams if stream.ended >= since and stream.end)

    async def _one_after_the_other(self, index: int) -> None:
        modalities = ("text",) if index < self._text_only else ("text", "audio")
        while not self._over:
            stream = Stream(index, self._words, modalities, time.monotonic())
            self.streams.append(stream)
            await self._ask(stream)
            if stream.end != "done":
                await asyncio.sleep(self._pause_s)

    async def _ask(self, stream: Stream) -> None:
        try:
            async with self._http.post(f"{self._url}/v1/chat/completions", json=self.body(stream)) as response:
                if response.status != 200:
                    stream.finish((await response.json())["error"]["code"])
                    return
                async for event in _events(response):
                    stream.events += 1
                    self._take(stream, event)
        except (aiohttp.ClientError, ConnectionError):
            if not stream.end:
                stream.finish(BROKEN)
        assert stream.end, "a stream ended without saying how"

    def _take(self, stream: Stream, event: str) -> None:
        if event == "[DONE]":
            if not stream.end:
                self.check_whole(stream)
                stream.finish("done")
            return
        said = json.loads(event)
        assert not stream.end, f"after its end as {stream.end}: {said}"
        if "error" in said:
            stream.finish(said["error"]["code"])
            return
        self.hear(stream, *SpeechStream().read(said))

    # ---- what a probe is asked, and answers

    def body(self, stream: Stream) -> dict[str, Any]:
        """The request."""
        return {
            "model": "probe",
            "messages": [{"role": "user", "content": f"!repeat:{stream.words}"}],
            "modalities": list(stream.modalities),
            "stream": True,
            **({"audio": {"format": "pcm16"}} if "audio" in stream.modalities else {}),
        }

    def hear(self, stream: Stream, text: str, pcm: bytes) -> None:
        """What one event brings is what is due; AssertionError where it is not."""
        stream.text += text
        samples = np.frombuffer(pcm, "<i2")
        assert len(samples) % PACKET == 0
        for packet in samples.reshape(-1, PACKET):
            stream.heard += 1
            assert (packet == stream.heard).all(), f"packet {stream.heard} is not the one that was due"

    def check_whole(self, stream: Stream) -> None:
        """Not a word and not a sample is missing, doubled or another's."""
        assert stream.text.split() == [str(number) for number in range(stream.words)]
        assert stream.heard == (stream.words if "audio" in stream.modalities else 0)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    rest = b""
    async for block in response.content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode()
