"""The leases that one process has of the broker: asked for, held, renewed at the next broker, given back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable

from omni_bus import events
from omni_bus.errors import OmniBusError, ShuttingDown, from_info

ANSWER_S = 5.0  # within which a broker grants a lease or refuses it


class ClientLeases:
    def __init__(self, send: Callable[[events.Event], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._held: dict[int, events.Lease] = {}

    @contextlib.asynccontextmanager
    async def one(self, kind: str, client: str) -> AsyncIterator[None]:
        """A lease for as long as the block lasts. Raises what the broker refuses it with, and ShuttingDown where it does not answer."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        lease = events.Lease(number, kind, client)
        self._send(lease)
        try:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await answer
            except TimeoutError:
                raise ShuttingDown("the broker does not answer") from None
            self._held[number] = lease
            yield
        finally:
            self._asked.pop(number, None)
            self._held.pop(number, None)
            self._send(events.Release(number))  # also where the answer is still to come

    def answered(self, event: events.Leased | events.LeaseRefused) -> None:
        answer = self._asked.pop(event.lease, None)
        if answer is None or answer.done():
            return
        if isinstance(event, events.Leased):
            answer.set_result(None)
        else:
            answer.set_exception(from_info(event.error))

    def broker_lost(self, error: OmniBusError) -> None:
        """What was asked of it is not answered any more; what it had granted goes on."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._asked.clear()

    def renew(self) -> None:
        """The next broker is there, and knows of no lease."""
        for lease in self._held.values():
            self._send(events.Lease(lease.lease, lease.kind, lease.client, renewed=True))
