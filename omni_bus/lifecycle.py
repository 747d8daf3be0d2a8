"""The life of requests: waiting, start, retry, cancel, failure, the one end. No I/O, no clock.

A request ends once for its client and is forgotten once every stage has let go of it. What comes for it afterwards is counted
and dropped; a tensor that comes with it is handed back to its producer.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable

from omni_bus import events
from omni_bus.admission import Admission, is_speech
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
from omni_bus.payloads import AudioDelta
from omni_bus.registry import Replica, ReplicaState, Worker
from omni_bus.request import Frames, InputChunk, Request, RequestState, change_state
from omni_bus.request_table import RequestTable
from omni_bus.spec import PipelineSpec
from omni_bus.waiting import Waiting

_SPEECH, _TEXT = events.RequestOptions(modalities=("audio",)), events.RequestOptions(modalities=("text",))


class Lifecycle:
    """Handlers for everything that changes a request; what is to be sent goes to `send`, one line per ended request to `log`."""

    def __init__(
        self,
        pipeline: PipelineSpec,
        deployment: Deployment,
        binder: Binder,
        send: Send,
        log: Callable[[str], None],
        now: float,
    ) -> None:
        self._pipeline = pipeline
        self._bus = deployment.bus
        self._binder = binder
        self._send = send
        self._log = log
        self._last_id = secrets.randbits(62)
        self.table = RequestTable()
        self.flow = Flow(pipeline, self.table, send)
        self.admission = Admission(deployment.bus.admit_rtf, now)
        self.waiting = Waiting()
        self._audio = {edge.name for edge in pipeline.edges if edge.target == events.CLIENT and edge.payload is AudioDelta}
        self._held_by: dict[bool, str] = {}  # is_speech → the stage that had no room for the next one of them
        self._look = False  # something has changed since that may let a waiting request start
        self.late = 0  # events for requests that had ended

    # ---- from clients

    def submit(self, client: bytes, event: events.Submit, frames: Frames, now: float) -> None:
        """Start a request, or let it wait for its turn, or tell the client why not."""
        try:
            self._check(event)
            chunk = InputChunk.checked(event.refs, event.last, frames)
            request = self._new(client, event, now, now + event.deadline_s, self._bus.retries)
            bindings = self._turn(request, now)
        except OmniBusError as error:
            self.refuse(client, event.ticket, error)
            return
        self.table.add(request)
        if bindings is None:
            self.waiting.add(request)
        else:
            self._bind(request, bindings, now)
            if not request.retries:
                request.kept = None
        try:
            self.flow.input(request, 0, chunk)
        except OmniBusError as error:
            self._fail(request, error, now)

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

    def fail_submitted(self, client: bytes, ticket: int, error: OmniBusError, now: float) -> None:
        """Of a ticket that may not have become a request yet."""
        request = self.table.of_client(client, ticket)
        if request is None:
            self.refuse(client, ticket, error)
        else:
            self._fail(request, error, now)

    def fail_number(self, number: int, error: OmniBusError, now: float) -> None:
        """By the bus's own number, of a request that may have ended."""
        request = self.table.get(number)
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
        else:
            if event.seq == 0 and event.edge in self._audio:
                self.admission.spoke(request.id)
                self._look = True

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
        for replica in worker.replicas.values():
            self.admission.forget(replica)
        self._look = True
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

    def replica_ready(self) -> None:
        self._look = True

    def observe(self, worker: Worker, loads: Iterable[events.StageLoad], now: float) -> None:
        """A worker has told how loaded it is."""
        for load in loads:
            replica = worker.replicas[load.stage]
            self.admission.observe(replica, load, now)
            for speech, stage in self._held_by.items():
                if load.stage == stage and self.admission.has_room(replica, _SPEECH if speech else _TEXT):
                    self._look = True

    def start_waiting(self, now: float) -> None:
        """Start those whose turn has come, if anything has happened that may have made room."""
        if not self._look:
            return
        self._look = False
        if not self.waiting.any:
            return
        self._held_by.clear()
        for request in self.waiting.again():
            if not isinstance(bindings := self._binder.choose(request, None), str):
                self._start_late(request, bindings, now)
        for speech in (True, False):
            while self._in_flight < self._bus.max_requests and (first := self.waiting.head(speech, now)) is not None:
                bindings = self._binder.choose(first, self.admission)
                if isinstance(bindings, str):
                    self._held_by[speech] = bindings
                    break
                self._start_late(first, bindings, now)

    def refuse_waiting(self, error: OmniBusError, now: float) -> None:
        """Fail those that have not begun."""
        for request in self.table.queued():
            if not request.again:
                self._fail(request, error, now)

    def alarm(self, now: float) -> set[bytes]:
        """Fail what is past its deadline. Returns the workers that owe an acknowledgement for too long."""
        overdue: set[bytes] = set()
        while (request := self.table.pop_alarm(now)) is not None:
            if request.unacknowledged:
                overdue |= {request.bindings[stage].worker.peer for stage in request.unacknowledged}
            else:
                what = "finished" if request.state is RequestState.RUNNING or request.again else "begun, as the server is busy,"
                self._fail(request, DeadlineExceeded(f"not {what} within {request.deadline - request.arrived:.3g} s"), now)
        return overdue

    def fail_all(self, error: OmniBusError, now: float) -> None:
        for request in self.table.all():
            self._fail(request, error, now)

    # ---- one request

    @property
    def _in_flight(self) -> int:
        """Requests without those that wait for their first start."""
        return len(self.table) - len(self.waiting)

    def _turn(self, request: Request, now: float) -> dict[str, Replica] | None:
        """What a new request is to be bound to now; None: it waits. Raises NoReadyReplica, or Overloaded where too many wait."""
        missing = self._binder.missing(request)
        if missing is None and self._in_flight < self._bus.max_requests and not self.waiting.behind(request, now):
            bindings = self._binder.choose(request, self.admission)
            if not isinstance(bindings, str):
                return bindings
            self._held_by[is_speech(request.options)] = bindings
            # Without a look at who has room it is told whether there is anybody at all.
            missing = bindings if isinstance(self._binder.choose(request, None), str) else None
        if missing is not None:
            raise NoReadyReplica(f"no replica of stage {missing!r} is ready")
        if len(self.waiting) >= self._bus.max_waiting:
            last = self.waiting.last_of_batch() if request.options.priority == events.INTERACTIVE else None
            if last is None:
                raise self._overloaded(self.waiting.ahead_of(request), now)
            self._fail(last, self._overloaded(len(self.waiting), now), now)
        return None

    def _overloaded(self, ahead: int, now: float) -> Overloaded:
        seconds = self.admission.retry_after_s(ahead, now)
        return Overloaded(
            f"the server has all the requests that it can carry; try again in {math.ceil(seconds)} s", retry_after_s=seconds
        )

    def _check(self, event: events.Submit) -> None:
        outputs = self._pipeline.asked_modalities
        if not event.options.modalities or not outputs.issuperset(event.options.modalities):
            raise InvalidRequest(f"modalities must be some of {', '.join(sorted(outputs))}", param="modalities")
        if not 0 < event.deadline_s < math.inf:
            raise InvalidRequest("the deadline must be a positive number of seconds", param="deadline_s")
        if event.options.priority not in events.PRIORITIES:
            raise InvalidRequest(f"priority must be {' or '.join(events.PRIORITIES)}", param="priority")

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
            kept=[],
        )

    def _bind(self, request: Request, bindings: dict[str, Replica], now: float) -> None:
        """Open the request at the replica chosen for every stage."""
        change_state(request, RequestState.RUNNING)
        request.bindings = bindings
        bindings[request.entry.target].unread += request.entry.unconsumed  # of one that waited: its input is sent then
        self.admission.started(request.id, bindings.values(), request.options, now)
        for stage, replica in bindings.items():
            replica.outstanding += 1
            replica.worker.requests.add(request.id)
            self._send(replica.worker.peer, self._binder.open(request, stage, now), ())

    def _start_late(self, request: Request, bindings: dict[str, Replica], now: float) -> None:
        """Start one that waited, with the input that has come meanwhile."""
        self.waiting.discard(request)
        self._bind(request, bindings, now)
        self.flow.replay(request)

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
        again.again = True
        again.kept, request.kept = request.kept, None
        again.entry.resume(request.entry)
        self.table.add(again)
        self._let_go(request, RequestState.FAILING, now)
        bindings = self._binder.choose(again, None)  # it has been let in once
        if isinstance(bindings, str):
            self.waiting.add(again)
        else:
            self._start_late(again, bindings, now)

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
        self.waiting.discard(request)
        self.admission.ended(request.id, now, drained=request.outcome != "retried")
        self._look = True
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
