"""The supervisor's connection to one broker process: what it sees of the replicas, and what it tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from omni_bus import events, wire
from omni_bus.pump import Pump


class BrokerLink:
    """Watches replicas from the broker's first moment on; a message sent before it listens is delivered once it does."""

    def __init__(self, endpoint: str, on_status: Callable[[events.Status], None]) -> None:
        self._on_status = on_status
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(endpoint)
        self._pump = Pump(asyncio.get_running_loop(), self._socket, self._on_message)
        self.send(events.Hello("supervisor"))
        self.send(events.StatusQuery(1, watch=True))

    def send(self, event: events.ClientToBroker) -> None:
        self._pump.send([wire.encode(event)])

    def close(self) -> None:
        self._pump.close()
        self._socket.close()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        event = wire.at_client(frames[0].buffer)
        if isinstance(event, events.Status):
            self._on_status(event)
