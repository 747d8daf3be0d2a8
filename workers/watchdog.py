"""Ends a worker whose engine loop does not come round: a step that hangs. Says first where every thread stood.

The timer is a thread of the interpreter's own (faulthandler), which needs neither Python's lock nor the hung thread's help. A process
that is stopped as a whole is not hung: others notice it by its silence.
"""

from __future__ import annotations

import faulthandler
import sys


class Watchdog:
    """`looked` is to be called as often as heartbeats are sent; where it is not for `limit_s` seconds, the process ends with status 1.

    0: never. The tracebacks go to stderr, which is the worker's log; they name files and lines, and no values.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def looked(self) -> None:
        if self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=sys.stderr)
