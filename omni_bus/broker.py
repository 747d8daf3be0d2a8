"""The broker's I/O: a ROUTER socket between all peers, a second one for other hosts, the orchestrator's decisions carried out, a timer
only where one is due.
"""

from __future__ import annotations

import asyncio
import errno
import pathlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from omni_bus import wire
from omni_bus.attach import is_remote
from omni_bus.deployment import BusConfig, Deployment
from omni_bus.errors import ConfigError, ProtocolViolation
from omni_bus.keys import KnownKeys, ServerSecrets, server_pair
from omni_bus.orchestrator import Message, Orchestrator
from omni_bus.pump import Pump
from omni_bus.remote_door import RemoteDoor
from omni_bus.spec import PipelineSpec

MAX_FRAME = 2**30  # bytes; a peer that sends more is disconnected
PROBE_S = 0.02  # after a connection closed: by then the socket knows its peer no more
MAX_SLEEP_S = 3600.0  # a deadline may lie farther off than the loop can count
LINGER_MS = 500  # for the last events of a broker that stops


class Broker:
    """Binds `endpoint` and serves until `stop`. Runs on the current asyncio loop, which is its own, and needs no task.

    What is raised in a callback and not caught there ends it: nobody knows what of it still holds, and a new one is there in a second.
    """

    def __init__(
        self,
        endpoint: str,
        pipeline: PipelineSpec,
        deployment: Deployment,
        log: Callable[[str], None],
        secrets: ServerSecrets | None = None,
    ) -> None:
        """`secrets` are needed with `bus.listen`. Raises ConfigError where that is no place to listen, or its keys cannot be read."""
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._orchestrator = Orchestrator(pipeline, deployment, log=log, now=time.monotonic(), secrets=secrets)
        self._timer: asyncio.TimerHandle | None = None
        self._arming: asyncio.Handle | None = None
        self._clock_version = -1
        self._probe: asyncio.TimerHandle | None = None
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._loop.set_exception_handler(self._broken)
        self._stop_asked = False
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that was started again takes its name over
        self._socket.setsockopt(
            zmq.SNDHWM, 0
        )  # credits bound what is under way to each peer; the socket must never block on one
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        # Answered by ZeroMQ's own thread in each peer: a long step does not delay it, and a stopped process does not do it.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, round(deployment.bus.heartbeat_s * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(deployment.bus.lost_after_s * 1000))
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor_pump = Pump(self._loop, self._monitor, self._on_disconnected)
        self._socket.bind(endpoint)
        self._pump = Pump(self._loop, self._socket, self._on_message)
        self._door: RemoteDoor | None = None
        if deployment.bus.listen:
            try:
                self._door = self._open_door(deployment.bus, log)
            except ConfigError:
                self.close()
                raise

    def stop(self) -> None:
        """End what runs and tell every peer; `wait` returns when that is done."""
        self._stop_asked = True
        self._carry_out(self._orchestrator.stop(0.0, time.monotonic()))

    async def wait(self) -> None:
        """Until a stop that `stop` asked for is over. Raises what broke it."""
        await self._stopped

    def close(self) -> None:
        """Release the socket, after the last events are out or LINGER_MS have passed."""
        for handle in (self._timer, self._arming, self._probe):
            if handle is not None:
                handle.cancel()
        self._pump.close()
        self._monitor_pump.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        if self._door is not None:
            self._door.close()
        self._context.term()
        if self._endpoint.startswith("ipc://"):  # ZeroMQ leaves the file
            pathlib.Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _open_door(self, bus: BusConfig, log: Callable[[str], None]) -> RemoteDoor:
        directory = pathlib.Path(bus.keys)
        return RemoteDoor(
            self._context,
            bus.listen,
            server_pair(directory),
            KnownKeys(directory),
            on_message=self._on_remote_message,
            on_closed=self._connection_closed,
            log=log,
        )

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        if is_remote(frames[0].bytes):
            return  # a name that is for other hosts only; answers to it would not come here
        self._read(frames, wire.at_broker)

    def _on_remote_message(self, frames: list[zmq.Frame]) -> None:
        """A worker's events, or the question of one that is to come; nobody else has business at that door."""
        peer = frames[0].bytes
        if is_remote(peer):
            self._read(frames, wire.from_remote)

    def _read(self, frames: list[zmq.Frame], decode: wire.HeaderDecoder[Any]) -> None:
        peer = frames[0].bytes
        now = time.monotonic()
        try:
            if len(frames) < 2:
                raise ProtocolViolation("a message without a header")
            event = decode(frames[1].buffer)
        except ProtocolViolation as error:
            self._carry_out(self._orchestrator.malformed(peer, error, now))
        else:
            self._carry_out(self._orchestrator.handle(peer, event, frames[2:], now))

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        if not self._stopped.done():
            self._stopped.set_exception(error)

    def _on_disconnected(self, frames: list[zmq.Frame]) -> None:
        self._connection_closed()

    def _connection_closed(self) -> None:
        if self._probe is None:
            self._probe = self._loop.call_later(PROBE_S, self._send_probe)

    def _send_probe(self) -> None:
        self._probe = None
        self._carry_out(self._orchestrator.probe())

    def _carry_out(self, messages: Iterable[Message]) -> None:
        """Send what the orchestrator decided; a peer that is gone makes it decide more."""
        waiting = deque(messages)
        while waiting:
            peer, event, frames = waiting.popleft()
            try:
                way = self._door if self._door is not None and is_remote(peer) else self._pump
                way.send([peer, wire.encode(event), *frames])
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                waiting.extend(self._orchestrator.unreachable(peer, time.monotonic()))
        if self._orchestrator.stopped and self._stop_asked and not self._stopped.done():
            self._stopped.set_result(None)
        version = self._orchestrator.clock_version
        if self._arming is None and (self._timer is None or version != self._clock_version):
            self._clock_version = version
            self._arming = self._loop.call_soon(self._arm)

    def _arm(self) -> None:
        """Have the clock looked at when something is due. A timer that is too early does no harm: it arms the next one."""
        self._arming = None
        due = self._orchestrator.next_tick()
        if due is None:
            return
        delay = min(max(0.0, due - time.monotonic()), MAX_SLEEP_S) + 0.001  # the loop's clock counts milliseconds
        if self._timer is not None:
            if self._timer.when() <= self._loop.time() + delay:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._orchestrator.tick(time.monotonic()))
