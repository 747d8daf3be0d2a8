"""The supervisor's connection to one broker process: what it sees of the replicas, and what it tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from omni_bus import events, wire
from omni_bus.errors import ShuttingDown
from omni_bus.pump import Pump

NO_BROKER = "the broker is being started again; try again in a moment"
_WATCH = 1  # the query that is answered at every change


class BrokerLink:
    """Watches replicas from the broker's first moment on; a message sent before it listens is delivered once it does."""

    def __init__(self, endpoint: str, on_status: Callable[[events.Status], None]) -> None:
        self._on_status = on_status
        self._queries: dict[int, asyncio.Future[events.Status]] = {}
        self._awaited: dict[asyncio.Future[events.Status], Callable[[events.Status], bool]] = {}
        self._last_query = _WATCH
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(endpoint)
        self._pump = Pump(asyncio.get_running_loop(), self._socket, self._on_message)
        self.send(events.Hello("supervisor"))
        self.send(events.StatusQuery(_WATCH, watch=True))

    def send(self, event: events.ClientToBroker) -> None:
        self._pump.send([wire.encode(event)])

    async def status(self) -> events.Status:
        """How the replicas stand now. Waits for ever where there is no broker."""
        self._last_query += 1
        query = self._last_query
        answer: asyncio.Future[events.Status] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        self.send(events.StatusQuery(query))
        try:
            return await answer
        finally:
            del self._queries[query]

    async def until(self, holds: Callable[[events.Status], bool]) -> events.Status:
        """The first status, from now on, of which `holds` is true: it is asked of each change."""
        if holds(status := await self.status()):
            return status
        found: asyncio.Future[events.Status] = asyncio.get_running_loop().create_future()
        self._awaited[found] = holds
        try:
            return await found
        finally:
            del self._awaited[found]

    def close(self) -> None:
        """Whoever still waits for an answer gets ShuttingDown."""
        for answer in (*self._queries.values(), *self._awaited):
            if not answer.done():
                answer.set_exception(ShuttingDown(NO_BROKER))
        self._pump.close()
        self._socket.close()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        event = wire.at_client(frames[0].buffer)
        if not isinstance(event, events.Status):
            return
        if event.query == _WATCH:
            self._on_status(event)
            for found, holds in self._awaited.items():
                if not found.done() and holds(event):
                    found.set_result(event)
        elif (answer := self._queries.get(event.query)) is not None and not answer.done():
            answer.set_result(event)
