"""The worker: the stages of one process, from Register to Shutdown, and which stage each event is for."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

from omni_bus import events, memory, wire
from omni_bus.connectors.base import Frame
from omni_bus.connectors.select import Connectors
from omni_bus.deployment import Deployment
from omni_bus.errors import ProtocolViolation
from omni_bus.segments import boot_id
from omni_bus.spec import PipelineSpec
from omni_bus.stages.contract import StageContext
from omni_bus.workers.devices import device_of
from omni_bus.workers.host import StageHost
from omni_bus.workers.outgoing import Outgoing, Send

_log = logging.getLogger(__name__)
PROGRESS_S = 0.1  # between two progress events of one stage


class Worker:
    """Hosts the stages that the deployment gives to the process of this name."""

    def __init__(self, name: str, deployment: Deployment, pipeline: PipelineSpec, connectors: Connectors, send: Send) -> None:
        self.name = name
        self._deployment = deployment
        self._pipeline = pipeline
        self._connectors = connectors
        self._send = send
        self._outgoing = Outgoing(connectors, send)
        self._hosts: dict[str, StageHost] = {}
        self._shut_down = False
        self._target = {edge.name: edge.target for edge in pipeline.edges}
        self._source = {edge.name: edge.source for edge in pipeline.edges}
        replica = int(name.rsplit(".", 1)[1])
        self._devices = {stage: device_of(deployment, stage, replica) for stage in deployment.workers()[name]}

    # ---- start

    def register(self) -> None:
        replicas = tuple(
            events.StageReplica(stage, device, self._deployment.stages[stage].max_batch)
            for stage, device in self._devices.items()
        )
        self._send(
            events.Register(worker=self.name, pid=os.getpid(), host=socket.gethostname(), boot=boot_id(), replicas=replicas), ()
        )

    def load(self) -> None:
        """Load every stage. Raises CheckpointError or DeviceUnavailable; any other error of a stage's load ends the process as well."""
        shares = memory.plan(self._deployment, self._pipeline)
        for name, device in self._devices.items():
            config = self._deployment.stages[name]
            share = shares.share(self.name, name)
            stage = self._pipeline.stage(name).factory()
            stage.load(
                StageContext(
                    stage=name,
                    pipeline=self._pipeline,
                    model_path=self._deployment.model.path,
                    device=device,
                    config=config,
                    edges=self._deployment.edges,
                    progress=self._progress(name),
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

    # ---- driven by the engine loop

    @property
    def leaving(self) -> bool:
        return self._shut_down

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
        self.register()
        for stage in self._hosts:
            self._ready(stage)

    def has_work(self) -> bool:
        return any(host.has_work() for host in self._hosts.values())

    def wake_at(self) -> float | None:
        return min((wake for host in self._hosts.values() if (wake := host.wake_at()) is not None), default=None)

    def step(self) -> None:
        for host in self._hosts.values():
            if host.has_work():
                host.step()
        # Again while it changes something: a request that fails on the way gives its room back.
        while results := self._outgoing.retry():
            for (request, edge), error in results.items():
                self._hosts[self._source[edge]].room_found(request, error)

    def heartbeat(self) -> None:
        self._connectors.prune()
        self._send(events.Heartbeat(tuple(host.load() for host in self._hosts.values())), ())

    # ---- inside

    def _dispatch(self, event: events.Event, payload: Sequence[Frame]) -> None:
        match event:
            case events.Open():
                self._host(event.stage).open(event)
            case events.Chunk():
                self._host(self._target.get(event.edge)).chunk(event, payload)
            case events.Consumed():
                self._host(self._source.get(event.edge)).consumed(event)
            case events.Close():
                self._host(event.stage).close(event)
            case events.Cancel():
                self._host(event.stage).cancel(event)
            case events.Drain():
                pass  # what is open goes on; the broker sends Shutdown once it has ended
            case events.Shutdown():
                self._shut_down = True

    def _host(self, stage: str | None) -> StageHost:
        host = self._hosts.get(stage or "")
        if host is None:
            raise ProtocolViolation(f"an event for a stage that is not here ({stage})")
        return host

    def _ready(self, stage: str) -> None:
        self._send(events.Ready(stage, self._deployment.stages[stage].max_batch), ())

    def _progress(self, stage: str) -> Callable[[float, str], None]:
        last_sent = 0.0

        def progress(fraction: float, detail: str) -> None:
            nonlocal last_sent
            now = time.monotonic()
            if fraction >= 1 or now - last_sent >= PROGRESS_S:
                last_sent = now
                self._send(events.Load(stage, min(max(fraction, 0.0), 1.0), detail), ())

        return progress
