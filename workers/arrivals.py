"""Chunks whose tensors are still on their way from another host: held back, each edge in order, until they have come or time is over.

Time is over when nothing at all has come from the sender for a while: a slow network may take as long as the request may.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

from omni_bus import events
from omni_bus.connectors.base import Frame
from omni_bus.connectors.select import Connectors

WAIT_S = 10.0  # without a word of the sender, from a chunk's event on; then its request fails

Deliver = Callable[[events.Chunk, Sequence[Frame]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    event: events.Chunk
    frames: Sequence[Frame]
    since: float  # monotonic


class Arrivals:
    """`deliver` gets every chunk, at once where nothing is to be waited for; of an overdue one it cannot get the tensors."""

    def __init__(self, connectors: Connectors, deliver: Deliver, wait_s: float = WAIT_S) -> None:
        self._connectors = connectors
        self._deliver = deliver
        self._wait_s = wait_s
        self._held: dict[tuple[int, str], collections.deque[_Held]] = {}

    def chunk(self, event: events.Chunk, frames: Sequence[Frame]) -> None:
        key = (event.request, event.edge)
        if key not in self._held and self._connectors.awaited(event.refs) is None:
            self._deliver(event, frames)
        else:
            self._held.setdefault(key, collections.deque()).append(_Held(event, frames, time.monotonic()))

    def advance(self) -> None:
        """Deliver what has come, and what is overdue."""
        now = time.monotonic()
        for key, queue in list(self._held.items()):
            while queue and ((until := self._until(queue[0])) is None or until <= now):
                held = queue.popleft()
                self._deliver(held.event, held.frames)
            if not queue:
                self._held.pop(key, None)

    def forget(self, request: int, edges: Sequence[str]) -> None:
        """The request has ended where these edges lead to."""
        for edge in edges:
            self._held.pop((request, edge), None)

    def forget_all(self) -> None:
        self._held.clear()

    def wake_at(self) -> float | None:
        """When the first chunk is overdue (monotonic)."""
        times = [self._until(queue[0]) for queue in self._held.values()]
        return min((0.0 if until is None else until for until in times), default=None)

    def _until(self, held: _Held) -> float | None:
        """When it is overdue; None: there is nothing to wait for."""
        ref = self._connectors.awaited(held.event.refs)
        return None if ref is None else max(held.since, self._connectors.tcp.heard(ref)) + self._wait_s

    @property
    def held(self) -> int:
        """Chunks held back."""
        return sum(map(len, self._held.values()))
