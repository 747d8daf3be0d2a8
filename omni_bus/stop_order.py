"""In which order a server's processes end, and how long each is waited for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Sequence
from typing import Any

from omni_bus.broker_link import BrokerLink
from omni_bus.child import Child
from omni_bus.events import StopServing

# The whole of a stop takes less than 5 s: what is asked nicely has until the first mark, what is told has until the second.
SERVE_OUT_S = 1.5
ASKED_S = 2.5
TOLD_S = 3.5
BROKER_S = 0.7
DRAINED_S = 1.5  # behind a drain: for cancels to be acknowledged and workers to leave


class Stop:
    """`hurry`: once it is set, nothing is waited for."""

    def __init__(
        self, broker: Child, workers: Sequence[Child], apis: Sequence[Child], link: BrokerLink | None, hurry: asyncio.Event
    ) -> None:
        self._broker = broker
        self._workers = tuple(workers)
        self._apis = tuple(apis)
        self._link = link
        self._hurry = hurry

    async def drain(self, seconds: float) -> None:
        """Nothing new is taken, and what runs has its time. The API processes stay, to say so and to send what is left."""
        if self._link is not None and self._broker.alive:
            self._link.send(StopServing(seconds))
            await gone([child for child in self._workers if child.ready], seconds + DRAINED_S, self._hurry)

    async def all(self) -> None:
        """API first, so that nothing new comes; then the running requests, the workers, and the broker last."""
        others = [*self._apis, *self._workers]
        for child in self._apis:
            child.send_signal(signal.SIGTERM)
        if self._link is not None and self._broker.alive:
            self._link.send(StopServing(SERVE_OUT_S))
        for child in self._workers:
            # One that still loads does not read its socket, and one without a broker will not be told.
            if not (child.ready and self._broker.alive):
                child.send_signal(signal.SIGTERM)
        await gone(others, ASKED_S, self._hurry)
        for child in others:
            child.send_signal(signal.SIGTERM)
        await gone(others, TOLD_S - ASKED_S, self._hurry)
        for child in others:
            child.send_signal(signal.SIGKILL)
        self._broker.send_signal(signal.SIGTERM)
        await gone([self._broker, *others], BROKER_S, self._hurry)
        self._broker.send_signal(signal.SIGKILL)
        await asyncio.gather(*(child.gone() for child in (self._broker, *others)))


async def gone(children: Iterable[Child], seconds: float, hurry: asyncio.Event) -> None:
    """Wait until they have ended, the time is over, or the user is in a hurry."""
    waiting = {asyncio.ensure_future(child.gone()) for child in children if child.alive}
    if not waiting:
        return
    everyone = asyncio.ensure_future(asyncio.wait(waiting))
    hurried = asyncio.ensure_future(hurry.wait())
    both: set[asyncio.Future[Any]] = {everyone, hurried}
    await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for future in (everyone, hurried, *waiting):
        future.cancel()
