"""Chunks whose tensors are still on their way from another host: held back, each edge in order, until they have come or time is over."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

from omni_bus import events
from omni_bus.connectors.base import Frame
from omni_bus.connectors.select import Connectors

WAIT_S = 10.0  # from a chunk's event to its tensors; then its request fails

Deliver = Callable[[events.Chunk, Sequence[Frame]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    event: events.Chunk
    frames: Sequence[Frame]
    until: float  # monotonic


class Arrivals:
    """`deliver` gets every chunk, at once where nothing is to be waited for; of an overdue one it cannot get the tensors."""

    def __init__(self, connectors: Connectors, deliver: Deliver, wait_s: float = WAIT_S) -> None:
        self._connectors = connectors
        self._deliver = deliver
        self._wait_s = wait_s
        self._held: dict[tuple[int, str], collections.deque[_Held]] = {}

    def chunk(self, event: events.Chunk, frames: Sequence[Frame]) -> None:
        key = (event.request, event.edge)
        if key not in self._held and not self._connectors.await_any(event.refs):
            self._deliver(event, frames)
        else:
            self._held.setdefault(key, collections.deque()).append(_Held(event, frames, time.monotonic() + self._wait_s))

    def advance(self) -> None:
        """Deliver what has come, and what is overdue."""
        now = time.monotonic()
        for key, queue in list(self._held.items()):
            while queue and (queue[0].until <= now or not self._connectors.await_any(queue[0].event.refs)):
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
        return min((queue[0].until for queue in self._held.values()), default=None)

    @property
    def held(self) -> int:
        """Chunks held back."""
        return sum(map(len, self._held.values()))
