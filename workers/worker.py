"""The worker: the stages of one engine loop, from Register to Shutdown, and which stage each event is for."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

from omni_bus import __version__, events, memory, wire
from omni_bus.connectors.base import Frame
from omni_bus.connectors.select import Connectors
from omni_bus.deployment import Deployment
from omni_bus.errors import ErrorInfo, ProtocolViolation
from omni_bus.segments import boot_id
from omni_bus.spec import PipelineSpec
from omni_bus.stages.contract import StageContext
from omni_bus.workers.arrivals import Arrivals
from omni_bus.workers.devices import device_of
from omni_bus.workers.host import StageHost
from omni_bus.workers.load_news import LoadNews
from omni_bus.workers.outgoing import Outgoing, Send

_log = logging.getLogger(__name__)
PROGRESS_S = 0.1  # between two progress events of one stage


class Worker:
    """Hosts the stages that the deployment gives to the worker of this name.

    On another host than the broker's it has another `name` there, and its `seat` is the name in the deployment. `server`: the id of
    the server that it attaches to.
    """

    def __init__(
        self,
        name: str,
        deployment: Deployment,
        pipeline: PipelineSpec,
        connectors: Connectors,
        send: Send,
        *,
        seat: str = "",
        server: str = "",
    ) -> None:
        self.name = name
        self.refused: ErrorInfo | None = None  # why the broker will not have it
        self._seat = seat or name
        self._server = server
        self._asked_to_leave = False
        self.dismissed = False  # an operator took it away: it is not to come back
        self.drained = False  # it is given nothing new; the end that follows was meant
        self._deployment = deployment
        self._pipeline = pipeline
        self._connectors = connectors
        self._send = send
        self._outgoing = Outgoing(connectors, send)
        self._hosts: dict[str, StageHost] = {}
        self._load_news = LoadNews()
        self._arrivals = Arrivals(connectors, self._deliver)
        self._shut_down = False
        self._target = {edge.name: edge.target for edge in pipeline.edges}
        self._source = {edge.name: edge.source for edge in pipeline.edges}
        self._inputs = {
            stage.name: [edge.name for edge in pipeline.edges if edge.target == stage.name] for stage in pipeline.stages
        }
        replica = int(self._seat.rsplit(".", 1)[1])
        self._devices = {stage: device_of(deployment, stage, replica) for stage in deployment.workers()[self._seat]}

    # ---- start

    def register(self) -> None:
        replicas = tuple(
            events.StageReplica(stage, device, self._deployment.stages[stage].max_batch)
            for stage, device in self._devices.items()
        )
        self._send(
            events.Register(
                worker=self.name,
                pid=os.getpid(),
                host=socket.gethostname(),
                boot=boot_id(),
                replicas=replicas,
                version=__version__,
                pipeline=self._pipeline.name,
                server=self._server,
                data=self._connectors.tcp.endpoint,
            ),
            (),
        )

    def load(self, got_further: Callable[[], None] = lambda: None) -> None:
        """Load every stage; `got_further` is called at every sign of progress. Raises CheckpointError or DeviceUnavailable; any other error
        of a stage's load ends the process as well."""
        shares = memory.plan(self._deployment, self._pipeline)
        for name, device in self._devices.items():
            config = self._deployment.stages[name]
            share = shares.share(self._seat, name)
            stage = self._pipeline.stage(name).factory()
            stage.load(
                StageContext(
                    stage=name,
                    pipeline=self._pipeline,
                    model_path=self._deployment.model.path,
                    device=device,
                    config=config,
                    edges=self._deployment.edges,
                    progress=self._progress(name, got_further),
                    state_bytes=None if share is None else share.state,
                )
            )
            self._hosts[name] = StageHost(
                name,
                stage,
                pipeline=self._pipeline,
                sampling=config.sampling,
                connectors=self._connectors,
                outgoing=self._outgoing,
                send=self._send,
            )
            for edge in self._pipeline.edges:
                if name in (edge.source, edge.target):
                    connector = self._deployment.edges[edge.name].connector
                    self._connectors.prepare(connector, device, sends=edge.source == name)
            self._ready(name)
            got_further()

    # ---- driven by the engine loop

    @property
    def leaving(self) -> bool:
        return self._shut_down

    def leave(self) -> None:
        """Ask the broker for the end: it sends Shutdown when all that is here has finished, and nothing new until then."""
        if not self._asked_to_leave:
            self._asked_to_leave = self.drained = True
            self._send(events.Leave(), ())

    def message(self, frames: list[bytes]) -> None:
        """One message of the broker. What cannot be read, or names nothing that is here, is logged: it fails no request we know."""
        try:
            event = wire.at_worker(frames[0])
            self._dispatch(event, frames[1:])
        except ProtocolViolation as error:
            _log.error("%s: from the broker: %s", self.name, error.message)

    def broker_lost(self) -> None:
        """A new broker knows none of the old one's requests."""
        _log.warning("%s: the broker is gone; waiting for the next one", self.name)
        for host in self._hosts.values():
            host.forget_all()
        self._arrivals.forget_all()
        self.dismissed, self.drained = False, self._asked_to_leave
        if self._asked_to_leave:
            self._shut_down = True  # nothing is left here to finish
            return
        self.register()
        for stage in self._hosts:
            self._ready(stage)

    def has_work(self) -> bool:
        return any(host.has_work() for host in self._hosts.values())

    def wake_at(self) -> float | None:
        wakes = (self._arrivals.wake_at(), *(host.wake_at() for host in self._hosts.values()))
        return min((wake for wake in wakes if wake is not None), default=None)

    def step(self) -> None:
        self._connectors.tcp.receive()
        self._arrivals.advance()
        for host in self._hosts.values():
            if host.has_work():
                host.step()

    def send(self) -> None:
        for host in self._hosts.values():
            host.send()
        # Again while it changes something: a request that fails on the way gives its room back.
        while results := self._outgoing.retry():
            for (request, edge), error in results.items():
                self._hosts[self._source[edge]].room_found(request, error)

    def heartbeat(self) -> None:
        self._connectors.prune()
        self._outgoing.look_again()
        self._tell(tuple(host.load() for host in self._hosts.values()))

    def tell_load(self) -> None:
        """The load, if it has changed so much that the broker should know of it before the next heartbeat."""
        loads = tuple(host.load() for host in self._hosts.values())
        if self._load_news.is_news(loads):
            self._tell(loads)

    # ---- inside

    def _tell(self, loads: tuple[events.StageLoad, ...]) -> None:
        self._load_news.told(loads)
        self._send(events.Heartbeat(loads), ())

    def _dispatch(self, event: events.Event, payload: Sequence[Frame]) -> None:
        match event:
            case events.Open():
                self._host(event.stage).open(event)
            case events.Chunk():
                self._host(self._target.get(event.edge))
                self._arrivals.chunk(event, payload)
            case events.Consumed():
                self._host(self._source.get(event.edge)).consumed(event)
            case events.Close():
                self._arrivals.forget(event.request, self._inputs.get(event.stage, ()))
                self._host(event.stage).close(event)
            case events.Cancel():
                self._arrivals.forget(event.request, self._inputs.get(event.stage, ()))
                self._host(event.stage).cancel(event)
            case events.Drain():
                self.drained = True
                self.dismissed |= event.for_good  # what is open goes on; the broker sends Shutdown once it has ended
            case events.Shutdown():
                self._shut_down = True
            case events.Refused():
                self.refused = event.error
                self._shut_down = True
            case events.Ping():
                pass

    def _deliver(self, event: events.Chunk, payload: Sequence[Frame]) -> None:
        self._host(self._target.get(event.edge)).chunk(event, payload)

    def _host(self, stage: str | None) -> StageHost:
        host = self._hosts.get(stage or "")
        if host is None:
            raise ProtocolViolation(f"an event for a stage that is not here ({stage})")
        return host

    def _ready(self, stage: str) -> None:
        self._send(events.Ready(stage, self._deployment.stages[stage].max_batch), ())

    def _progress(self, stage: str, got_further: Callable[[], None]) -> Callable[[float, str], None]:
        last_sent = 0.0

        def progress(fraction: float, detail: str) -> None:
            nonlocal last_sent
            got_further()
            now = time.monotonic()
            if fraction >= 1 or now - last_sent >= PROGRESS_S:
                last_sent = now
                self._send(events.Load(stage, min(max(fraction, 0.0), 1.0), detail), ())

        return progress
