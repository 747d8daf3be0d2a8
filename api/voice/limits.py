"""How fast, how idle and how long a voice session may be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from omni_bus.deployment import ApiConfig
from omni_bus.errors import RateLimited

BURST_S = 10.0  # of its allowed rate a client may send at once: what a network that stood still brings together


class EventRate:
    """A client's events, as a bucket that empties at the allowed rate. Times are seconds of time.monotonic."""

    def __init__(self, per_second: int, now: float) -> None:
        """per_second: 0 allows any."""
        self._rate = per_second
        self._most = per_second * BURST_S
        self._level = 0.0
        self._then = now

    def count(self, now: float) -> None:
        """One more event. Raises RateLimited where that is too many."""
        if not self._rate:
            return
        self._level = max(0.0, self._level - (now - self._then) * self._rate) + 1
        self._then = now
        if self._level > self._most:
            raise RateLimited(
                f"a session may send {self._rate} events a second; put more audio into each", code="too_many_events"
            )


class SessionTimer:
    """Calls `ended` once, with a code and a sentence, when a session has been idle or open for too long. One timer, rarely set anew."""

    def __init__(self, config: ApiConfig, busy_until: Callable[[float], float], ended: Callable[[str, str], None]) -> None:
        """busy_until: given the time, until when the session had, or will have, something to do for its client; seconds of
        time.monotonic both. It is asked only when the session would be idle otherwise."""
        self._loop = asyncio.get_running_loop()
        self._idle_s = config.session_idle_s
        self._busy_until = busy_until
        self._ended = ended
        now = time.monotonic()
        self._over = now + config.session_s
        self._total_s = config.session_s
        self._heard = now
        self._set(min(config.session_s, self._idle_s))

    def heard(self) -> None:
        """The client said something."""
        self._heard = time.monotonic()

    def stop(self) -> None:
        self._timer.cancel()

    def _set(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._due)

    def _due(self) -> None:
        now = time.monotonic()
        if now >= self._over:
            self._ended(
                "session_expired", f"the session has lasted {self._total_s:g} s, which is as long as one may; open another"
            )
            return
        idle_from = self._heard
        if now >= idle_from + self._idle_s:
            idle_from = max(idle_from, self._busy_until(now))
        if now >= idle_from + self._idle_s:
            self._ended(
                "session_idle",
                f"the session was closed: for {self._idle_s:g} s its client said nothing, and nothing was to be answered or played",
            )
        else:
            self._set(min(self._over, idle_from + self._idle_s) - now)
