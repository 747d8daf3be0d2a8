"""The tcp connector over loopback, and waiting for what a socket brings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from omni_bus.connectors.data_socket import DataSockets
from omni_bus.connectors.select import Connectors
from omni_bus.connectors.tcp import LIMIT_BYTES, TcpConnector, new_sender
from omni_bus.events import TensorRef
from omni_bus.keys import KeyPair
from tests.support.running_server import free_port

PATIENCE_S = 60.0


def tcp_connector(keys: KeyPair, *, limit: int = LIMIT_BYTES) -> TcpConnector:
    sender = new_sender()
    here = "127.0.0.1"
    port = free_port()
    sockets = DataSockets(keys, sender=sender, listen=here, announce=here, first_port=port, broker_host=here)
    return TcpConnector(sockets, sender=sender, limit=limit)


def arrive(receiver: Connectors, refs: Sequence[TensorRef]) -> None:
    """Take in what comes until all of these are here."""
    until(lambda: receiver.awaited(refs) is None, receiver.tcp)


def until(check: Callable[[], bool], receiver: TcpConnector) -> None:
    """Take in what comes until the check holds."""
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert receiver.socket is not None
        assert receiver.socket.poll(max(0, int(1000 * (end - time.monotonic())))), "nothing came"
        receiver.receive()


def all_let_go(sender: Connectors) -> bool:
    """Whether every slot comes back; ZeroMQ lets go of memory in a thread of its own, a moment after it has sent it."""
    end = time.monotonic() + PATIENCE_S
    while sender.used and time.monotonic() < end:
        time.sleep(0.01)
        sender.prune()
    return sender.used == 0
