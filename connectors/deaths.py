"""Sets free the streams that wait for a process which has died.

A device's stream that waits for an event of another process waits for ever if that process is killed before its device gets to the
event. A thread sleeps until the kernel says that one of those processes has ended, and then records its events itself: on a stream of
ours, so that whoever waits for them goes on. What is read or written after that belongs to requests that fail with the dead process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading

from omni_bus.connectors.cuda_fences import Fence

_log = logging.getLogger(__name__)


class Deaths:
    """`note` comes from any thread; the watching thread starts with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: dict[int, list[Fence]] = {}  # pid → fences of it for which a stream of ours may wait
        self._selector: selectors.BaseSelector | None = None
        self._wake_end = -1
        self._thread: threading.Thread | None = None

    def note(self, pid: int, fence: Fence) -> None:
        """A stream of ours waits for `fence`, which that process has recorded. Nothing is noted of our own process, or of none."""
        if pid in (0, os.getpid()) or fence.over():
            return
        with self._lock:
            if pid not in self._awaited:
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    fence.force()
                    return
                self._awaited[pid] = []
                self._watch().register(descriptor, selectors.EVENT_READ, pid)
                os.write(self._wake_end, b"+")
            self._awaited[pid] = [*(one for one in self._awaited[pid] if not one.over()), fence]

    def close(self) -> None:
        if self._thread is not None:
            os.write(self._wake_end, b"-")
            self._thread.join()
            self._thread = None
            os.close(self._wake_end)

    def _watch(self) -> selectors.BaseSelector:
        if self._selector is None:
            self._selector = selectors.EpollSelector()
            wake, self._wake_end = os.pipe()
            self._selector.register(wake, selectors.EVENT_READ, None)
            self._thread = threading.Thread(target=self._run, args=(self._selector,), name="deaths", daemon=True)
            self._thread.start()
        return self._selector

    def _run(self, selector: selectors.BaseSelector) -> None:
        with contextlib.closing(selector):
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        if b"-" in os.read(key.fd, 64):
                            for registered in selector.get_map().values():
                                os.close(registered.fd)
                            return
                        continue
                    with self._lock:
                        selector.unregister(key.fileobj)
                        os.close(key.fd)
                        fences = self._awaited.pop(key.data)
                    for fence in fences:
                        try:
                            if not fence.over():
                                fence.force()
                        except RuntimeError:  # as torch tells CUDA's errors
                            _log.exception("an event of the dead process %d cannot be recorded", key.data)
