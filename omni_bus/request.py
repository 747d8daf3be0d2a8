"""One attempt at a request, as the broker holds it: its state machine, its edges, its bindings. No I/O, no clock."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from omni_bus.errors import ProtocolViolation, SequenceDuplicate, SequenceGap
from omni_bus.events import CLIENT, RequestOptions, TensorRef
from omni_bus.pump import Frame
from omni_bus.registry import Replica

Frames = Sequence[Frame]  # payload frames, passed on as they came and never looked into


class RequestState(enum.Enum):
    QUEUED = "queued"  # waits for its turn, or for a ready replica of every stage; holds its input, nothing elsewhere
    RUNNING = "running"  # bound to replicas; chunks flow
    CANCELLING = "cancelling"  # the client is told when every stage has let go
    FAILING = "failing"  # the client has been told (or a retry has taken over); stages still have to let go
    ENDED = "ended"  # forgotten


_NEXT = {
    RequestState.QUEUED: {RequestState.RUNNING, RequestState.ENDED},
    RequestState.RUNNING: {RequestState.CANCELLING, RequestState.FAILING, RequestState.ENDED},
    RequestState.CANCELLING: {RequestState.ENDED},
    RequestState.FAILING: {RequestState.ENDED},
    RequestState.ENDED: set[RequestState](),
}


@dataclasses.dataclass(slots=True)
class Edge:
    """The flow of one (request, edge). Invariant: credited ≤ next_seq; a producer may have `credits` chunks beyond `credited`."""

    name: str
    source: str
    target: str
    credits: int
    next_seq: int = 0
    consumed: int = 0
    credited: int = 0  # consumed chunks that the producer knows of; ahead of `consumed` while a retry replays its input
    closed: bool = False

    def accept(self, seq: int, last: bool) -> None:
        """Take the next chunk in. Raises SequenceGap, SequenceDuplicate, or ProtocolViolation after `last` or beyond the credits."""
        if seq != self.next_seq:
            kind = SequenceGap if seq > self.next_seq else SequenceDuplicate
            raise kind(f"chunk {seq} of {self.name} came where {self.next_seq} was due")
        if self.closed:
            raise ProtocolViolation(f"a chunk of {self.name} came after the last one")
        if self.next_seq - self.credited >= self.credits:
            raise ProtocolViolation(f"the producer of {self.name} has more than {self.credits} unconsumed chunks under way")
        self.next_seq += 1
        self.closed = last

    def consume(self, count: int) -> int:
        """`count` more were used up; returns the credits the producer is due. ProtocolViolation for more than were sent."""
        if not 1 <= count <= self.next_seq - self.consumed:
            raise ProtocolViolation(f"{count} chunks of {self.name} returned, {self.next_seq - self.consumed} are unconsumed")
        self.consumed += count
        due = max(0, self.consumed - self.credited)
        self.credited += due
        return due

    def resume(self, before: Edge) -> None:
        """Take over the producer's side of the edge as an earlier attempt left it; the consumer's side starts anew."""
        self.next_seq, self.credited, self.closed = before.next_seq, before.credited, before.closed

    @property
    def unconsumed(self) -> int:
        return self.next_seq - self.consumed


@dataclasses.dataclass(frozen=True, slots=True)
class InputChunk:
    """A chunk of the client's input, kept for a retry."""

    refs: tuple[TensorRef, ...]
    last: bool
    frames: Frames

    @classmethod
    def checked(cls, refs: tuple[TensorRef, ...], last: bool, frames: Frames) -> InputChunk:
        """Raises ProtocolViolation where the frames are not what the refs say."""
        inline_only(refs, frames)
        return cls(refs, last, frames)

    @property
    def nbytes(self) -> int:
        return sum(len(frame) for frame in self.frames)


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    id: int  # internal, new for each attempt
    client: bytes | None  # None: gone, or told of the end already
    ticket: int
    label: str
    options: RequestOptions
    stages: tuple[str, ...]
    edges: dict[str, Edge]
    entry: Edge
    arrived: float  # monotonic seconds, as are all times here
    deadline: float
    retries: int  # left
    state: RequestState = RequestState.QUEUED
    alarm: float = 0.0  # when the clock must look at it next
    bindings: dict[str, Replica] = dataclasses.field(default_factory=dict)
    done: set[str] = dataclasses.field(default_factory=set)
    unacknowledged: set[str] = dataclasses.field(default_factory=set)  # stages whose Cancelled is awaited
    usage: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    first_chunks: dict[str, float] = dataclasses.field(default_factory=dict)  # edge → seconds since `arrived`
    kept: list[InputChunk] | None = dataclasses.field(default_factory=list)  # None: cannot be run again
    first_output: float | None = None
    again: bool = False  # it was running before, and its worker died
    outcome: str = ""  # "done", "cancelled", "failed:CODE", "retried": decided when the client's end is

    def replica(self, stage: str, worker: object) -> Replica:
        """The replica bound for `stage`, if it is `worker`'s; ProtocolViolation otherwise."""
        replica = self.bindings.get(stage)
        if replica is None or replica.worker is not worker:
            raise ProtocolViolation(f"an event for stage {stage!r} came from a worker that does not hold it")
        return replica

    def needs(self, stage: str) -> bool:
        """Whether the request would miss the bound replica of `stage`: it is not done, or others have yet to read its tensors."""
        return stage not in self.done or any(edge.unconsumed for edge in self.outputs(stage) if edge.target != CLIENT)

    def inputs(self, stage: str) -> list[Edge]:
        return [edge for edge in self.edges.values() if edge.target == stage]

    def outputs(self, stage: str) -> list[Edge]:
        return [edge for edge in self.edges.values() if edge.source == stage]


def change_state(request: Request, state: RequestState) -> None:
    """The one place that changes a request's state."""
    if state not in _NEXT[request.state]:
        raise AssertionError(f"request {request.id}: {request.state.value} → {state.value}")
    request.state = state


def inline_only(refs: tuple[TensorRef, ...], frames: Frames) -> None:
    """Tensors from and to a client travel as frames; ProtocolViolation otherwise, and for frames that do not match the refs."""
    if len(frames) != 1 + len(refs):
        raise ProtocolViolation(f"{len(frames)} payload frames for {len(refs)} tensors")
    for index, ref in enumerate(refs, start=1):
        if ref.connector != "inline" or ref.offset != index or ref.nbytes != len(frames[index]):
            raise ProtocolViolation(f"tensor {index} is not the inline frame it says it is")
