"""Asking a broker on another host to be let in, and telling why not: nobody there, a key that is not known, versions that differ."""

from __future__ import annotations

import asyncio
import os

import zmq
from zmq.utils.monitor import parse_monitor_message

from omni_bus import __version__, events, wire
from omni_bus.curve_client import secure
from omni_bus.errors import ConfigError
from omni_bus.keys import WorkerKey
from omni_bus.pump import Pump
from omni_bus.tcp_endpoint import TcpEndpoint

_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class NoBroker(ConfigError):
    """Nobody answers there now; later somebody may."""


async def ask(broker: TcpEndpoint, key: WorkerKey, host: str, wish: events.Attach, wait_s: float) -> events.Attached:
    """What the broker says to `wish`. `host`: this command's, as in attach.remote_name.

    Raises NoBroker after `wait_s` seconds without a connection, ConfigError where the broker refuses the key or the wish.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[events.BrokerToWorker] = loop.create_future()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTING_ID, f"attach@{host}.0".encode())
    secure(socket, str(broker), key)
    monitor = socket.get_monitor_socket(_WATCHED)
    reached = False

    def heard(frames: list[zmq.Frame]) -> None:
        event = wire.at_worker(frames[0].buffer)
        if isinstance(event, events.Attached | events.Refused) and not answer.done():
            answer.set_result(event)

    def watched(frames: list[zmq.Frame]) -> None:
        nonlocal reached
        event = int(parse_monitor_message([frame.bytes for frame in frames])["event"])
        if event == zmq.EVENT_CONNECTED:
            reached = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and not answer.done():
            text = "does not know this key; put its NAME.key into the directory that bus.keys names there"
            answer.set_exception(ConfigError(f"--key: the broker at {broker} {text}"))

    pumps = [Pump(loop, monitor, watched), Pump(loop, socket, heard)]
    try:
        socket.connect(str(broker))
        pumps[1].send([wire.encode(wish)])
        async with asyncio.timeout(wait_s):
            said = await answer
    except TimeoutError:
        if reached:
            text = "does not answer in CURVE with the key that this file says for it"
            raise ConfigError(f"--key: what listens at {broker} {text}; take a key from the server's own directory") from None
        raise NoBroker(f"--broker: nothing answers at {broker} within {wait_s:g} s") from None
    except zmq.ZMQError as error:
        raise ConfigError(f"--broker: {broker} cannot be reached: {os.strerror(error.errno or 0)}") from None
    finally:
        for pump in pumps:
            pump.close()
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)
        context.term()
    if isinstance(said, events.Refused):
        raise ConfigError(f"the broker at {broker} refuses this worker: {said.error.message}")
    assert isinstance(said, events.Attached)
    return said


def wish(stages: tuple[str, ...], pipeline: str) -> events.Attach:
    """What this omni-bus asks for."""
    return events.Attach(stages=stages, pipeline=pipeline, version=__version__)
