"""Streams that a server carries while a test changes it: each client asks again as soon as it is answered, until the block ends."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tests.support.running_server import Server


class ClosedLoop:
    """`check` gets every answer (a chat completion) and raises for a wrong one. What went wrong is in `failures`."""

    def __init__(self, server: Server, streams: int, text: str, check: Callable[[dict[str, Any]], None]) -> None:
        self._server = server
        self._text = text
        self._check = check
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(streams)]
        self._lock = threading.Lock()
        self.answered = 0
        self.failures: list[str] = []

    def __enter__(self) -> ClosedLoop:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self._check(self._server.chat(self._text, audio=True))
            except urllib.error.HTTPError as error:
                self._note(f"{error.code}: {error.read().decode()}")
                return
            except Exception as error:
                self._note(repr(error))
                return
            with self._lock:
                self.answered += 1

    def _note(self, failure: str) -> None:
        with self._lock:
            self.failures.append(failure)
