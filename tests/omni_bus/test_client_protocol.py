"""BusClient against a broker that says what the test says, right or wrong."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator

import pytest
import zmq

from omni_bus import events, wire
from omni_bus.client import BusClient, ClientStream
from omni_bus.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorInfo,
    OmniBusError,
    ProtocolViolation,
    SequenceDuplicate,
    SequenceGap,
    ShuttingDown,
)
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, TextDelta
from omni_bus.pump import Pump
from omni_bus.spec import load_pipeline

PIPELINE = load_pipeline("probe")
CHAT = ChatInput(())
OUT = "source->client"
PATIENCE_S = 60.0


class FakeBroker:
    def __init__(self, endpoint: str, *, credits: int) -> None:
        self._welcome = events.Welcome({edge: credits for edge in ("client->source", OUT, "sink->client")})
        self._heard: asyncio.Queue[events.Event] = asyncio.Queue()
        self._peer = b""
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self._pump = Pump(asyncio.get_running_loop(), self.socket, self._on_message)

    def say(self, event: events.Event, *frames: bytes) -> None:
        self.say_raw(wire.encode(event), *frames)

    def say_raw(self, *frames: bytes) -> None:
        self._pump.send([self._peer, *frames])

    def delta(self, ticket: int, seq: int, *, last: bool = False, edge: str = OUT) -> None:
        self.say(events.Delta(ticket, edge, seq, last), wire.encode(TextDelta(str(seq))))

    async def hear(self) -> events.Event:
        async with asyncio.timeout(PATIENCE_S):
            return await self._heard.get()

    def close(self) -> None:
        self._pump.close()
        self.socket.close()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        self._peer = frames[0].bytes
        event = wire.at_broker(frames[1].buffer)
        if isinstance(event, events.Hello):
            self.say(self._welcome)
        else:
            self._heard.put_nowait(event)


@pytest.fixture
async def broker(tmp_path: pathlib.Path) -> AsyncIterator[FakeBroker]:
    broker = FakeBroker(f"ipc://{tmp_path}/b", credits=8)
    yield broker
    broker.close()


@pytest.fixture
async def client(broker: FakeBroker, tmp_path: pathlib.Path) -> AsyncIterator[BusClient]:
    client = await BusClient.connect(f"ipc://{tmp_path}/b", PIPELINE)
    yield client
    await client.close()


async def submit(client: BusClient, broker: FakeBroker) -> tuple[ClientStream, int]:
    stream = await client.submit(options=RequestOptions(), payload=CHAT)
    event = await broker.hear()
    assert isinstance(event, events.Submit)
    return stream, event.ticket


async def read(stream: ClientStream) -> list[str]:
    words = []
    async for item in stream:
        assert isinstance(item.payload, TextDelta)
        words.append(item.payload.text)
    return words


@pytest.mark.parametrize(
    ("seqs", "kind"),
    [((1,), SequenceGap), ((0, 0), SequenceDuplicate), ((0, 2), SequenceGap)],
    ids=["first_is_missing", "one_came_twice", "one_is_missing"],
)
async def test_a_chunk_out_of_order_fails_the_stream_and_cancels(
    client: BusClient, broker: FakeBroker, seqs: tuple[int, ...], kind: type[OmniBusError]
) -> None:
    stream, ticket = await submit(client, broker)
    for seq in seqs:
        broker.delta(ticket, seq)
    with pytest.raises(kind):
        await read(stream)
    assert await broker.hear() == events.CancelRequest(ticket)


async def test_output_that_came_before_a_failure_is_read_first(client: BusClient, broker: FakeBroker) -> None:
    stream, ticket = await submit(client, broker)
    broker.delta(ticket, 0)
    broker.say(events.RequestFailed(ticket, ErrorInfo("deadline_exceeded", "too late", 408)))
    items = aiter(stream)
    assert (await anext(items)).payload == TextDelta("0")
    with pytest.raises(DeadlineExceeded, match="too late") as caught:
        await anext(items)
    assert caught.value.status == 408


async def test_nothing_is_read_of_a_stream_that_was_cancelled(client: BusClient, broker: FakeBroker) -> None:
    stream, ticket = await submit(client, broker)
    broker.delta(ticket, 0)
    items = aiter(stream)
    assert (await anext(items)).payload == TextDelta("0")
    broker.delta(ticket, 1)
    status = asyncio.ensure_future(client.status())
    query = await broker.hear()
    assert isinstance(query, events.StatusQuery)
    broker.say(events.Status(query=query.query, pipeline="", ready=True, missing=(), replicas=(), requests={}, ended={}))
    await status  # by now the second chunk lies in the client
    cancelling = asyncio.ensure_future(stream.cancel())
    assert await broker.hear() == events.CancelRequest(ticket)
    broker.delta(ticket, 2)
    broker.say(events.RequestCancelled(ticket))
    await cancelling
    with pytest.raises(Cancelled):
        await anext(items)


@pytest.mark.parametrize("frames", [(b"\xc1",), (b"\x93\x01",)], ids=["noise", "another_type"])
async def test_a_payload_that_cannot_be_read_fails_its_stream_and_cancels(
    client: BusClient, broker: FakeBroker, frames: tuple[bytes, ...]
) -> None:
    stream, ticket = await submit(client, broker)
    other, other_ticket = await submit(client, broker)
    broker.say(events.Delta(ticket, OUT, 0, False), *frames)
    with pytest.raises(ProtocolViolation):
        await read(stream)
    assert await broker.hear() == events.CancelRequest(ticket)
    broker.delta(other_ticket, 0, last=True)
    broker.say(events.Completed(other_ticket))
    assert await read(other) == ["0"]


async def test_a_header_that_cannot_be_read_fails_every_stream(client: BusClient, broker: FakeBroker) -> None:
    """Whose event it was cannot be known; none may wait for what will not come."""
    streams = [(await submit(client, broker))[0] for _ in range(2)]
    broker.say_raw(b"junk")
    for stream in streams:
        with pytest.raises(ProtocolViolation):
            await read(stream)


async def test_events_for_tickets_that_have_ended_are_ignored(client: BusClient, broker: FakeBroker) -> None:
    stream, ticket = await submit(client, broker)
    broker.say(events.Completed(ticket, {"source": {"n": 1}}, {"source->client": 0.5}))
    broker.delta(ticket, 0)
    broker.say(events.RequestFailed(ticket, ErrorInfo("stage_failed", "")))
    broker.say(events.Consumed(ticket, "client->source", 1))
    broker.say(events.Completed(999))
    assert await read(stream) == []
    assert stream.usage == {"source": {"n": 1}}
    assert stream.first_chunks == {"source->client": 0.5}
    await stream.cancel()
    await stream.append(CHAT)
    _, next_ticket = await submit(client, broker)
    assert next_ticket == ticket + 1, "neither the cancel nor the append was sent"


async def test_credit_goes_back_as_the_reader_reads_and_never_for_more(client: BusClient, broker: FakeBroker) -> None:
    """Eight credits: told by twos, so that the producer never stands still for want of one."""
    stream, ticket = await submit(client, broker)
    for seq in range(8):
        broker.delta(ticket, seq)
    items = aiter(stream)
    for _ in range(5):
        await anext(items)
    assert [await broker.hear() for _ in range(2)] == [events.Consumed(ticket, OUT, 2)] * 2
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(broker._heard.get(), 0.05)


async def test_a_held_edge_gets_credit_for_what_was_used_up_and_not_for_what_was_read(
    client: BusClient, broker: FakeBroker
) -> None:
    stream, ticket = await submit(client, broker)
    stream.hold(OUT)
    for seq in range(4):
        broker.delta(ticket, seq)
    items = aiter(stream)
    for _ in range(4):
        await anext(items)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(broker._heard.get(), 0.05)
    for _ in range(2):
        stream.consumed(OUT)
    assert await broker.hear() == events.Consumed(ticket, OUT, 2)


async def test_a_shutdown_ends_every_stream_and_refuses_new_ones(client: BusClient, broker: FakeBroker) -> None:
    stream, _ = await submit(client, broker)
    asking = asyncio.ensure_future(client.status())
    assert isinstance(await broker.hear(), events.StatusQuery)
    broker.say(events.Shutdown())
    for waiting in (read(stream), asking, submit(client, broker)):
        with pytest.raises(ShuttingDown):
            await waiting


async def test_connecting_to_nobody_fails_in_time(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ShuttingDown):
        await BusClient.connect(f"ipc://{tmp_path}/nobody", PIPELINE, timeout_s=0.1)


async def test_a_client_may_connect_before_there_is_a_broker(tmp_path: pathlib.Path) -> None:
    connecting = asyncio.ensure_future(BusClient.connect(f"ipc://{tmp_path}/late", PIPELINE))
    await asyncio.sleep(0.05)
    broker = FakeBroker(f"ipc://{tmp_path}/late", credits=1)
    client = await connecting
    await client.close()
    broker.close()
