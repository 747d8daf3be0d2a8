"""The user's audio that has not become an item yet. Positions are samples at 16 kHz since the session's first one."""

from __future__ import annotations

import collections

import numpy
from numpy.typing import NDArray

from omni_bus.api.voice.items import SAMPLE_RATE


def to_samples(ms: float) -> int:
    return int(ms * SAMPLE_RATE / 1000)


def to_ms(samples: int) -> int:
    return samples * 1000 // SAMPLE_RATE


BLOCK = SAMPLE_RATE // 10  # samples: smaller pieces become one, for each takes some hundred bytes beside its samples


class InputBuffer:
    """Pieces in order; the oldest are let go as soon as nobody needs them."""

    def __init__(self) -> None:
        self._pieces: collections.deque[NDArray[numpy.float32]] = collections.deque()
        self._start = 0
        self._end = 0

    @property
    def position(self) -> int:
        """Samples that have come in since the session began."""
        return self._end

    def __len__(self) -> int:
        """Samples that are kept."""
        return self._end - self._start

    def push(self, samples: NDArray[numpy.float32]) -> None:
        if not len(samples):
            return
        if self._pieces and len(self._pieces[-1]) + len(samples) <= BLOCK:
            self._pieces[-1] = numpy.concatenate([self._pieces[-1], samples])
        else:
            self._pieces.append(samples)
        self._end += len(samples)

    def drop_before(self, position: int) -> None:
        """Let go what lies before that position, up to a piece that is still needed in part."""
        while self._pieces and self._start + len(self._pieces[0]) <= position:
            self._start += len(self._pieces.popleft())

    def read(self, start: int | None = None, end: int | None = None) -> NDArray[numpy.float32]:
        """A copy of what is kept between two positions; None: from the first, to the last."""
        whole = numpy.concatenate(self._pieces) if self._pieces else numpy.zeros(0, numpy.float32)
        first = 0 if start is None else max(0, start - self._start)
        last = len(whole) if end is None else max(first, end - self._start)
        return whole[first:last].copy() if (first, last) != (0, len(whole)) else whole

    def clear(self) -> None:
        self._pieces.clear()
        self._start = self._end
