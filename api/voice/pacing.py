"""How far the audio sent to a client is ahead of its playback, and how much of an answer has been played. Reads no clock itself."""

from __future__ import annotations

import collections
import dataclasses

KEPT = 8  # answers looked back upon: more than fit into any lead


@dataclasses.dataclass(slots=True)
class _Answer:
    item_id: str
    sent_ms: float = 0.0


class PlaybackClock:
    """What a client that plays at once and without a break has played, unless it tells what it has. Times are seconds of time.monotonic.

    One for all answers of a session: a client queues the next behind the one before.
    """

    def __init__(self) -> None:
        self._ends = 0.0  # when all that was sent will have been played
        self._answers: collections.deque[_Answer] = collections.deque(maxlen=KEPT)

    def sent(self, item_id: str, duration_ms: float, now: float) -> None:
        """So much audio of that item leaves now. Audio that comes after the player has run dry is played when it comes."""
        self._ends = max(self._ends, now) + duration_ms / 1000
        if not self._answers or self._answers[-1].item_id != item_id:
            self._answers.append(_Answer(item_id))
        self._answers[-1].sent_ms += duration_ms

    @property
    def ends(self) -> float:
        """When all that was sent will have been played; in the past where it has been."""
        return self._ends

    def lead_s(self, now: float) -> float:
        """Seconds of audio that were sent and are not played yet."""
        return max(0.0, self._ends - now)

    def sent_ms(self, item_id: str) -> float:
        """Of one of the last answers."""
        return next((answer.sent_ms for answer in self._answers if answer.item_id == item_id), 0.0)

    def played(self, item_id: str, played_ms: float, now: float) -> None:
        """The client tells how much of an answer it has played by now, which our clock only guesses. One that is not known is ignored."""
        left = 0.0
        for answer in reversed(self._answers):
            if answer.item_id == item_id:
                rest = max(0.0, answer.sent_ms - played_ms)
                ends = now + (left + rest) / 1000
                # Of one that has been played to its end nothing is said of how far the next has come.
                self._ends = ends if rest or not left else min(self._ends, ends)
                return
            left += answer.sent_ms

    def cleared(self, now: float) -> None:
        """The client has thrown away what it had not played."""
        self._ends = min(self._ends, now)

    def unheard(self, now: float) -> dict[str, float]:
        """Items of which not everything has been played → the milliseconds that have."""
        left = self.lead_s(now) * 1000
        found: dict[str, float] = {}
        for answer in reversed(self._answers):
            if left <= 0:
                break
            found[answer.item_id] = max(0.0, answer.sent_ms - left)
            left -= answer.sent_ms
        return found
