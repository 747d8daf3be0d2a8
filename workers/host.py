"""One stage and the requests open in it: events in, stage calls, emissions out. Whatever goes wrong here fails one request, never
the process; but for a lost device, without which the process is of no use.

A request's states in a stage:  OPEN → DRAINING (the stage is done, its last chunks wait for credit) → DONE;  OPEN, DRAINING → FAILED.
The broker ends it: Close or Cancel, which forget it.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import time
from collections.abc import Mapping, Sequence

from omni_bus import events, wire
from omni_bus.connectors.base import Frame
from omni_bus.connectors.select import Connectors
from omni_bus.errors import ErrorInfo, OmniBusError, ProtocolViolation, SequenceDuplicate, SequenceGap
from omni_bus.sampling import SamplingParams
from omni_bus.spec import PipelineSpec
from omni_bus.stages import contract, failures
from omni_bus.workers.outgoing import Outgoing, Send
from omni_bus.workers.playback import Playback, seconds_of

_log = logging.getLogger(__name__)


class State(enum.Enum):
    OPEN = enum.auto()
    DRAINING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


_FOLLOWS = {
    State.OPEN: (State.DRAINING, State.FAILED),
    State.DRAINING: (State.DONE, State.FAILED),
    State.DONE: (),
    State.FAILED: (),
}


@dataclasses.dataclass(slots=True)
class _Input:
    """One input edge of one request."""

    next_seq: int = 0
    closed: bool = False
    unconsumed: int = 0


@dataclasses.dataclass(slots=True)
class _Row:
    id: int
    inputs: dict[str, _Input]
    outputs: tuple[str, ...]
    state: State = State.OPEN
    paused: bool = False
    usage: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def enter(self, state: State) -> None:
        """The one place that changes a state."""
        assert state in _FOLLOWS[self.state], (self.state, state)
        self.state = state


class StageHost:
    """Every call comes from the engine loop's thread."""

    def __init__(
        self,
        name: str,
        stage: contract.Stage,
        *,
        pipeline: PipelineSpec,
        sampling: SamplingParams,
        connectors: Connectors,
        outgoing: Outgoing,
        send: Send,
    ) -> None:
        self.name = name
        self._stage = stage
        self._sampling = sampling
        self._connectors = connectors
        self._outgoing = outgoing
        self._send = send
        self._decode = wire.PayloadDecoder(pipeline)
        self._edges = tuple(edge.name for edge in pipeline.edges if edge.source == name)
        self._client_edge = pipeline.entry.name
        self._rows: dict[int, _Row] = {}
        self._playback = Playback()
        self._emissions: list[contract.Emission] | None = None  # of the last step, until they are sent
        self._steps = 0
        self._busy_s = 0.0

    # ---- events of the broker

    def open(self, event: events.Open) -> None:
        if event.request in self._rows:
            self._fail(self._rows[event.request], ProtocolViolation(f"request opened twice in stage {self.name}"))
            return
        self._playback.open(event.request, event.options)
        outputs = tuple(route.edge for route in event.outputs)
        row = self._rows[event.request] = _Row(event.request, {edge: _Input() for edge in event.inputs}, outputs)
        try:
            self._outgoing.open(event.request, event.outputs)
            self._stage.open(
                contract.StageRequest(
                    id=event.request,
                    options=event.options,
                    sampling=self._sampling.merged(event.options.sampling.get(self.name, SamplingParams())),
                    inputs=event.inputs,
                    outputs=outputs,
                    deadline=time.monotonic() + event.deadline_s,
                )
            )
        except Exception as error:
            self._fail(row, error)

    def chunk(self, event: events.Chunk, frames: Sequence[Frame]) -> None:
        """`frames`: the payload frames. A chunk that comes after the request's end here is late, and its tensors are the producer's."""
        row = self._rows.get(event.request)
        if row is None or row.state is not State.OPEN:
            return
        try:
            self._stage.feed(row.id, self._accept(row, event, frames))
        except Exception as error:
            self._fail(row, error)

    def consumed(self, event: events.Consumed) -> None:
        row = self._rows.get(event.request)
        if row is None or row.state is State.FAILED:
            return
        try:
            self._outgoing.credit(event.request, event.edge, event.count)
        except Exception as error:
            self._fail(row, error)
        self._settle(row)

    def close(self, event: events.Close) -> None:
        self._forget(event.request)

    def cancel(self, event: events.Cancel) -> None:
        self._forget(event.request)
        self._send(events.Cancelled(event.request, self.name), ())

    def forget_all(self) -> None:
        """The broker is gone, and every request with it."""
        for request in list(self._rows):
            self._forget(request)

    def room_found(self, request: int, error: Exception | None) -> None:
        """Chunks of the request that waited for room have been sent, or met an error."""
        row = self._rows.get(request)
        if row is not None and error is not None:
            self._fail(row, error)
        elif row is not None:
            self._settle(row)

    # ---- the engine loop

    def has_work(self) -> bool:
        try:
            return self._stage.has_work()
        except Exception as error:
            self._fail_all(error)
            return False

    def wake_at(self) -> float | None:
        try:
            return self._stage.wake_at()
        except Exception as error:
            self._fail_all(error)
            return None

    def step(self) -> None:
        started = time.perf_counter()
        try:
            # All of it first: a stage that yields as it goes would else be paused in the middle of its step.
            self._emissions = list(self._stage.step())
        except Exception as error:
            self._fail_all(error)
            return
        finally:
            self._steps += 1
            self._busy_s += time.perf_counter() - started

    def send(self) -> None:
        """What the last step gave; the stage may begin the next one first."""
        if self._emissions is None:
            return
        emissions, self._emissions = self._emissions, None
        if isinstance(self._stage, contract.RunsAhead):
            started = time.perf_counter()
            try:
                self._stage.ahead()
            except Exception as error:
                self._fail_all(error)
            finally:
                self._busy_s += time.perf_counter() - started
        touched: dict[int, _Row] = {}
        for emission in emissions:
            row = self._rows.get(emission.request_id)
            if row is not None and row.state is State.OPEN:
                try:
                    self._emit(row, emission)
                except Exception as error:
                    self._fail(row, error)
                touched[row.id] = row
        for row in touched.values():
            self._settle(row)

    def load(self) -> events.StageLoad:
        try:
            stats = self._stage.stats()
        except Exception:
            _log.exception("%s: stats failed", self.name)
            stats = contract.StageStats()
        chunks, sent = self._outgoing.totals(self._edges)
        return events.StageLoad(
            stage=self.name,
            waiting=stats.waiting,
            running=stats.running,
            queued=stats.queued,
            per_step=stats.per_step,
            batch=stats.batch,
            steps=self._steps,
            busy_s=self._busy_s,
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_total=stats.kv_blocks_total,
            prompt_computed=stats.prompt_computed,
            prompt_cached=stats.prompt_cached,
            slots_used=stats.slots_used,
            slots_total=stats.slots_total,
            segments_used=self._connectors.used,
            chunks=chunks,
            bytes=sent,
            streams=len(self._playback),
            lead_s=self._playback.smallest_lead(time.monotonic()),
            audio_s=self._playback.audio_s,
            held=len(self._rows) + self._outgoing.held,
        )

    # ---- inside

    def _accept(self, row: _Row, event: events.Chunk, frames: Sequence[Frame]) -> contract.Chunk:
        edge = row.inputs.get(event.edge)
        if edge is None:
            raise ProtocolViolation(f"a chunk on edge {event.edge}, which is not open")
        if event.seq != edge.next_seq:
            kind = SequenceGap if event.seq > edge.next_seq else SequenceDuplicate
            raise kind(f"chunk {event.seq} of {event.edge} came where {edge.next_seq} was due")
        if edge.closed:
            raise ProtocolViolation(f"a chunk of {event.edge} after the last one")
        if not frames:
            raise ProtocolViolation(f"a chunk of {event.edge} without a payload")
        payload = self._decode(event.edge, frames[0])
        tensors = self._connectors.get(event.refs, frames, inline_only=event.edge == self._client_edge)
        edge.next_seq += 1
        edge.closed = event.last
        edge.unconsumed += 1
        return contract.Chunk(event.edge, payload, tensors, event.last)

    def _emit(self, row: _Row, emission: contract.Emission) -> None:
        match emission:
            case contract.Output(_, edge, payload, tensors, last):
                self._outgoing.put(row.id, edge, payload, tensors, last)
                if seconds := seconds_of(payload, tensors):
                    self._playback.sent(row.id, seconds, time.monotonic())
            case contract.Consumed(_, edge, count):
                arrived = row.inputs[edge]
                assert 0 < count <= arrived.unconsumed, f"{count} chunks of {edge} consumed, {arrived.unconsumed} are there"
                arrived.unconsumed -= count
                self._send(events.Consumed(row.id, edge, count), ())
            case contract.Finished(_, usage):
                assert self._outgoing.all_closed(row.id, row.outputs), "finished before the last chunk of every edge"
                row.usage = usage
                row.enter(State.DRAINING)
                self._playback.close(row.id)
            case contract.StageError(_, error):
                self._fail(row, error)

    def _settle(self, row: _Row) -> None:
        """Pause, resume or finish the request, as its output edges have it now."""
        if row.state is State.OPEN:
            blocked = self._outgoing.blocked(row.id, row.outputs)
            if blocked != row.paused:
                row.paused = blocked
                (self._playback.pause if blocked else self._playback.resume)(row.id, time.monotonic())
                try:
                    (self._stage.pause if blocked else self._stage.resume)(row.id)
                except Exception as error:
                    self._fail(row, error)
        elif row.state is State.DRAINING and not self._outgoing.unsent(row.id, row.outputs):
            row.enter(State.DONE)
            self._send(events.Done(row.id, self.name, dict(row.usage)), ())

    def _fail(self, row: _Row, error: Exception | ErrorInfo) -> None:
        """Tell the broker, once, and send nothing more. Only a request that is DONE already has no failure left to tell.

        Tensors under way are kept until the broker's Cancel: a consumer that met a returned slot would fail with an error of its
        own, and might be heard first.
        """
        if row.state in (State.DONE, State.FAILED):
            _log.warning("%s: request %d: an error after its end: %s", self.name, row.id, error)
            return
        if isinstance(error, Exception):
            failures.raise_if_device_is_lost(error)
        row.enter(State.FAILED)
        self._playback.close(row.id)
        self._cancel_in_stage(row.id)
        self._outgoing.stop(row.id, row.outputs)
        self._send(events.Failed(row.id, self.name, self._info(row.id, error)), ())

    def _fail_all(self, error: Exception) -> None:
        failures.raise_if_device_is_lost(error)
        for row in list(self._rows.values()):
            if row.state is State.OPEN:
                self._fail(row, error)

    def _info(self, request: int, error: Exception | ErrorInfo) -> ErrorInfo:
        if isinstance(error, ErrorInfo):
            return error
        if isinstance(error, OmniBusError):
            _log.info("%s: request %d failed: %s: %s", self.name, request, error.code, error.message)
            return error.info()
        # A client sees no stack and no text of a foreign exception; the log has both.
        _log.error("%s: request %d failed", self.name, request, exc_info=error)
        return failures.for_client(error, f"stage {self.name} failed").info()

    def _forget(self, request: int) -> None:
        row = self._rows.pop(request, None)
        if row is None:
            return
        self._playback.close(request)
        if row.state is State.OPEN:
            self._cancel_in_stage(request)
        self._outgoing.drop(request, row.outputs)

    def _cancel_in_stage(self, request: int) -> None:
        try:
            self._stage.cancel(request)
        except Exception as error:
            failures.raise_if_device_is_lost(error)
            _log.exception("%s: cancel of request %d failed", self.name, request)
