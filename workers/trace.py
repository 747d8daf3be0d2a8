"""What a worker did and when, line by line: steps of its stages, events in and out. Only with `bus.trace`; bench/trace.py reads it.

DIR/WORKER.INCARNATION.jsonl, one JSON array a line; times are nanoseconds of CLOCK_REALTIME, which all processes of a host share:

    ["call", stage, "step" | "feed" | "open", start, end, rows of the batch, emissions]
    ["in" | "out", time, event's name, request, edge or stage, sequence number or -1, bytes of payload]

An event out is noted after it was given to the socket, an event in when it was taken from it. Lines are kept in memory and written
with each heartbeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import zmq

from omni_bus import events, wire
from omni_bus.connectors.base import Frame
from omni_bus.errors import ConfigError, ProtocolViolation
from omni_bus.spec import PipelineSpec, StageSpec
from omni_bus.stages import contract
from omni_bus.workers.link import BrokerLink

Line = tuple[str | int, ...]


class Trace:
    """One worker process's file. Raises ConfigError where it cannot be made."""

    def __init__(self, directory: str, name: str) -> None:
        try:
            pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
            self._file = (pathlib.Path(directory) / f"{name}.jsonl").open("wb")
        except OSError as error:
            raise ConfigError(f"bus.trace: {error.filename}: {error.strerror}") from None
        self._lines: list[Line] = []

    def add(self, *line: str | int) -> None:
        self._lines.append(line)

    def event(self, way: str, event: events.Event, payload: Sequence[Frame]) -> None:
        """Note an event of a request; others are left out."""
        now = time.time_ns()
        nbytes = sum(memoryview(frame).nbytes for frame in payload)
        name = type(event).__name__
        match event:
            case events.Chunk():
                self.add(way, now, name, event.request, event.edge, event.seq, nbytes)
            case events.Consumed():
                self.add(way, now, name, event.request, event.edge, -1, nbytes)
            case events.Open() | events.Close() | events.Cancel() | events.Done() | events.Failed() | events.Cancelled():
                self.add(way, now, name, event.request, event.stage, -1, nbytes)
            case _:
                return

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def pipeline(self, pipeline: PipelineSpec) -> PipelineSpec:
        """The same pipeline, of stages that note their calls."""
        return dataclasses.replace(pipeline, stages=tuple(self._traced(stage) for stage in pipeline.stages))

    def _traced(self, spec: StageSpec) -> StageSpec:
        factory: Callable[[], contract.Stage] = spec.factory
        return dataclasses.replace(spec, factory=lambda: TracedStage(spec.name, factory(), self))


class TracedStage:
    """A stage, and when its calls began and ended."""

    def __init__(self, name: str, stage: contract.Stage, trace: Trace) -> None:
        self._name = name
        self._stage = stage
        self._trace = trace

    def load(self, ctx: contract.StageContext) -> None:
        self._stage.load(ctx)

    def open(self, request: contract.StageRequest) -> None:
        start = time.time_ns()
        self._stage.open(request)
        self._trace.add("call", self._name, "open", start, time.time_ns(), 1, 0)

    def feed(self, request_id: int, chunk: contract.Chunk) -> None:
        start = time.time_ns()
        self._stage.feed(request_id, chunk)
        self._trace.add("call", self._name, "feed", start, time.time_ns(), 1, 0)

    def cancel(self, request_id: int) -> None:
        self._stage.cancel(request_id)

    def pause(self, request_id: int) -> None:
        self._stage.pause(request_id)

    def resume(self, request_id: int) -> None:
        self._stage.resume(request_id)

    def has_work(self) -> bool:
        return self._stage.has_work()

    def wake_at(self) -> float | None:
        return self._stage.wake_at()

    def step(self) -> Iterable[contract.Emission]:
        start = time.time_ns()
        emissions = list(self._stage.step())
        self._trace.add("call", self._name, "step", start, time.time_ns(), self._stage.stats().batch, len(emissions))
        return emissions

    def ahead(self) -> None:
        if isinstance(self._stage, contract.RunsAhead):
            start = time.time_ns()
            self._stage.ahead()
            self._trace.add("call", self._name, "ahead", start, time.time_ns(), 0, 0)

    def stats(self) -> contract.StageStats:
        return self._stage.stats()


class TracedLink(BrokerLink):
    """A link that notes what passes it. Events are read twice for it, here and by the worker."""

    def __init__(
        self, endpoint: str, worker: str, wake_fd: int, trace: Trace, *, beside: zmq.Socket[bytes] | None = None
    ) -> None:
        super().__init__(endpoint, worker, wake_fd, beside=beside)
        self._trace = trace

    def send(self, event: events.Event, frames: Sequence[Frame] = ()) -> None:
        self._trace.event("out", event, frames)  # before it leaves: its reader may run first, and must not have it earlier
        super().send(event, frames)
        if isinstance(event, events.Heartbeat):
            self._trace.flush()

    def receive(self) -> Iterator[list[bytes]]:
        for frames in super().receive():
            with contextlib.suppress(ProtocolViolation):  # the worker meets it again and logs it
                self._trace.event("in", wire.at_worker(frames[0]), frames[1:])
            yield frames

    def close(self) -> None:
        super().close()
        self._trace.close()
