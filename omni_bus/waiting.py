"""Requests that wait for their start: in which order they go, and who gives way where the queue is full. No I/O, no clock.

First those that are run again because their worker died: they had their turn. Then the interactive ones and those of priority `batch`
that have waited for AGED_S seconds, as they arrived; then the other batch ones. Requests that end in speech and requests that do not
wait in lanes of their own, as different things hold them back; within a lane nobody overtakes.
"""

from __future__ import annotations

from omni_bus.admission import is_speech
from omni_bus.events import BATCH, INTERACTIVE
from omni_bus.request import Request

AGED_S = 60.0  # after which a batch request is served as if it were interactive

_LANES = (True, False)  # is_speech
_PRIORITIES = (INTERACTIVE, BATCH)


class Waiting:
    def __init__(self) -> None:
        self._again: dict[int, Request] = {}
        # A dict keeps the order of arrival, and gives back one from its middle at once.
        self._lanes: dict[tuple[bool, str], dict[int, Request]] = {
            (speech, priority): {} for speech in _LANES for priority in _PRIORITIES
        }

    def __len__(self) -> int:
        """Without those that are run again: they are counted as running."""
        return sum(map(len, self._lanes.values()))

    @property
    def any(self) -> bool:
        return bool(self._again) or len(self) > 0

    def add(self, request: Request) -> None:
        self._queue(request)[request.id] = request

    def discard(self, request: Request) -> None:
        self._queue(request).pop(request.id, None)

    def behind(self, request: Request, now: float) -> bool:
        """Whether a new request has others before it."""
        return self.head(is_speech(request.options), now, batch=request.options.priority == BATCH) is not None

    def again(self) -> list[Request]:
        return list(self._again.values())

    def head(self, speech: bool, now: float, *, batch: bool = True) -> Request | None:
        """Whose turn is next in a lane; batch=False: among those that an interactive request waits for."""
        interactive = next(iter(self._lanes[speech, INTERACTIVE].values()), None)
        other = next(iter(self._lanes[speech, BATCH].values()), None)
        if other is not None and now - other.arrived >= AGED_S and (interactive is None or other.arrived < interactive.arrived):
            return other
        return interactive if interactive is not None or not batch else other

    def last_of_batch(self) -> Request | None:
        """Who gives way to an interactive request where the queue is full."""
        lasts = (next(reversed(self._lanes[speech, BATCH].values()), None) for speech in _LANES)
        return max((last for last in lasts if last is not None), key=lambda request: request.arrived, default=None)

    def ahead_of(self, request: Request) -> int:
        """How many would be started before it."""
        return len(self) if request.options.priority == BATCH else self.by_priority()[INTERACTIVE]

    def by_priority(self) -> dict[str, int]:
        return {priority: sum(len(self._lanes[speech, priority]) for speech in _LANES) for priority in _PRIORITIES}

    def _queue(self, request: Request) -> dict[int, Request]:
        return self._again if request.again else self._lanes[is_speech(request.options), request.options.priority]
