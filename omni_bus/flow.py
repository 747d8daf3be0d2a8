"""Chunks and credits of running requests: checked, forwarded, handed back. Raises for what breaks a rule; ends nothing itself."""

from __future__ import annotations

from collections.abc import Callable

from omni_bus import events
from omni_bus.errors import Overloaded, ProtocolViolation, ReplicaLost
from omni_bus.events import CLIENT
from omni_bus.registry import Replica, ReplicaState, Worker
from omni_bus.request import Edge, Frames, InputChunk, Request, RequestState, inline_only
from omni_bus.request_table import RequestTable
from omni_bus.spec import PipelineSpec

Send = Callable[[bytes, events.Event, Frames], None]


class Flow:
    """Every method may raise SequenceGap, SequenceDuplicate or ProtocolViolation, `input` also ReplicaLost or Overloaded; then nothing
    has been sent."""

    def __init__(self, pipeline: PipelineSpec, table: RequestTable, send: Send) -> None:
        self._table = table
        self._send = send
        self.edge_chunks: dict[str, int] = {edge.name: 0 for edge in pipeline.edges}  # since the start
        self.input_bytes = 0  # of payloads and tensors forwarded on the entry edge

    def input(self, request: Request, seq: int, chunk: InputChunk) -> None:
        """Take in a chunk on the entry edge: forwarded where the request runs, kept where it may have to run again."""
        request.entry.accept(seq, chunk.last)
        self._table.keep(request, chunk)
        if request.state is RequestState.RUNNING:
            request.bindings[request.entry.target].unread += 1
            self._forward_input(request, seq, chunk)
        elif request.kept is None and request.again:
            raise ReplicaLost("the process that served the request ended, and the input is too large to run it again")
        elif request.kept is None:
            raise Overloaded("the requests that wait have more input than there is room for; try again later")

    def replay(self, request: Request) -> None:
        """Send all of the kept input to a request that was bound after it had come."""
        assert request.kept is not None
        for seq, chunk in enumerate(request.kept):
            self._forward_input(request, seq, chunk)
        if not request.retries:
            self._table.forget_input(request)

    def chunk(self, request: Request, worker: Worker, event: events.Chunk, frames: Frames, now: float) -> None:
        """A stage's output, to the next stage or to the client."""
        edge = _edge(request, event.edge)
        request.replica(edge.source, worker)
        if not frames:
            raise ProtocolViolation(f"a chunk of {edge.name} came without a payload")
        if edge.target == CLIENT:
            inline_only(event.refs, frames)
        edge.accept(event.seq, event.last)
        self.edge_chunks[edge.name] += 1
        if event.seq == 0:
            request.first_chunks[edge.name] = now - request.arrived
        if edge.target != CLIENT:
            request.bindings[edge.target].unread += 1
        if edge.target == CLIENT:
            assert request.client is not None, "a running request has its client"
            if request.first_output is None:
                request.first_output = now
                self._table.forget_input(request)
            self._send(request.client, events.Delta(request.ticket, edge.name, event.seq, event.last, event.refs), frames)
        elif edge.target in request.done:
            self._consume(request, edge, 1)
        else:
            self._send(request.bindings[edge.target].worker.peer, event, frames)

    def late_chunk(self, worker: Worker, event: events.Chunk) -> None:
        """A chunk of a request that is forgotten: its tensors go back."""
        if any(ref.connector != "inline" for ref in event.refs):
            self._send(worker.peer, events.Consumed(event.request, event.edge, 1), ())

    def consumed(self, request: Request, worker: Worker, event: events.Consumed) -> None:
        """A stage has used up chunks; of one that is done, all have been handed back already."""
        edge = _edge(request, event.edge)
        request.replica(edge.target, worker)
        if edge.target not in request.done:
            self._consume(request, edge, event.count)

    def consumed_by_client(self, request: Request, event: events.Consumed) -> None:
        edge = _edge(request, event.edge)
        if edge.target != CLIENT:
            raise ProtocolViolation(f"{edge.name} does not lead to the client")
        self._consume(request, edge, event.count)

    def hand_back_unread(self, request: Request, stage: str) -> None:
        """The stage is done: what it has not read is used up."""
        for edge in request.inputs(stage):
            if edge.unconsumed:
                self._consume(request, edge, edge.unconsumed)

    def tell(self, replica: Replica, event: events.Event) -> bool:
        """False for a lost replica: another process may have taken its worker's name, and knows nothing of what that one held."""
        if replica.state is ReplicaState.LOST:
            return False
        self._send(replica.worker.peer, event, ())
        return True

    def _forward_input(self, request: Request, seq: int, chunk: InputChunk) -> None:
        edge = request.entry
        self.edge_chunks[edge.name] += 1
        self.input_bytes += chunk.nbytes
        if edge.target in request.done:
            self._consume(request, edge, 1)
        else:
            event = events.Chunk(request.id, edge.name, seq, chunk.last, chunk.refs)
            self._send(request.bindings[edge.target].worker.peer, event, chunk.frames)

    def _consume(self, request: Request, edge: Edge, count: int) -> None:
        """Take `count` chunks as used up and tell the producer what it is due."""
        due = edge.consume(count)
        if edge.target != CLIENT:
            request.bindings[edge.target].unread -= count
        if due and edge.source != CLIENT:
            self.tell(request.bindings[edge.source], events.Consumed(request.id, edge.name, due))
        elif due and not edge.closed and request.client is not None:
            self._send(request.client, events.Consumed(request.ticket, edge.name, due), ())


def _edge(request: Request, name: str) -> Edge:
    try:
        return request.edges[name]
    except KeyError:
        raise ProtocolViolation("the request has no such edge") from None
