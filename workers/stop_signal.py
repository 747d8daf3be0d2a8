"""The signals that end a worker in order: SIGTERM and SIGINT now, SIGUSR1 once all that runs there has finished."""

from __future__ import annotations

import contextlib
import os
import signal
import types

GRACE_S = 4  # from SIGTERM or SIGINT to an end by force


class StopSignal:
    """SIGTERM and SIGINT, as a flag and a descriptor that becomes readable, so that whoever polls wakes up.

    While `abort` is set, the signal raises SystemExit instead: a load that takes minutes looks at no flag.
    """

    def __init__(self) -> None:
        self.raised = False
        self.leave = False
        self.abort = False
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        # A step that never returns keeps Python's handler from running to an end; the kernel's default for SIGALRM does not wait.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_leave)

    def clear(self) -> None:
        """Read the descriptor empty: any signal with a handler in Python has written to it."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def _on_leave(self, number: int, frame: types.FrameType | None) -> None:
        self.leave = True
        if self.abort:
            raise SystemExit(0)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        if not self.raised:
            signal.alarm(GRACE_S)
        self.raised = True
        if self.abort:
            raise SystemExit(0)
