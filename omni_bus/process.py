"""What every process of a server does to its own life: to end with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(how: signal.Signals = signal.SIGTERM, *, parent: int | None = None) -> None:
    """Ask Linux to send this process `how` when its parent ends. Elsewhere it does nothing.

    `parent` is the pid it was started by, where known: a parent that ended before this call is noticed by it.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), how)
