"""Ends a worker process of which an engine loop does not come round: a step that hangs. Says first where every thread stood.

The timer is a thread of the interpreter's own (faulthandler), which needs neither Python's lock nor the hung thread's help. A process
that is stopped as a whole is not hung: others notice it by its silence.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time

# A process has one such timer: it is set for the loop that is due first. Loops run in threads of their own.
_lock = threading.Lock()
_due: dict[int, float] = {}  # thread → monotonic time by which its loop must have come round


class Watchdog:
    """`looked` is to be called as often as heartbeats are sent; where it is not for `limit_s` seconds, the process ends with status 1.

    0: never. The tracebacks go to stderr, which is the worker's log; they name files and lines, and no values.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def looked(self) -> None:
        """By the loop's own thread."""
        if self._limit_s:
            with _lock:
                now = time.monotonic()
                _due[threading.get_ident()] = now + self._limit_s
                _set_timer(now)


def loop_is_over() -> None:
    """The calling thread's loop and all that was to be closed behind it have ended, and the process lives on with the others'."""
    with _lock:
        if _due.pop(threading.get_ident(), None) is not None and _due:
            _set_timer(time.monotonic())


def _set_timer(now: float) -> None:
    faulthandler.dump_traceback_later(max(0.001, round(min(_due.values()) - now, 6)), exit=True, file=sys.stderr)
