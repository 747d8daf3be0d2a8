"""How late the event loop runs: timers that measure their own lateness.

While requests are in flight a timer every 10 ms sees any hold-up of the loop that is longer than that; an idle server looks once
a second, which costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BUSY_S = 0.010
IDLE_S = 1.0


class LoopLag:
    def __init__(self, observe: Callable[[float], None], in_flight: Callable[[], int]) -> None:
        self._observe = observe
        self._in_flight = in_flight
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        """A request came: look closely from now on."""
        if self._timer is not None and self._due - asyncio.get_running_loop().time() > BUSY_S:
            self._timer.cancel()
            self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + (BUSY_S if self._in_flight() else IDLE_S)
        self._timer = loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._observe(max(0.0, asyncio.get_running_loop().time() - self._due))
        self._arm()
