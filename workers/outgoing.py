"""What this process has sent, edge by edge: sequence numbers, credits, tensors that wait for their consumer, chunks that wait.

A chunk waits in its edge's queue while the edge has no credit, or the connector no room; its request's stage is paused meanwhile,
so a queue holds no more than two steps' emissions: one may have begun by then. Chunks that wait for room go in the order in which
they came, over all requests.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch

from omni_bus import events, wire
from omni_bus.connectors.base import Frame
from omni_bus.connectors.select import Connectors, Parcel
from omni_bus.errors import ProtocolViolation, StageFailed
from omni_bus.events import EdgeRoute, TensorRef

Send = Callable[[events.Event, Sequence[Frame]], None]
Key = tuple[int, str]  # (request, edge)


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    payload: bytes
    tensors: Mapping[str, torch.Tensor]
    last: bool


@dataclasses.dataclass(slots=True)
class _Edge:
    """One output edge of one request."""

    route: EdgeRoute
    credits: int
    seq: int = 0
    closed: bool = False  # the stage has emitted the last chunk
    waiting: collections.deque[_Waiting] = dataclasses.field(default_factory=collections.deque)
    leases: collections.deque[tuple[TensorRef, ...]] = dataclasses.field(
        default_factory=collections.deque
    )  # by unconsumed chunk


class Outgoing:
    """The output edges of every request in this process."""

    def __init__(self, connectors: Connectors, send: Send) -> None:
        self._connectors = connectors
        self._send = send
        self._edges: dict[Key, _Edge] = {}
        self._no_room: collections.deque[Key] = collections.deque()  # edges whose first waiting chunk found no room
        self._released = False  # since the last `retry`
        self._chunks: collections.Counter[tuple[str, str]] = collections.Counter()  # by (edge, connector)
        self._bytes: collections.Counter[tuple[str, str]] = collections.Counter()

    def open(self, request: int, routes: Iterable[EdgeRoute]) -> None:
        """Raises ProtocolViolation for a route that cannot be served here; then none is open."""
        edges: dict[Key, _Edge] = {}
        for route in routes:
            self._connectors.check_route(route)
            if route.credits < 1:
                raise ProtocolViolation(f"edge {route.edge} was opened without a credit")
            edges[request, route.edge] = _Edge(route, route.credits)
        self._edges |= edges

    def put(self, request: int, edge: str, payload: msgspec.Struct, tensors: Mapping[str, torch.Tensor], last: bool) -> None:
        """Send a chunk, or let it wait. Raises StageFailed for an edge that is not open, TooLarge where room can never be found."""
        state = self._edges.get((request, edge))
        if state is None or state.closed:
            raise StageFailed(f"a chunk on edge {edge}, which is not open")
        state.closed = last
        state.waiting.append(_Waiting(wire.encode(payload), tensors, last))
        self._advance((request, edge), state)

    def credit(self, request: int, edge: str, count: int) -> None:
        """The consumer has used up `count` more chunks. Raises ProtocolViolation where fewer are under way."""
        state = self._edges.get((request, edge))
        if state is None or not 0 < count <= len(state.leases):
            raise ProtocolViolation(f"{count} chunks of {edge} consumed, and not as many were sent")
        for _ in range(count):
            self._release(state.leases.popleft())
        state.credits += count
        self._advance((request, edge), state)

    def blocked(self, request: int, edges: Iterable[str]) -> bool:
        """Whether one more chunk on one of these edges would have to wait."""
        states = [self._edges[request, edge] for edge in edges]
        return any(not state.closed and (not state.credits or bool(state.waiting)) for state in states)

    def unsent(self, request: int, edges: Iterable[str]) -> bool:
        return any(self._edges[request, edge].waiting for edge in edges)

    def all_closed(self, request: int, edges: Iterable[str]) -> bool:
        return all(self._edges[request, edge].closed for edge in edges)

    def stop(self, request: int, edges: Iterable[str]) -> None:
        """Send nothing more on these edges. What is under way stays readable until `drop`."""
        for edge in edges:
            state = self._edges.get((request, edge))
            if state is not None:
                state.closed = True
                state.waiting.clear()

    def drop(self, request: int, edges: Iterable[str]) -> None:
        """Forget these edges: what waits is thrown away, every tensor slot returned."""
        for edge in edges:
            state = self._edges.pop((request, edge), None)
            if state is not None:
                for refs in state.leases:
                    self._release(refs)

    def look_again(self) -> None:
        """Room may have been found without a release: have the next `retry` try what waits."""
        self._released = self._released or bool(self._no_room)

    def retry(self) -> dict[Key, Exception | None]:
        """After slots came back: send what waits for room, first come first. The edges that went on, or the error that met one."""
        results: dict[Key, Exception | None] = {}
        while self._released and self._no_room:
            key = self._no_room[0]
            state = self._edges.get(key)
            if state is not None and state.waiting and state.credits:
                try:
                    if not self._send_first(key, state):
                        break
                except Exception as error:
                    results[key] = error
                    state.waiting.clear()
                else:
                    results.setdefault(key, None)
                    continue
            self._no_room.popleft()
        self._released = False
        return results

    def totals(self, edges: Iterable[str]) -> tuple[dict[str, int], dict[str, int]]:
        """ "edge|connector" → chunks, and → bytes, sent since the process started."""
        wanted = set(edges)
        return (
            {f"{edge}|{connector}": count for (edge, connector), count in self._chunks.items() if edge in wanted},
            {f"{edge}|{connector}": count for (edge, connector), count in self._bytes.items() if edge in wanted},
        )

    @property
    def held(self) -> int:
        """Entries in the tables: open edges, unconsumed chunks, waiting chunks."""
        return len(self._edges) + sum(len(edge.leases) + len(edge.waiting) for edge in self._edges.values())

    def _advance(self, key: Key, state: _Edge) -> None:
        while state.waiting and state.credits:
            if key in self._no_room:
                return
            # Whoever needs room while others wait for it queues behind them, or a large tensor would wait for ever.
            if self._no_room and self._connectors.takes_room(state.route, state.waiting[0].tensors):
                self._no_room.append(key)
                return
            if not self._send_first(key, state):
                self._no_room.append(key)
                return

    def _send_first(self, key: Key, state: _Edge) -> bool:
        """False: there is no room for it."""
        chunk = state.waiting[0]
        parcel = self._connectors.put(state.route, chunk.payload, chunk.tensors)
        if parcel is None:
            return False
        state.waiting.popleft()
        state.leases.append(parcel.refs)
        state.credits -= 1
        request, edge = key
        self._send(events.Chunk(request, edge, state.seq, chunk.last, parcel.refs), parcel.frames)
        state.seq += 1
        self._count(edge, state.route, parcel)
        return True

    def _count(self, edge: str, route: EdgeRoute, parcel: Parcel) -> None:
        self._bytes[edge, "inline"] += len(parcel.frames[0])
        for ref in parcel.refs:
            self._bytes[edge, ref.connector] += ref.nbytes
        by_route = any(ref.connector == route.connector for ref in parcel.refs)
        self._chunks[edge, route.connector if by_route else "inline"] += 1

    def _release(self, refs: Sequence[TensorRef]) -> None:
        if refs:
            self._connectors.release(refs)
            self._released = True
