"""The life of requests: admission, binding, retry, cancel, failure, the one end. No I/O, no clock.

A request ends once for its client and is forgotten once every stage has let go of it. What comes for it afterwards is counted
and dropped; a tensor that comes with it is handed back to its producer.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

from omni_bus import events
from omni_bus.binding import Binder
from omni_bus.deployment import Deployment
from omni_bus.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoReadyReplica,
    OmniBusError,
    Overloaded,
    ProtocolViolation,
    ReplicaLost,
    from_info,
)
from omni_bus.flow import Flow, Send
from omni_bus.registry import ReplicaState, Worker
from omni_bus.request import Frames, InputChunk, Request, RequestState, change_state
from omni_bus.request_table import RequestTable
from omni_bus.spec import PipelineSpec


class Lifecycle:
    """Handlers for everything that changes a request; what is to be sent goes to `send`, one line per ended request to `log`."""

    def __init__(
        self, pipeline: PipelineSpec, deployment: Deployment, binder: Binder, send: Send, log: Callable[[str], None]
    ) -> None:
        self._pipeline = pipeline
        self._bus = deployment.bus
        self._binder = binder
        self._send = send
        self._log = log
        self._last_id = secrets.randbits(62)
        self.table = RequestTable()
        self.flow = Flow(pipeline, self.table, send)
        self.late = 0  # events for requests that had ended

    # ---- from clients

    def submit(self, client: bytes, event: events.Submit, frames: Frames, now: float) -> None:
        """Admit a request and start it, or tell the client why not."""
        try:
            self._admit(event)
            chunk = InputChunk.checked(event.refs, event.last, frames)
        except OmniBusError as error:
            self.refuse(client, event.ticket, error)
            return
        request = self._new(client, event, now, now + event.deadline_s, self._bus.retries)
        self.table.add(request)
        if missing := self._bind(request, now):
            self._fail(request, NoReadyReplica(f"no replica of stage {missing!r} is ready"), now)
        else:
            self.flow.input(request, 0, chunk)

    def refuse(self, client: bytes, ticket: int, error: OmniBusError) -> None:
        self.table.count(f"failed:{error.code}")
        self._send(client, events.RequestFailed(ticket, error.info()), ())

    def append(self, client: bytes, event: events.Append, frames: Frames, now: float) -> None:
        request = self._of_client(client, event.ticket)
        if request is None:
            return
        try:
            self.flow.input(request, event.seq, InputChunk.checked(event.refs, event.last, frames))
        except OmniBusError as error:
            self._fail(request, error, now)

    def cancel_ticket(self, client: bytes, ticket: int, now: float) -> None:
        """A cancel by the client; of a ticket that has ended, or is being cancelled already, it says nothing new."""
        request = self._of_client(client, ticket)
        if request is not None:
            self._cancel(request, now)

    def consumed_by_client(self, client: bytes, event: events.Consumed, now: float) -> None:
        request = self._of_client(client, event.request)
        if request is None:
            return
        try:
            self.flow.consumed_by_client(request, event)
        except ProtocolViolation as error:
            self._fail(request, error, now)

    def fail_ticket(self, client: bytes, ticket: int, error: OmniBusError, now: float) -> None:
        request = self._of_client(client, ticket)
        if request is not None:
            self._fail(request, error, now)

    def fail_client(self, client: bytes, error: OmniBusError, now: float) -> None:
        for request in self.table.all_of_client(client):
            self._fail(request, error, now)

    def client_gone(self, client: bytes, now: float) -> None:
        """Cancel all of one client's requests; there is nobody to tell."""
        for request in self.table.all_of_client(client):
            self.table.leave_client(request)
            self._cancel(request, now)

    # ---- from workers

    def chunk(self, worker: Worker, event: events.Chunk, frames: Frames, now: float) -> None:
        request = self._running(event.request)
        if request is None:
            if self.table.get(event.request) is None:
                self.flow.late_chunk(worker, event)
            return  # of a request that is letting go, the Cancel under way frees the tensors
        try:
            self.flow.chunk(request, worker, event, frames, now)
        except OmniBusError as error:
            self._blame(request, worker, error, now)

    def consumed(self, worker: Worker, event: events.Consumed, now: float) -> None:
        request = self._running(event.request)
        if request is None:
            return
        try:
            self.flow.consumed(request, worker, event)
        except OmniBusError as error:
            self._blame(request, worker, error, now)

    def done(self, worker: Worker, event: events.Done, now: float) -> None:
        """A stage has finished. What it left unread is handed back; the last stage's Done completes the request."""
        request = self._running(event.request)
        if request is None:
            return
        stage = event.stage
        try:
            replica = request.replica(stage, worker)
            if stage in request.done:
                raise ProtocolViolation(f"stage {stage!r} was done already")
            if still_open := [edge.name for edge in request.outputs(stage) if not edge.closed]:
                raise ProtocolViolation(f"stage {stage!r} was done before its last chunk on {', '.join(still_open)}")
        except OmniBusError as error:
            self._blame(request, worker, error, now)
            return
        replica.outstanding -= 1
        request.done.add(stage)
        request.usage[stage] = event.usage
        self.flow.hand_back_unread(request, stage)
        if len(request.done) == len(request.stages):
            self._complete(request, now)

    def failed(self, worker: Worker, event: events.Failed, now: float) -> None:
        request = self._running(event.request)
        if request is None:
            return
        try:
            request.replica(event.stage, worker)
        except ProtocolViolation as error:
            self._blame(request, worker, error, now)
        else:
            self._fail(request, from_info(event.error), now)

    def cancelled(self, worker: Worker, event: events.Cancelled, now: float) -> None:
        request = self.table.get(event.request)
        if request is None:
            self.late += 1
            return
        try:
            request.replica(event.stage, worker)
            if request.state is RequestState.RUNNING:
                raise ProtocolViolation(f"stage {event.stage!r} acknowledged a cancel that nobody asked for")
        except ProtocolViolation as error:
            self._blame(request, worker, error, now)
            return
        request.unacknowledged.discard(event.stage)
        self._settle(request, now)

    # ---- from the registry, the clock and the supervisor

    def worker_lost(self, worker: Worker, now: float) -> None:
        """Run again what can be, fail the rest; what waited only for this worker's acknowledgement is free."""
        for number in sorted(worker.requests):
            request = self.table.get(number)
            assert request is not None
            lost = {stage for stage, replica in request.bindings.items() if replica.worker is worker}
            request.unacknowledged -= lost
            if request.state is not RequestState.RUNNING:
                self._settle(request, now)
            elif not any(request.needs(stage) for stage in lost):
                continue
            elif request.retries > 0 and request.kept is not None:
                self._retry(request, now)
            else:
                self._fail(request, ReplicaLost(f"the process that ran stage {min(lost)!r} ended"), now)

    def bind_queued(self, now: float) -> None:
        """Start what waits, after a replica became ready."""
        for request in self.table.queued():
            if self._bind(request, now) is None:
                self.flow.replay(request)

    def alarm(self, now: float) -> set[bytes]:
        """Fail what is past its deadline. Returns the workers that owe an acknowledgement for too long."""
        overdue: set[bytes] = set()
        while (request := self.table.pop_alarm(now)) is not None:
            if request.unacknowledged:
                overdue |= {request.bindings[stage].worker.peer for stage in request.unacknowledged}
            else:
                self._fail(request, DeadlineExceeded(f"not finished within {request.deadline - request.arrived:.3g} s"), now)
        return overdue

    def fail_all(self, error: OmniBusError, now: float) -> None:
        for request in self.table.all():
            self._fail(request, error, now)

    # ---- one request

    def _admit(self, event: events.Submit) -> None:
        if len(self.table) >= self._bus.max_requests:
            raise Overloaded(f"{len(self.table)} requests are in flight; try again later")
        outputs = self._pipeline.asked_modalities
        if not event.options.modalities or not outputs.issuperset(event.options.modalities):
            raise InvalidRequest(f"modalities must be some of {', '.join(sorted(outputs))}", param="modalities")
        if not 0 < event.deadline_s < math.inf:
            raise InvalidRequest("the deadline must be a positive number of seconds", param="deadline_s")

    def _new(self, client: bytes, what: events.Submit | Request, now: float, deadline: float, retries: int) -> Request:
        self._last_id += 1
        edges = self._binder.edges(what.options.modalities)
        return Request(
            id=self._last_id,
            client=client,
            ticket=what.ticket,
            label=what.label,
            options=what.options,
            stages=tuple(stage.name for stage in self._pipeline.active_stages(what.options.modalities)),
            edges=edges,
            entry=edges[self._pipeline.entry.name],
            arrived=now,
            deadline=deadline,
            retries=retries,
            kept=[] if retries else None,
        )

    def _bind(self, request: Request, now: float) -> str | None:
        """Bind a replica of every stage and open the request there. Returns the stage that has none, and leaves it queued."""
        bindings = self._binder.choose(request)
        if isinstance(bindings, str):
            return bindings
        change_state(request, RequestState.RUNNING)
        request.bindings = bindings
        bindings[request.entry.target].unread += request.entry.unconsumed  # of a retry: its input is sent anew
        for stage, replica in bindings.items():
            replica.outstanding += 1
            replica.worker.requests.add(request.id)
            self._send(replica.worker.peer, self._binder.open(request, stage, now), ())
        return None

    def _complete(self, request: Request, now: float) -> None:
        for stage, replica in request.bindings.items():
            self.flow.tell(replica, events.Close(request.id, stage))
        client = self._decide(request, "done")
        if client is not None:
            self._send(client, events.Completed(request.ticket, request.usage, request.first_chunks), ())
        self._end(request, now)

    def _fail(self, request: Request, error: OmniBusError, now: float) -> None:
        """Tell the client at once, then have every stage let go. A request that is letting go already has its end."""
        if request.state not in (RequestState.QUEUED, RequestState.RUNNING):
            return
        client = self._decide(request, f"failed:{error.code}")
        if client is not None:
            self._send(client, events.RequestFailed(request.ticket, error.info()), ())
        self._let_go(request, RequestState.FAILING, now)

    def _cancel(self, request: Request, now: float) -> None:
        if request.state in (RequestState.QUEUED, RequestState.RUNNING):
            self._let_go(request, RequestState.CANCELLING, now)

    def _retry(self, request: Request, now: float) -> None:
        """The same ticket under a new id; the old attempt stays until its other stages have let go."""
        client = self._decide(request, "retried")
        assert client is not None and request.kept is not None
        again = self._new(client, request, request.arrived, request.deadline, request.retries - 1)
        again.kept, request.kept = request.kept, None
        again.entry.resume(request.entry)
        self.table.add(again)
        self._let_go(request, RequestState.FAILING, now)
        if self._bind(again, now) is None:
            self.flow.replay(again)

    def _let_go(self, request: Request, state: RequestState, now: float) -> None:
        """Ask every bound stage to free what it holds; `_settle` ends the request when all have answered."""
        self.table.forget_input(request)
        if request.state is RequestState.RUNNING:
            change_state(request, state)
            for stage, replica in request.bindings.items():
                if self.flow.tell(replica, events.Cancel(request.id, stage)):
                    request.unacknowledged.add(stage)
            self.table.set_alarm(request, now + self._bus.loop_silence_s)
        self._settle(request, now)

    def _settle(self, request: Request, now: float) -> None:
        if request.unacknowledged:
            return
        if not request.outcome:
            client = self._decide(request, "cancelled")
            if client is not None:
                self._send(client, events.RequestCancelled(request.ticket), ())
        self._end(request, now)

    def _decide(self, request: Request, outcome: str) -> bytes | None:
        """The request's end for its client: returns who is to be told. From here on nothing is sent for this ticket."""
        assert not request.outcome, "a request has one end"
        request.outcome = outcome
        if outcome != "retried":
            self.table.count(outcome)
        return self.table.leave_client(request)

    def _end(self, request: Request, now: float) -> None:
        change_state(request, RequestState.ENDED)
        self.table.remove(request)
        for stage, replica in request.bindings.items():
            replica.worker.requests.discard(request.id)
            if replica.state is ReplicaState.LOST:
                continue
            replica.unread -= sum(edge.unconsumed for edge in request.inputs(stage))
            if stage not in request.done:
                replica.outstanding -= 1
        first = "-" if request.first_output is None else f"{request.first_output - request.arrived:.3f}"
        label = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in request.label[:64])
        self._log(f"request {request.id} label={label} {request.outcome} first_output_s={first} s={now - request.arrived:.3f}")

    def _of_client(self, client: bytes, ticket: int) -> Request | None:
        """The client's request, unless it has ended or is being cancelled: then what came is late."""
        request = self.table.of_client(client, ticket)
        if request is None or request.state is RequestState.CANCELLING:
            self.late += 1
            return None
        return request

    def _running(self, number: int) -> Request | None:
        request = self.table.get(number)
        if request is None or request.state is not RequestState.RUNNING:
            self.late += 1
            return None
        return request

    def _blame(self, request: Request, worker: Worker, error: OmniBusError, now: float) -> None:
        """A worker broke a rule in a request: the request fails if the worker takes part in it; a stranger cannot harm it."""
        if any(replica.worker is worker for replica in request.bindings.values()):
            self._fail(request, error, now)
        else:
            self._log(f"worker {worker.name} meddled with request {request.id}, which it does not hold: {error.message}")
