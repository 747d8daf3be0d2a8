"""Where workers from other hosts attach: a ROUTER on TCP with CURVE, and the ZAP handler that knows whose key may come in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from omni_bus.errors import ConfigError
from omni_bus.keys import KeyPair, KnownKeys
from omni_bus.pump import Frame, Pump

MAX_FRAME = 64 << 20  # bytes; tensors above 64 KiB take the data sockets, so that nothing comes near it
HEARTBEAT_MS = 500  # a peer that is silent is asked this often
TIMEOUT_MS = 2000  # and is gone without an answer in this time: together within 3 s
HANDSHAKE_MS = 5000  # for whoever connects to show a key
LINGER_MS = 500
ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks, in each context
TOLD = 1000  # refusals of different kinds and addresses that are logged, once each

_REFUSED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it closed before it had shown a key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it does not speak CURVE, or took another key for the server's",
}


class RemoteDoor:
    """`on_message` gets frames as the local socket's callback does, `on_closed` is called after some connection has closed.

    Raises ConfigError where it cannot listen at `endpoint`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        server: KeyPair,
        known: KnownKeys,
        *,
        on_message: Callable[[list[zmq.Frame]], None],
        on_closed: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._known = known
        self._on_closed = on_closed
        self._log = log
        self._told: set[tuple[str, str]] = set()
        # Before the door opens: without a handler ZeroMQ lets every key in.
        self._zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP)
        self._zap_pump = Pump(loop, self._zap, self._on_zap)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, 0),  # as on the local socket: credits bound what is under way
            (zmq.MAXMSGSIZE, MAX_FRAME),
            (zmq.LINGER, LINGER_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, TIMEOUT_MS),
            (zmq.HEARTBEAT_TTL, TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.IPV6, int("[" in endpoint)),
            (zmq.CURVE_SERVER, 1),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, server.secret.encode())
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._monitor_pump = Pump(loop, self._monitor, self._on_monitor)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._pump: Pump | None = None
            self.close()
            raise ConfigError(f"bus.listen: cannot listen at {endpoint}: {os.strerror(error.errno or 0)}") from None
        self._pump = Pump(loop, self._socket, on_message)

    def send(self, frames: Sequence[Frame]) -> None:
        """As Pump.send."""
        assert self._pump is not None
        self._pump.send(frames)

    def close(self) -> None:
        for pump in (self._pump, self._monitor_pump, self._zap_pump):
            if pump is not None:
                pump.close()
        self._socket.disable_monitor()
        for socket in (self._monitor, self._zap):
            socket.close(0)
        self._socket.close()

    def _on_zap(self, frames: list[zmq.Frame]) -> None:
        """One question of ZeroMQ's: version, id, domain, address, identity, mechanism and, of CURVE, the client's key in 32 bytes."""
        parts = [frame.bytes for frame in frames]
        name = None
        if len(parts) == 7 and parts[5] == b"CURVE" and len(parts[6]) == 32:
            name = self._known.name(z85.encode(parts[6]))
        if name is None:
            self._tell("its key is not known here", parts[3].decode(errors="replace")[:64] if len(parts) > 3 else "")
        status = (b"400", b"the key is not known", b"") if name is None else (b"200", b"", name.encode())
        self._zap_pump.send([b"1.0", parts[1] if len(parts) > 1 else b"", *status, b""])

    def _on_monitor(self, frames: list[zmq.Frame]) -> None:
        event = int(parse_monitor_message([frame.bytes for frame in frames])["event"])
        if event == zmq.EVENT_DISCONNECTED:
            self._on_closed()
        elif event in _REFUSED:
            self._tell(_REFUSED[event], "")

    def _tell(self, why: str, address: str) -> None:
        """Once for each reason and address, or whoever knocks would fill the log. "": only a question of ZeroMQ's says an address."""
        if (why, address) not in self._told and len(self._told) < TOLD:
            self._told.add((why, address))
            whose = f"from {address} " if address else ""
            self._log(f"refused a connection {whose}at {self._endpoint}: {why}")
