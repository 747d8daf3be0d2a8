"""The worker's connection to the broker: one DEALER, and a monitor that tells when the broker has gone. With CURVE where that is far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import zmq

from omni_bus import events, wire
from omni_bus.connectors.base import Frame
from omni_bus.curve_client import secure
from omni_bus.keys import WorkerKey

LINGER_MS = 500  # for the last messages of a worker that leaves
BATCH = 256  # messages read before the stages get their turn


class BrokerLink:
    """`wait` blocks until there is something to read here, on `wake_fd`, or on `beside`: another socket that the loop reads."""

    def __init__(
        self,
        endpoint: str,
        worker: str,
        wake_fd: int,
        *,
        key: WorkerKey | None = None,
        beside: zmq.Socket[bytes] | None = None,
    ) -> None:
        """`key` is needed where the broker is on another host."""
        self._endpoint = endpoint
        self._worker = worker
        self._wake_fd = wake_fd
        self._key = key
        self._beside = beside
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its own: `close` waits for every socket of it
        self._connect()

    def send(self, event: events.Event, frames: Sequence[Frame] = ()) -> None:
        self._socket.send_multipart([wire.encode(event), *frames])

    def wait(self, timeout_s: float) -> None:
        self._poller.poll(max(0, math.ceil(timeout_s * 1000)))

    def receive(self) -> Iterator[list[bytes]]:
        """The messages that are here, up to BATCH of them."""
        for _ in range(BATCH):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def lost(self) -> bool:
        """Whether the broker has gone since the last look; then the link is a new one, and what was under way is lost."""
        if not self._monitor.poll(0):
            return False
        self._disconnect(linger_ms=0)
        self._connect()
        return True

    def close(self) -> None:
        self._disconnect(linger_ms=LINGER_MS)
        self._context.term()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self._worker.encode())
        # Credits bound what is under way; a limit here would only let a send block.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if self._key is not None:
            secure(self._socket, self._endpoint, self._key)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        if self._beside is not None:
            self._poller.register(self._beside, zmq.POLLIN)

    def _disconnect(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)
