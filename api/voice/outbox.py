"""The way out of a session: events are put in without waiting and leave in order; whoever makes many of them waits for room."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable

from omni_bus.api.voice.events import SessionEvent

Sink = Callable[[SessionEvent], Awaitable[None]]


class Outbox:
    """Putting in is synchronous, so that a change of the session and all that it says of it are one step.

    What lies here is bounded by `drained`: no task of a session goes on to its next cause of events while the client has not taken
    those of the last. last_put: when something was told, in seconds of time.monotonic; of one that has told nothing, when it was made.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: collections.deque[SessionEvent] = collections.deque()
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = False
        self.last_put = time.monotonic()

    def put(self, event: SessionEvent) -> None:
        """Nothing is kept once the outbox has been closed."""
        if self._closed:
            return
        self.last_put = time.monotonic()
        self._waiting.append(event)
        self._filled.set()
        self._empty.clear()

    async def drained(self) -> None:
        """Until the client has taken all there was, or is gone."""
        await self._empty.wait()

    async def run(self) -> None:
        """Hands the events to the sink until cancelled; raises what the sink raises."""
        try:
            while True:
                await self._filled.wait()
                while self._waiting:
                    await self._sink(self._waiting.popleft())
                self._filled.clear()
                self._empty.set()
        finally:
            self.close()

    def close(self) -> None:
        """Whoever waits goes on, and nothing more leaves."""
        self._closed = True
        self._waiting.clear()
        self._empty.set()
