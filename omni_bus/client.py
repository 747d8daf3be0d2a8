"""BusClient: a process's connection to the broker. Many requests share it, each a stream of its own; asyncio, no torch, no tasks."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from types import TracebackType

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from omni_bus import events, wire
from omni_bus.client_leases import ClientLeases
from omni_bus.errors import (
    BrokerLost,
    Cancelled,
    OmniBusError,
    ProtocolViolation,
    SequenceDuplicate,
    SequenceGap,
    ShuttingDown,
    from_info,
)
from omni_bus.pump import Frame, Pump
from omni_bus.spec import PipelineSpec
from omni_bus.wire import HostTensor

LINGER_MS = 200  # for the last cancels of a client that closes


@dataclasses.dataclass(frozen=True, slots=True)
class StreamItem:
    """One chunk of the answer. `payload` is of the type that the pipeline declares for `edge`."""

    edge: str
    payload: msgspec.Struct
    tensors: dict[str, HostTensor]
    last: bool


class _Request:
    """What the client holds of one ticket until its end has come."""

    def __init__(self, ticket: int, loop: asyncio.AbstractEventLoop) -> None:
        self.ticket = ticket
        self.arrived: collections.deque[tuple[events.Delta, list[zmq.Frame]]] = collections.deque()
        self.next_seq: dict[str, int] = collections.defaultdict(int)
        self.unreported: dict[str, int] = collections.defaultdict(int)  # chunks consumed and not yet said to be
        self.held: set[str] = set()  # edges whose chunks are not consumed by being read
        self.sent = 0  # chunks on the entry edge
        self.credited = 0  # of them, consumed
        self.cancel_sent = False
        self.error: OmniBusError | None = None
        self.usage: dict[str, dict[str, int]] = {}
        self.first_chunks: dict[str, float] = {}
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []

    async def changed(self) -> None:
        """Wait for the next chunk, credit or end."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def end(self, error: OmniBusError | None) -> None:
        if not self.ended.done():
            self.error = error
            self.ended.set_result(None)
            self.wake()


class ClientStream:
    """One request: iterate over it for the answer. A stream that is dropped before its end cancels its request."""

    def __init__(self, client: BusClient, request: _Request) -> None:
        self._client = client
        self._request = request
        # The loop may see the stream go in another thread's garbage collection; the socket belongs to the loop's thread.
        self._dropped = weakref.finalize(self, _abandon_from_any_thread, client, request)
        self._dropped.atexit = False

    @property
    def usage(self) -> dict[str, dict[str, int]]:
        """Stage → figure → value, once the stream has ended well."""
        return self._request.usage

    @property
    def first_chunks(self) -> dict[str, float]:
        """Edge → seconds from the request's arrival at the broker to the edge's first chunk, once the stream has ended well."""
        return self._request.first_chunks

    def __aiter__(self) -> AsyncIterator[StreamItem]:
        return self._read()

    async def _read(self) -> AsyncGenerator[StreamItem, None]:
        request = self._request
        try:
            while True:
                while not request.arrived and not request.ended.done():
                    await request.changed()
                if not request.arrived:
                    if request.error is not None:
                        raise request.error
                    return
                delta, frames = request.arrived.popleft()
                yield self._client._decode(delta, frames)
                if delta.edge not in request.held and not delta.last:
                    self._client._consumed(request, delta.edge)
        finally:
            self._client._abandon(request)

    def hold(self, edge: str) -> None:
        """From now on a chunk of that edge is consumed when `consumed` says so: the reader goes on past it, its stage does not."""
        self._request.held.add(edge)

    def consumed(self, edge: str) -> None:
        """A chunk of a held edge has been used up; to be called once for each but the edge's last, which frees nobody."""
        self._client._consumed(self._request, edge)

    async def append(
        self, payload: msgspec.Struct, tensors: Mapping[str, HostTensor] | None = None, *, last: bool = False
    ) -> None:
        """Send the next chunk of streamed input; waits while the first stage is behind. Raises the error of a stream that failed.

        A chunk for a request that has already ended well is dropped: the answer did not need it.
        """
        request = self._request
        while not request.ended.done() and request.sent - request.credited >= self._client._entry_credits:
            await request.changed()
        if request.error is not None:
            raise request.error
        if request.ended.done():
            return
        refs, frames = _inline(payload, tensors)
        self._client._send(events.Append(request.ticket, request.sent, refs, last), frames)
        request.sent += 1

    async def cancel(self) -> None:
        """Cancel and wait until every stage has let go of the request. Returns at once if it has ended."""
        self._client._abandon(self._request)
        await asyncio.shield(self._request.ended)

    async def __aenter__(self) -> ClientStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client._abandon(self._request)


