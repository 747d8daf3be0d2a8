"""Who may say what to the broker, and what it answers: peers, the registry's changes, status, the clock, the stop. Sans I/O.

`handle` takes one event of one peer, `tick` the passing of time; both return what is to be sent. A peer that breaks a rule
outside any request hurts itself only: a worker is taken as lost, a client's requests fail. So does a fault of our own: what meets it in
an event is the event's request, or else the peer. Where that cannot be ended either, the exception goes on and ends the process.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Callable
from typing import TypeAlias

from omni_bus import events
from omni_bus.attach import Reception
from omni_bus.binding import Binder
from omni_bus.deployment import Deployment
from omni_bus.drains import Drains
from omni_bus.errors import OmniBusError, OutOfMemory, Overloaded, ProtocolViolation, RateLimited, ShuttingDown
from omni_bus.keys import ServerSecrets
from omni_bus.leases import Leases
from omni_bus.lifecycle import Lifecycle
from omni_bus.registry import Registry, Worker
from omni_bus.request import Frames
from omni_bus.spec import PipelineSpec

STRANGERS = 1000  # lines about peers that nobody knows; whoever sends garbage does not fill the log
ACKNOWLEDGE_S = 1.0  # that a stop waits for the last cancels to be acknowledged

_OF_A_REQUEST = (events.Chunk, events.Consumed, events.Done, events.Failed, events.Cancelled)  # what a worker says of one

Message: TypeAlias = tuple[bytes, events.Event, Frames]  # peer, event, payload frames


@dataclasses.dataclass(slots=True)
class Client:
    role: str
    last_ticket: int = 0  # tickets of one client rise, so that one that was used before is noticed without being kept
    watch: int | None = None  # the query that asked to be told of every change


class Orchestrator:
    def __init__(
        self,
        pipeline: PipelineSpec,
        deployment: Deployment,
        *,
        log: Callable[[str], None],
        now: float,
        secrets: ServerSecrets | None = None,
    ) -> None:
        """`secrets`: what workers on other hosts are told; None: none of them may attach."""
        self._pipeline = pipeline
        self._reception = Reception(pipeline, deployment, secrets)
        self._drain_s = deployment.bus.drain_s
        self._loop_silence_s = deployment.bus.loop_silence_s
        self._log = log
        self._started = now
        self._out: list[Message] = []
        self._clients: dict[bytes, Client] = {}
        self.registry = Registry(deployment)
        self._binder = Binder(pipeline, deployment, self.registry)
        self.lifecycle = Lifecycle(pipeline, deployment, self._binder, self._send, log, now)
        self._leases = Leases(deployment.api)
        self._changed = False  # a replica's state, since the watchers were last told
        self._clock_changes = 0
        self._drains = Drains()
        self._strangers = 0  # lines about them
        self._stop_at: float | None = None
        self._cut_off = False  # the grace of a stop is over
        self.stopped = False  # every peer has been sent Shutdown

    # ---- what the broker calls

    def handle(self, peer: bytes, event: events.Event, frames: Frames, now: float) -> list[Message]:
        """One event of one peer."""
        worker = self.registry.get(peer)
        try:
            if isinstance(event, events.Attach):
                self._send(peer, self._reception.attach(event), ())
            elif isinstance(event, events.Register):
                self._register(peer, event, now)
            elif isinstance(event, events.Hello):
                self._hello(peer, event)
            elif worker is not None:
                self._from_worker(worker, event, frames, now)
            else:
                self._from_client(peer, event, frames, now)
        except ProtocolViolation as error:
            self._violated(peer, error, now)
        except Exception as error:
            self._fault(peer, event, error, now)
        return self._flush(now)

    def malformed(self, peer: bytes, error: ProtocolViolation, now: float) -> list[Message]:
        """A message of `peer` that could not be read."""
        self._violated(peer, error, now)
        return self._flush(now)

    def unreachable(self, peer: bytes, now: float) -> list[Message]:
        """A send to `peer` found that its connection is gone."""
        worker = self.registry.get(peer)
        if worker is not None:
            self._lose(worker, "its connection is gone", now)
        elif self._clients.pop(peer, None) is not None:
            self._leases.release_all(peer)
            self.lifecycle.client_gone(peer, now)
        return self._flush(now)

    def probe(self) -> list[Message]:
        """Some connection closed; find out whose by sending to every client and worker."""
        clients = [peer for peer, client in self._clients.items() if client.role == "client"]
        workers = [worker.peer for worker in self.registry if worker.attached]
        return [(peer, events.Ping(), ()) for peer in (*clients, *workers)]

    def tick(self, now: float) -> list[Message]:
        """Do what the clock demands. To be called at `next_tick`, or at any other time."""
        for peer in self.lifecycle.alarm(now):
            if (worker := self.registry.get(peer)) is not None:
                self._lose(worker, "it did not acknowledge a cancel", now, farewell=True)
        for worker in [worker for worker in self.registry if worker.silent(now, self._loop_silence_s)]:
            self._lose(worker, "no heartbeat", now, farewell=True)
        return self._flush(now)

    def next_tick(self) -> float | None:
        """When `tick` next has something to do, if nothing else happens."""
        lost_at = self.registry.silent_at(self._loop_silence_s)
        times = (self.lifecycle.table.next_alarm(), lost_at, self._drains.next(), self._stop_at)
        return min((time for time in times if time is not None and time < math.inf), default=None)

    @property
    def clock_version(self) -> int:
        """Changes whenever `next_tick` may have become earlier."""
        return self.lifecycle.table.alarms_set + self._clock_changes

    def stop(self, grace_s: float, now: float) -> list[Message]:
        """Refuse new requests, give the running ones `grace_s` seconds, fail the rest, then send Shutdown to all."""
        self._stop(grace_s, now)
        return self._flush(now)

    # ---- clients and the supervisor

    def _hello(self, peer: bytes, event: events.Hello) -> None:
        if event.protocol != events.PROTOCOL or event.role not in ("client", "supervisor") or peer in self._clients:
            raise ProtocolViolation("a greeting with another protocol, an unknown role, or a second one")
        if self.registry.get(peer) is not None:
            raise ProtocolViolation("a worker cannot be a client")
        self._clients[peer] = Client(event.role)
        if event.role == "client":
            self._send(peer, events.Welcome(self._binder.client_credits()), ())

    def _from_client(self, peer: bytes, event: events.Event, frames: Frames, now: float) -> None:
        client = self._clients.get(peer)
        if client is None:
            self._stranger(peer, event)
            return
        match event:
            case events.Submit():
                self._submit(peer, client, event, frames, now)
            case events.Append():
                self.lifecycle.append(peer, event, frames, now)
            case events.Consumed():
                self.lifecycle.consumed_by_client(peer, event, now)
            case events.CancelRequest():
                self.lifecycle.cancel_ticket(peer, event.ticket, now)
            case events.Lease():
                self._lease(peer, event)
            case events.Release():
                self._leases.release(peer, event.lease)
            case events.StatusQuery():
                client.watch = event.query if event.watch else client.watch
                self._send(peer, self._status(event.query, now), ())
            case events.Exited() if client.role == "supervisor":
                worker = self.registry.get(event.worker.encode())
                if worker is not None:
                    self._lose(worker, "its process ended", now)
            case events.Expect() if client.role == "supervisor":
                self.registry.expect(event)
                self._changed = True
            case events.DrainWorker() if client.role == "supervisor":
                worker = self.registry.get(event.worker.encode())
                if worker is not None:
                    self._drain(worker, event.grace_s, now, for_good=True)
            case events.StopServing() if client.role == "supervisor":
                self._stop(event.grace_s, now)
            case _:
                raise ProtocolViolation(f"{type(event).__name__} is not for a {client.role} to send")

    def _submit(self, peer: bytes, client: Client, event: events.Submit, frames: Frames, now: float) -> None:
        if event.ticket <= client.last_ticket:
            self.lifecycle.fail_ticket(peer, event.ticket, ProtocolViolation("the ticket was used before"), now)
        elif self._stop_at is not None:
            client.last_ticket = event.ticket
            self.lifecycle.refuse(peer, event.ticket, ShuttingDown("the server is shutting down"))
        else:
            client.last_ticket = event.ticket
            self.lifecycle.submit(peer, event, frames, now)

    def _lease(self, peer: bytes, event: events.Lease) -> None:
        try:
            self._leases.take(peer, event)
        except (RateLimited, Overloaded) as error:
            self._send(peer, events.LeaseRefused(event.lease, error.info()), ())
        else:
            if not event.renewed:
                self._send(peer, events.Leased(event.lease), ())

    def _stranger(self, peer: bytes, event: events.Event) -> None:
        """Someone who did not introduce itself. A worker of an earlier broker will, as soon as it sees that its connection was cut."""
        self._log_stranger(f"{type(event).__name__} from a peer that did not introduce itself")
        if isinstance(event, events.Submit):
            error = ProtocolViolation("a request came before the greeting")
            self._send(peer, events.RequestFailed(event.ticket, error.info()), ())

    # ---- workers

    def _register(self, peer: bytes, event: events.Register, now: float) -> None:
        if peer in self._clients:
            raise ProtocolViolation("a client cannot be a worker")
        before = self.registry.get(peer)
        if before is not None and before.attached:
            self._lose(before, "it was started again", now)
        if self._stop_at is not None:
            self._send(peer, events.Shutdown(), ())
            return
        if (error := self._reception.refuse(event)) is not None:
            self._log(f"a worker is refused: {error.message}")
            self._send(peer, events.Refused(error), ())
            return
        try:
            worker = self.registry.register(peer, event, now)
        except ProtocolViolation:
            self._send(peer, events.Shutdown(), ())
            raise
        self._log(f"worker {worker.name} registered, pid {worker.pid}: {', '.join(worker.replicas)}")
        self._changed = True

    def _from_worker(self, worker: Worker, event: events.Event, frames: Frames, now: float) -> None:
        if not worker.attached:
            self._unattached(worker, event)
            return
        worker.heard = now
        match event:
            case events.Chunk():
                self.lifecycle.chunk(worker, event, frames, now)
            case events.Consumed():
                self.lifecycle.consumed(worker, event, now)
            case events.Done():
                self.lifecycle.done(worker, event, now)
            case events.Failed():
                self.lifecycle.failed(worker, event, now)
            case events.Cancelled():
                self.lifecycle.cancelled(worker, event, now)
            case events.Leave():
                self._drain(worker, self._drain_s, now)
            case events.Heartbeat():
                self.registry.heartbeat(worker, event.loads)
                self.lifecycle.observe(worker, event.loads, now)
            case events.Load():
                self._changed |= self.registry.load(worker, event)
            case events.Ready():
                if self.registry.ready(worker, event):
                    self._log(f"stage {event.stage} is ready on {worker.name}")
                    self._changed = True
                    self.lifecycle.replica_ready()
            case _:
                raise ProtocolViolation(f"{type(event).__name__} is not for a worker to send")

    def _unattached(self, worker: Worker, event: events.Event) -> None:
        """Of a lost worker these are its last words. One that never registered here was an earlier broker's: it has to start anew."""
        if worker.lost:
            self.lifecycle.late += 1
        else:
            self._stranger(worker.peer, event)

    def _lose(self, worker: Worker, why: str, now: float, *, farewell: bool = False) -> None:
        """`farewell`: the process may still be there, and must not go on with what is taken from it."""
        if worker.lost:
            return
        self._log(f"worker {worker.name} is lost: {why}")
        self.registry.lose(worker)
        self._changed = True
        if farewell:
            self._send(worker.peer, events.Shutdown(), ())
        self.lifecycle.worker_lost(worker, now)

    def _drain(self, worker: Worker, grace_s: float, now: float, *, for_good: bool = False) -> None:
        self._log(f"worker {worker.name} is drained")
        self._changed = True
        self.registry.retire(worker)
        if not worker.attached:
            return
        self._send(worker.peer, events.Drain(for_good), ())
        if worker.loading:
            self._lose(worker, "it was drained before it had loaded", now, farewell=True)
            return
        self.registry.drain(worker)
        self._drains.begin(worker, now + grace_s)

    def _advance_drains(self, now: float) -> None:
        if not self._drains:
            return
        idle, late = self._drains.take_over(now)
        for worker in idle:
            if worker.attached:
                self._send(worker.peer, events.Shutdown(), ())
        for worker in late:
            self._lose(worker, "its requests outlived its drain", now, farewell=True)

    # ---- all of them

    def _violated(self, peer: bytes, error: OmniBusError, now: float) -> None:
        worker = self.registry.get(peer)
        if worker is not None:
            self._lose(worker, f"protocol violation: {error.message}", now, farewell=worker.attached)
        elif peer in self._clients:
            self._log(f"a client broke the protocol: {error.message}")
            self.lifecycle.fail_client(peer, error, now)
        else:
            self._log_stranger(f"a stranger broke the protocol: {error.message}")

    def _fault(self, peer: bytes, event: events.Event, error: Exception, now: float) -> None:
        """A fault of ours, or no memory, in the handling of `event`."""
        kind = type(event).__name__
        self._log(f"{kind} cannot be handled:\n{''.join(traceback.format_exception(error)).rstrip()}")
        said: OmniBusError = OmniBusError("the broker failed on this request; its log says why")
        if isinstance(error, MemoryError):
            said = OutOfMemory("the broker has no memory for this request")
        worker = self.registry.get(peer)
        if worker is not None and isinstance(event, _OF_A_REQUEST):
            self.lifecycle.fail_number(event.request, said, now)
        elif worker is not None:
            # What it said is lost: it may be ready, or idle, and would never be asked again.
            self._lose(worker, f"its {kind} could not be handled", now, farewell=True)
        elif peer in self._clients and isinstance(event, (events.Submit, events.Append, events.CancelRequest, events.Consumed)):
            ticket = event.request if isinstance(event, events.Consumed) else event.ticket
            self.lifecycle.fail_submitted(peer, ticket, said, now)
        elif isinstance(event, events.Lease):
            self._send(peer, events.LeaseRefused(event.lease, said.info()), ())

    def _log_stranger(self, line: str) -> None:
        if self._strangers < STRANGERS:
            self._strangers += 1
            self._log(line if self._strangers < STRANGERS else f"{line}; of strangers nothing more is said")

    def _stop(self, grace_s: float, now: float) -> None:
        if self.stopped:
            return
        if self._stop_at is not None:
            self._stop_at = min(self._stop_at, now + grace_s)
            return
        self._stop_at = now + grace_s
        self.lifecycle.refuse_waiting(ShuttingDown("the server is shutting down"), now)
        for worker in self.registry:
            if worker.attached:
                self.registry.drain(worker)
                self._send(worker.peer, events.Drain(), ())
        self._changed = True

    def _advance_stop(self, now: float) -> None:
        if self._stop_at is None or self.stopped:
            return
        self._clock_changes += 1
        if now >= self._stop_at and not self._cut_off:
            self._cut_off = True
            self._stop_at = now + ACKNOWLEDGE_S
            self.lifecycle.fail_all(ShuttingDown("the server is shutting down"), now)
        if len(self.lifecycle.table) == 0 or (self._cut_off and now >= self._stop_at):
            self.stopped = True
            self._stop_at = math.inf
            peers = [worker.peer for worker in self.registry if worker.attached]
            for peer in (*peers, *self._clients):
                self._send(peer, events.Shutdown(), ())

    def _status(self, query: int, now: float) -> events.Status:
        missing = self.registry.missing()
        admission, waiting = self.lifecycle.admission, self.lifecycle.waiting
        return events.Status(
            query=query,
            pipeline=self._pipeline.name,
            ready=not missing and self._stop_at is None,
            missing=missing,
            replicas=self.registry.statuses(lambda replica: (admission.streams(replica), admission.predicted_rtf(replica))),
            requests=self.lifecycle.table.states(),
            ended=dict(self.lifecycle.table.ended),
            stopping=self._stop_at is not None,
            waiting=waiting.by_priority(),
            retry_after_s=admission.retry_after_s(len(waiting), now),
            edge_chunks=dict(self.lifecycle.flow.edge_chunks),
            edge_bytes={f"{self._pipeline.entry.name}|inline": self.lifecycle.flow.input_bytes},
            uptime_s=now - self._started,
        )

    def _send(self, peer: bytes, event: events.Event, frames: Frames) -> None:
        self._out.append((peer, event, frames))

    def _flush(self, now: float) -> list[Message]:
        self.lifecycle.start_waiting(now)
        self._advance_drains(now)
        self._advance_stop(now)
        if self._changed:
            self._changed = False
            self._clock_changes += 1
            for peer, client in self._clients.items():
                if client.watch is not None:
                    self._send(peer, self._status(client.watch, now), ())
        out, self._out = self._out, []
        return out
