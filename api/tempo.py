"""Speech faster or slower with its pitch kept: FFmpeg's atempo over a stream of PCM16."""

from __future__ import annotations

from fractions import Fraction

import av
from av.audio.frame import AudioFrame
from av.filter import Graph
from av.filter.context import FilterContext

MIN_SPEED, MAX_SPEED = 0.25, 4.0
_SLOWEST, _FASTEST = 0.5, 2.0  # of one atempo filter; a faster one would skip samples


class Tempo:
    """One stream of int16 mono samples at `rate`, made `speed` times as fast."""

    def __init__(self, rate: int, speed: float) -> None:
        graph = Graph()
        self._rate = rate
        self._source = last = graph.add_abuffer(sample_rate=rate, format="s16", layout="mono", time_base=Fraction(1, rate))
        for factor in _factors(speed):
            last = _linked(last, graph.add("atempo", str(factor)))
        self._sink = _linked(last, graph.add("abuffersink"))
        graph.configure()
        self._graph = graph  # the filters live as long as it does
        self._position = 0

    def push(self, pcm: bytes) -> bytes:
        """pcm: whole samples. May return nothing yet."""
        if not pcm:
            return b""
        frame = AudioFrame(format="s16", layout="mono", samples=len(pcm) // 2)
        frame.planes[0].update(pcm)
        frame.sample_rate = self._rate
        frame.pts, frame.time_base = self._position, Fraction(1, self._rate)
        self._position += frame.samples
        self._source.push(frame)
        return self._made()

    def flush(self) -> bytes:
        """The rest; nothing may be pushed behind it."""
        if not self._position:
            return b""
        self._source.push(None)
        return self._made()

    def _made(self) -> bytes:
        made = bytearray()
        while True:
            try:
                frame = self._sink.pull()
            except (av.BlockingIOError, av.EOFError):  # nothing more yet, or at all
                return bytes(made)
            assert isinstance(frame, AudioFrame)
            made += memoryview(frame.planes[0])[: frame.samples * 2]


def _factors(speed: float) -> list[float]:
    """Equal ones, as few as will do."""
    count = 1
    while not _SLOWEST <= (factor := speed ** (1 / count)) <= _FASTEST:
        count += 1
    return [factor] * count


def _linked(source: FilterContext, target: FilterContext) -> FilterContext:
    source.link_to(target)
    return target
