"""A socket to a broker on another host: its CURVE keys, and the heartbeats that tell soon when the connection is cut."""

from __future__ import annotations

import zmq

from omni_bus.keys import WorkerKey
from omni_bus.remote_door import HEARTBEAT_MS, TIMEOUT_MS

RECONNECT_MS = 100
RECONNECT_LIMIT_MS = 2000


def secure(socket: zmq.Socket[bytes], endpoint: str, key: WorkerKey) -> None:
    """Set before it is connected to `endpoint`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.pair.secret.encode())
    for option, value in (
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, TIMEOUT_MS),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_LIMIT_MS),
        (zmq.IPV6, int("[" in endpoint)),
    ):
        socket.setsockopt(option, value)
