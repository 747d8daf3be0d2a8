"""The clock of a simulation: what happens when, in order; of equal times, what was said first."""

from __future__ import annotations

import collections
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any


class Timeline:
    """Times are seconds from 0 on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` then; at once where that is past."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), action, arguments))

    def run(self, until: float = math.inf) -> None:
        """Everything that is to happen by then; without a time, until nothing is left."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(self._heap)
            self.happened += 1
            action(*arguments)
        if until < math.inf:
            self.now = until


class Cores:
    """What steps run on: so many at a time, first come first served. `count` 0: each replica has its own."""

    def __init__(self, clock: Timeline, count: int = 0) -> None:
        self._clock = clock
        self._count = count
        self._busy = 0
        self._waiting: collections.deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = collections.deque()

    def run(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` when it has run for so long."""
        if self._count and self._busy == self._count:
            self._waiting.append((seconds, action, arguments))
            return
        self._busy += 1
        self._clock.at(self._clock.now + seconds, self._end, action, arguments)

    def _end(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._busy -= 1
        if self._waiting:
            seconds, later, its = self._waiting.popleft()
            self.run(seconds, later, *its)
        action(*arguments)
