"""The data sockets of one process: one that takes tensors from other hosts, and one to each process that it sends tensors to.

All are CURVE, with the key pair that the processes of one server share: whoever has another key is let in nowhere. They have a ZeroMQ
context of their own, so that a large tensor never stands in the way of an event.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator

from omni_bus.errors import ConfigError
from omni_bus.keys import KeyPair

_log = logging.getLogger(__name__)
PORTS = 100  # how many ports may be tried, from the first on
HEARTBEAT_MS = 1000
TIMEOUT_MS = 8000  # more than the broker gives a connection: a heartbeat stands behind what the kernel holds already
HANDSHAKE_MS = 5000
RECONNECT_MS = 100
RECONNECT_LIMIT_MS = 1000
IDLE_S = 60.0  # after which a connection to a consumer is given up
STUCK_S = 10.0  # after which one is given up that nobody waits for, and that still has not taken all
MAX_FRAME = 2 << 20  # bytes; tensors are cut into smaller frames

Part = bytes | memoryview


class _OneKey:
    """As zmq.auth wants it: the keys that may come in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


@dataclasses.dataclass(slots=True)
class _Way:
    socket: zmq.Socket[bytes]
    used: float  # monotonic


class DataSockets:
    """Used from one thread. `listen`: an address of this host, or "*"; `announce`: what other hosts call it, "*": the broker's host.

    Raises ConfigError where none of the ports from `first_port` on can be had.
    """

    def __init__(self, pair: KeyPair, *, sender: str, listen: str, announce: str, first_port: int, broker_host: str) -> None:
        self._pair = pair
        self._sender = sender.encode()
        self._broker_host = broker_host
        self._ways: dict[str, _Way] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Quiet: it would tell keys, and each of them at every handshake.
        quiet = logging.getLogger(f"{__name__}.zap")
        quiet.setLevel(logging.CRITICAL)
        self._zap = ThreadAuthenticator(self._context, log=quiet)
        self._zap.start()
        self._zap.configure_curve_callback("*", _OneKey(pair.public.encode()))
        self.socket = self._new(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        self.socket.setsockopt(zmq.IPV6, int(":" in listen))
        try:
            port = self.socket.bind_to_random_port(
                f"tcp://{_bracketed(listen)}", min_port=first_port, max_port=min(65536, first_port + PORTS), max_tries=5 * PORTS
            )
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            last = min(65535, first_port + PORTS - 1)
            raise ConfigError(
                f"no data socket at {listen}, ports {first_port} to {last}: {os.strerror(error.errno or 0) if isinstance(error, zmq.ZMQError) else 'none is free'}"
            ) from None
        self.endpoint = f"tcp://{_bracketed(announce)}:{port}"

    def send(self, to: str, parts: Sequence[Part]) -> zmq.MessageTracker | None:
        """Queue a message for the process with that data socket. None: all of it was copied.

        Parts that are memoryviews are not: the tracker says when their memory is free again.
        """
        way = self._ways.get(to)
        if way is None:
            way = self._ways[to] = _Way(self._connected(to), 0.0)
        way.used = time.monotonic()
        trackers = []
        for index, part in enumerate(parts):
            more = zmq.SNDMORE if index < len(parts) - 1 else 0
            if isinstance(part, bytes):
                way.socket.send(part, zmq.NOBLOCK | more)
            else:
                trackers.append(way.socket.send(part, zmq.NOBLOCK | more, copy=False, track=True))
        return zmq.MessageTracker(*trackers) if trackers else None

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """The messages that are here: who sent each, and its parts."""
        while True:
            try:
                yield self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return

    def prune(self, busy: set[str], stuck: set[str]) -> None:
        """Give up connections that were not used for a while, but for those to `busy` consumers; `stuck` ones sooner.

        That sets free what ZeroMQ still holds for a consumer that is gone.
        """
        now = time.monotonic()
        for to, way in list(self._ways.items()):
            if to not in busy and now - way.used > (STUCK_S if to in stuck else IDLE_S):
                self._ways.pop(to).socket.close(0)

    def close(self) -> None:
        for way in self._ways.values():
            way.socket.close(0)
        self._ways.clear()
        self.socket.close(0)
        self._zap.stop()
        self._context.term()

    def _connected(self, to: str) -> zmq.Socket[bytes]:
        socket = self._new(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self._sender)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._pair.public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_LIMIT_MS)
        endpoint = to.replace("*", _bracketed(self._broker_host), 1)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.connect(endpoint)
        return socket

    def _new(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, 0),  # the pool bounds what is under way
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        ):
            socket.setsockopt(option, value)
        return socket


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