class BusClient:
    """A DEALER to the broker. It outlives a broker: streams of a lost one end with BrokerLost, a new one is greeted when it comes."""

    def __init__(self, endpoint: str, pipeline: PipelineSpec) -> None:
        self._loop = asyncio.get_running_loop()
        self._decode_payload = wire.PayloadDecoder(pipeline)
        self._entry = pipeline.entry.name
        self._credits: dict[str, int] = {}
        self._tickets = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._leases = ClientLeases(self._send)
        self._queries: dict[int, asyncio.Future[events.Status]] = {}
        self._watch = next(self._tickets)  # the query that asks the broker to tell of changes
        self._changed: Callable[[], None] | None = None
        self._welcome: asyncio.Future[None] = self._loop.create_future()
        self._stopping = False
        self._closed = False
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # credits bound what is under way
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._monitor_pump = Pump(self._loop, self._monitor, self._on_connection)
        self._pump = Pump(self._loop, self._socket, self._on_message)
        self._socket.connect(endpoint)

    @classmethod
    async def connect(cls, endpoint: str, pipeline: PipelineSpec, *, timeout_s: float = 30.0) -> BusClient:
        """Connect and wait until the broker has answered. Raises ShuttingDown where none does within `timeout_s` seconds."""
        client = cls(endpoint, pipeline)
        try:
            await asyncio.wait_for(asyncio.shield(client._welcome), timeout_s)
        except TimeoutError:
            await client.close()
            raise ShuttingDown("the broker does not answer") from None
        except BaseException:
            await client.close()
            raise
        return client

    async def submit(
        self,
        *,
        options: events.RequestOptions,
        payload: msgspec.Struct,
        tensors: Mapping[str, HostTensor] | None = None,
        deadline_s: float = 300.0,
        label: str = "",
        last: bool = True,
    ) -> ClientStream:
        """Send a request with its first chunk of input; `last=False`: `append` follows. Raises BrokerLost without a broker, ShuttingDown
        where the server ends.

        A refusal (overloaded, no ready replica, …) comes as the stream's error.
        """
        if self._closed or self._stopping:
            raise ShuttingDown("the server is not taking requests")
        if not self._connected:
            raise BrokerLost("a part of the server is being started again; try again in a moment")
        request = _Request(next(self._tickets), self._loop)
        refs, frames = _inline(payload, tensors)
        self._send(events.Submit(request.ticket, label, options, deadline_s, refs, last), frames)
        request.sent = 1
        self._requests[request.ticket] = request
        return ClientStream(self, request)

    async def status(self) -> events.Status:
        """Stages, replicas and request counts as the broker sees them now. Raises BrokerLost without a broker."""
        if self._closed or not self._connected:
            raise BrokerLost("the broker is gone")
        query = next(self._tickets)
        answer: asyncio.Future[events.Status] = self._loop.create_future()
        self._queries[query] = answer
        self._send(events.StatusQuery(query))
        try:
            return await answer
        finally:
            self._queries.pop(query, None)

    def watch(self, changed: Callable[[], None]) -> None:
        """`changed` is called from now on when a replica's state has changed, and when the broker is gone or back."""
        self._changed = changed
        if self._connected:
            self._send(events.StatusQuery(self._watch, watch=True))

    @contextlib.asynccontextmanager
    async def lease(self, kind: str, client: str) -> AsyncIterator[None]:
        """One more request or session of a client for as long as the block lasts, over all API processes.

        Raises RateLimited or Overloaded where that is too many, BrokerLost without a broker, ShuttingDown where the server ends.
        """
        if self._closed or self._stopping:
            raise ShuttingDown("the server is not taking requests")
        if not self._connected:
            raise BrokerLost("a part of the server is being started again; try again in a moment")
        async with self._leases.one(kind, client):
            yield

    async def close(self) -> None:
        """Cancel what is open and leave; nothing stays behind. Streams that are still read end with Cancelled."""
        if self._closed:
            return
        for request in list(self._requests.values()):
            self._abandon(request)
        self._end_all(Cancelled("the connection was closed"))
        self._closed = True
        self._pump.close()
        self._monitor_pump.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    @property
    def _connected(self) -> bool:
        return self._welcome.done()

    @property
    def _entry_credits(self) -> int:
        return self._credits[self._entry]

    def _send(self, event: events.Event, frames: list[Frame] | None = None) -> None:
        self._pump.send([wire.encode(event), *(frames or ())])

    def _decode(self, delta: events.Delta, frames: list[zmq.Frame]) -> StreamItem:
        payload = self._decode_payload(delta.edge, frames[0].buffer)
        tensors = {ref.name: HostTensor(ref.dtype, ref.shape, frames[ref.offset].buffer) for ref in delta.refs}
        return StreamItem(delta.edge, payload, tensors, delta.last)

    def _consumed(self, request: _Request, edge: str) -> None:
        """Note that a chunk was used up, and say so in batches small enough never to stall the producer."""
        if request.ended.done() or self._closed:
            return
        request.unreported[edge] += 1
        if request.unreported[edge] >= max(1, self._credits[edge] // 4):
            self._send(events.Consumed(request.ticket, edge, request.unreported.pop(edge)))

    def _abandon(self, request: _Request) -> None:
        if request.ended.done() or request.cancel_sent or self._closed:
            return
        request.cancel_sent = True
        request.arrived.clear()
        self._send(events.CancelRequest(request.ticket))

    def _end(self, ticket: int, error: OmniBusError | None) -> None:
        request = self._requests.pop(ticket, None)
        if request is not None:
            request.end(error)

    def _completed(self, event: events.Completed) -> None:
        request = self._requests.get(event.ticket)
        if request is not None:
            request.usage, request.first_chunks = event.usage, event.first_chunks
            self._end(event.ticket, None)

    def _end_all(self, error: OmniBusError) -> None:
        for ticket in list(self._requests):
            self._end(ticket, error)
        self._leases.broker_lost(error)
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(error)
        self._queries.clear()

    def _on_connection(self, frames: list[zmq.Frame]) -> None:
        kind = parse_monitor_message([frame.bytes for frame in frames])["event"]
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._send(events.Hello("client"))
        elif kind == zmq.EVENT_DISCONNECTED:
            if self._welcome.done():
                self._welcome = self._loop.create_future()
            self._stopping = False
            self._end_all(BrokerLost("a part of the server ended, and the request with it; ask again"))
            self._tell_of_change()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            event = wire.at_client(frames[0].buffer)
        except ProtocolViolation as error:
            self._end_all(error)
            return
        match event:
            case events.Delta():
                self._on_delta(event, frames[1:])
            case events.Consumed():
                request = self._requests.get(event.request)
                if request is not None:
                    request.credited += event.count
                    request.wake()
            case events.Completed():
                self._completed(event)
            case events.RequestFailed():
                self._end(event.ticket, from_info(event.error))
            case events.Leased() | events.LeaseRefused():
                self._leases.answered(event)
            case events.RequestCancelled():
                self._end(event.ticket, Cancelled("the request was cancelled"))
            case events.Status():
                if event.query == self._watch:
                    self._tell_of_change()
                answer = self._queries.get(event.query)
                if answer is not None and not answer.done():
                    answer.set_result(event)
            case events.Welcome():
                self._credits = event.credits
                self._leases.renew()
                if not self._welcome.done():
                    self._welcome.set_result(None)
                if self._changed is not None:
                    self._send(events.StatusQuery(self._watch, watch=True))
            case events.Shutdown():
                self._stopping = True
                self._end_all(ShuttingDown("the server is shutting down"))
                self._tell_of_change()
            case events.Ping():
                return

    def _tell_of_change(self) -> None:
        if self._changed is not None:
            self._changed()

    def _on_delta(self, delta: events.Delta, frames: list[zmq.Frame]) -> None:
        request = self._requests.get(delta.ticket)
        if request is None or request.cancel_sent:
            return
        expected = request.next_seq[delta.edge]
        if delta.seq != expected:
            kind = SequenceGap if delta.seq > expected else SequenceDuplicate
            self._abandon(request)
            self._end(delta.ticket, kind(f"chunk {delta.seq} of {delta.edge} came where {expected} was due"))
            return
        request.next_seq[delta.edge] = expected + 1
        request.arrived.append((delta, frames))
        request.wake()


def _abandon_from_any_thread(client: BusClient, request: _Request) -> None:
    if not client._loop.is_closed():
        client._loop.call_soon_threadsafe(client._abandon, request)


def _inline(
    payload: msgspec.Struct, tensors: Mapping[str, HostTensor] | None
) -> tuple[tuple[events.TensorRef, ...], list[Frame]]:
    """Tensors from outside have no segment: their bytes follow the payload's frame."""
    frames: list[Frame] = [wire.encode(payload)]
    refs = []
    for name, tensor in (tensors or {}).items():
        view = memoryview(tensor.data).cast("B")
        refs.append(events.TensorRef(name, "inline", tensor.dtype, tensor.shape, view.nbytes, offset=len(frames)))
        frames.append(view)
    return tuple(refs), frames
