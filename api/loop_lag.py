"""How late the event loop runs: timers that measure their own lateness.

While requests are in flight a timer every 10 ms sees any hold-up of the loop that is longer than that; an idle server looks once
a second, which costs nothing. A machine that is busy elsewhere makes every timer late, so what the loop's thread spent waiting for
a processor is told apart from what held it up inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable

BUSY_S = 0.010
IDLE_S = 1.0


class LoopLag:
    """`observe(late, held)` at each timer, in seconds: how late it was, and how much of that was not a wait for a processor."""

    def __init__(self, observe: Callable[[float, float], None], in_flight: Callable[[], int]) -> None:
        self._observe = observe
        self._in_flight = in_flight
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._waited = 0.0
        self._wait_clock = WaitClock()

    def start(self) -> None:
        """On the loop's own thread."""
        self._wait_clock.open()
        self._arm()

    def stop(self) -> None:
        self._wait_clock.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        """A request came: look closely from now on."""
        if self._timer is not None and self._due - time.monotonic() > BUSY_S:
            self._timer.cancel()
            self._arm()

    def _arm(self) -> None:
        delay = BUSY_S if self._in_flight() else IDLE_S
        self._waited = self._wait_clock.read()
        self._due = time.monotonic() + delay  # not the loop's own time, which uvloop keeps in whole milliseconds
        self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

    def _fire(self) -> None:
        late = max(0.0, time.monotonic() - self._due)
        self._observe(late, max(0.0, late - (self._wait_clock.read() - self._waited)))
        self._arm()


class WaitClock:
    """Seconds that one thread has been ready to run without a processor to run on; stands still where Linux does not tell."""

    def __init__(self) -> None:
        self._file: int | None = None

    def open(self) -> None:
        """For the calling thread."""
        with contextlib.suppress(OSError):  # another system, or a kernel without scheduler statistics
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def read(self) -> float:
        if self._file is None:
            return 0.0
        _, waited_ns, _ = os.pread(self._file, 96, 0).split()
        return int(waited_ns) / 1e9
