"""Ends a worker process that hangs: its engine loop does not come round, or its load gets no further. Says first where every thread stood.

The timer is a thread of the interpreter's own (faulthandler), which needs neither Python's lock nor the hung thread's help. A process
that is stopped as a whole is not hung: others notice it by its silence.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time

# A process has one such timer: it is set for the loop, or load, that is due first. They run in threads of their own.
_lock = threading.Lock()
_due: dict[int, float] = {}  # thread → monotonic time by which its loop must have come round, or its load have got further


class Watchdog:
    """Of the thread that makes it. `looked` is to be called as often as heartbeats are sent, or as there is progress; where it is not for
    `limit_s` seconds, the process ends with status 1.

    0: never. The tracebacks go to stderr, which is the worker's log; they name files and lines, and no values.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._thread = threading.get_ident()

    def looked(self) -> None:
        """By any thread."""
        if self._limit_s:
            with _lock:
                now = time.monotonic()
                _due[self._thread] = now + self._limit_s
                _set_timer(now)

    def rest(self) -> None:
        """What it watched is over, and nothing else of the thread is watched yet."""
        with _lock:
            if _due.pop(self._thread, None) is None:
                return
            if _due:
                _set_timer(time.monotonic())
            else:
                faulthandler.cancel_dump_traceback_later()


def loop_is_over() -> None:
    """The calling thread's loop and all that was to be closed behind it have ended, and the process lives on with the others'."""
    with _lock:
        if _due.pop(threading.get_ident(), None) is not None and _due:
            _set_timer(time.monotonic())


def _set_timer(now: float) -> None:
    faulthandler.dump_traceback_later(max(0.001, round(min(_due.values()) - now, 6)), exit=True, file=sys.stderr)
