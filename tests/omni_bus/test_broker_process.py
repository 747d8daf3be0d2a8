"""The broker as a process: real sockets, scripted workers, the real client; peers that break, vanish or dawdle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import zmq

from omni_bus import events, wire
from omni_bus.client import BusClient, ClientStream
from omni_bus.deployment import BusConfig, RunDir
from omni_bus.errors import BrokerLost, Cancelled, OmniBusError, ReplicaLost, SequenceDuplicate, SequenceGap, ShuttingDown
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, Message, TextDelta, TextPart
from omni_bus.spec import load_pipeline
from omni_bus.wire import HostTensor
from tests.support.broker_process import PATIENCE_S, BrokerProcess, Peer, ScriptedWorker
from tests.support.bus_script import deployment

PIPELINE = load_pipeline("probe")
CHAT = ChatInput((Message("user", (TextPart("hello"),)),))
OUT = "source->client"


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> RunDir:
    path = tmp_path / "r"
    path.mkdir(mode=0o700)
    return RunDir(path)


@pytest.fixture
def broker(run_dir: RunDir) -> AsyncIterator[BrokerProcess]:
    process = BrokerProcess(run_dir, deployment(bus=BusConfig(retries=0), replicas={"source": 2}))
    yield process
    process.kill()


@pytest.fixture
async def client(broker: BrokerProcess) -> AsyncIterator[BusClient]:
    client = await BusClient.connect(broker.run_dir.broker, PIPELINE)
    yield client
    await client.close()


@pytest.fixture
async def worker(broker: BrokerProcess, client: BusClient) -> AsyncIterator[ScriptedWorker]:
    worker = ScriptedWorker(broker.run_dir, "source.0")
    worker.register()
    await ready(client)
    yield worker
    worker.close()


async def ready(client: BusClient, replicas: int = 1) -> None:
    """Until so many replicas are ready."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(replica.state == "ready" for replica in (await client.status()).replicas) < replicas:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def submit(client: BusClient, **more: object) -> ClientStream:
    return await client.submit(options=RequestOptions(), payload=CHAT, **more)  # type: ignore[arg-type]


def text(words: str) -> bytes:
    return wire.encode(TextDelta(words))


def finish(worker: ScriptedWorker, request: int, words: str = "end") -> None:
    worker.chunk(request, OUT, text(words), last=True)
    worker.say(events.Done(request, "source", {"completion_tokens": 1}))


async def read(stream: ClientStream) -> list[str]:
    words = []
    async for item in stream:
        assert isinstance(item.payload, TextDelta)
        words.append(item.payload.text)
    return words


async def serves(client: BusClient, worker: ScriptedWorker) -> None:
    """A good request is answered."""
    stream = await submit(client)
    request = (await worker.hear(events.Open)).request
    await worker.hear(events.Chunk, request=request)
    finish(worker, request, "good")
    assert await read(stream) == ["good"]
    await worker.hear(events.Close, request=request)


async def test_a_request_streams_through_with_its_tensors(client: BusClient, worker: ScriptedWorker) -> None:
    samples = HostTensor("float32", (2, 3), bytes(range(24)))
    stream = await client.submit(options=RequestOptions(), payload=CHAT, tensors={"media0": samples}, label="mine")
    opened = await worker.hear(events.Open)
    assert (opened.stage, opened.inputs) == ("source", ("client->source",))
    assert opened.outputs == (events.EdgeRoute(OUT, "inline", 4),)
    chunk, frames = await worker.hear_frames(events.Chunk)
    assert (chunk.seq, chunk.last) == (0, True)
    assert frames == [wire.encode(CHAT), samples.data]
    assert chunk.refs == (events.TensorRef("media0", "inline", "float32", (2, 3), 24, offset=1),)
    ref = events.TensorRef("pcm", "inline", "int16", (2,), 4, offset=1)
    worker.say(events.Chunk(opened.request, OUT, 0, True, (ref,)), text("one"), b"\1\0\2\0")
    worker.say(events.Done(opened.request, "source", {"completion_tokens": 7}))
    items = [item async for item in stream]
    assert [(item.edge, item.payload, item.last) for item in items] == [(OUT, TextDelta("one"), True)]
    pcm = items[0].tensors["pcm"]
    assert (pcm.dtype, pcm.shape, bytes(pcm.data)) == ("int16", (2,), b"\1\0\2\0")
    assert stream.usage == {"source": {"completion_tokens": 7}}
    assert list(stream.first_chunks) == [OUT] and 0 < stream.first_chunks[OUT] < 60
    await worker.hear(events.Close)


async def test_a_reader_that_stops_stalls_only_itself(client: BusClient, worker: ScriptedWorker) -> None:
    slow, fast = await submit(client), await submit(client)
    slow_id = (await worker.hear(events.Open)).request
    fast_id = (await worker.hear(events.Open)).request
    for _ in range(4):  # all the credit there is
        worker.chunk(slow_id, OUT, text("s"))
    fast_reader = asyncio.ensure_future(read(fast))
    for _ in range(20):
        worker.chunk(fast_id, OUT, text("f"))
        await worker.hear(events.Consumed, request=fast_id)
    finish(worker, fast_id)
    assert await fast_reader == ["f"] * 20 + ["end"]
    assert not [event for event in worker.heard(events.Consumed) if event.request == slow_id]
    slow_reader = asyncio.ensure_future(read(slow))
    assert (await worker.hear(events.Consumed, request=slow_id)).count == 1
    finish(worker, slow_id)
    assert await slow_reader == ["s"] * 4 + ["end"]


async def test_streamed_input_waits_for_credit(client: BusClient, worker: ScriptedWorker) -> None:
    stream = await submit(client, last=False)
    request = (await worker.hear(events.Open)).request
    for _ in range(3):
        await stream.append(CHAT)
    waiting = asyncio.ensure_future(stream.append(CHAT, last=True))
    for seq in range(4):
        await worker.hear(events.Chunk, seq=seq)
    await client.status()
    assert not waiting.done()
    worker.say(events.Consumed(request, "client->source", 1))
    await waiting
    assert (await worker.hear(events.Chunk, seq=4)).last
    finish(worker, request)
    assert await read(stream) == ["end"]


@pytest.mark.parametrize(("seqs", "kind"), [((1,), SequenceGap), ((0, 0), SequenceDuplicate), ((0, 2), SequenceGap)], ids=str)
async def test_a_gap_or_a_duplicate_fails_the_request_by_its_name(
    client: BusClient, worker: ScriptedWorker, seqs: tuple[int, ...], kind: type[OmniBusError]
) -> None:
    stream = await submit(client)
    request = (await worker.hear(events.Open)).request
    for seq in seqs:
        worker.say(events.Chunk(request, OUT, seq, False), text("x"))
    with pytest.raises(kind):
        await read(stream)
    await worker.hear(events.Cancel, request=request)
    worker.say(events.Cancelled(request, "source"))
    await serves(client, worker)


# ---- cancel


async def test_a_cancel_returns_when_it_is_acknowledged(client: BusClient, worker: ScriptedWorker) -> None:
    stream = await submit(client)
    request = (await worker.hear(events.Open)).request
    cancelling = asyncio.ensure_future(stream.cancel())
    await worker.hear(events.Cancel, request=request)
    await client.status()
    assert not cancelling.done()
    worker.say(events.Cancelled(request, "source"))
    await cancelling
    await stream.cancel()
    with pytest.raises(Cancelled):
        await read(stream)


async def leave_the_loop(stream: ClientStream) -> None:
    async for _ in stream:
        break


async def fail_in_the_loop(stream: ClientStream) -> None:
    with contextlib.suppress(LookupError):
        async for _ in stream:
            raise LookupError


async def be_cancelled_while_reading(stream: ClientStream) -> None:
    async def read_on() -> None:
        async for _ in stream:
            pass

    task = asyncio.ensure_future(read_on())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def leave_the_block(stream: ClientStream) -> None:
    async with stream:
        pass


async def never_look(stream: ClientStream) -> None:
    """The caller lets go of it."""


@pytest.mark.parametrize("drop", [leave_the_loop, fail_in_the_loop, be_cancelled_while_reading, leave_the_block, never_look])
async def test_a_stream_that_is_dropped_cancels_its_request(
    client: BusClient, worker: ScriptedWorker, drop: Callable[[ClientStream], Awaitable[None]]
) -> None:
    stream = await submit(client)
    request = (await worker.hear(events.Open)).request
    worker.chunk(request, OUT, text("x"))
    await drop(stream)
    del stream
    await worker.hear(events.Cancel, request=request)
    worker.say(events.Cancelled(request, "source"))
    await serves(client, worker)
    assert (await client.status()).ended == {"cancelled": 1, "done": 1}


async def test_the_requests_of_a_client_that_vanished_are_cancelled(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    """Nothing is ever sent to it, so only the closed connection tells."""
    vanishing = Peer(broker.run_dir.broker, wire.HeaderDecoder(events.BrokerToClient))
    vanishing.say(events.Hello("client"))
    vanishing.say(events.Submit(1, "", RequestOptions(), 300.0), wire.encode(CHAT))
    request = (await worker.hear(events.Open)).request
    vanishing.close()
    await worker.hear(events.Cancel, request=request)
    worker.say(events.Cancelled(request, "source"))
    await serves(client, worker)


async def test_a_client_that_closes_cancels_what_is_open(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    other = await BusClient.connect(broker.run_dir.broker, PIPELINE)
    stream = await submit(other)
    request = (await worker.hear(events.Open)).request
    reader = asyncio.ensure_future(read(stream))
    await asyncio.sleep(0)
    await other.close()
    with pytest.raises(Cancelled):
        await reader
    await worker.hear(events.Cancel, request=request)
    with pytest.raises(ShuttingDown):
        await submit(other)


async def test_a_client_that_closes_leaves_nothing(broker: BrokerProcess, client: BusClient, worker: ScriptedWorker) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    warm = await BusClient.connect(broker.run_dir.broker, PIPELINE)
    await warm.close()
    before, tasks = descriptors(), asyncio.all_tasks()
    for _ in range(5):
        other = await BusClient.connect(broker.run_dir.broker, PIPELINE)
        await submit(other)
        await other.close()
    assert asyncio.all_tasks() == tasks
    async with asyncio.timeout(PATIENCE_S):
        while descriptors() > before:  # noqa: ASYNC110  (ZeroMQ's own thread closes them)
            await asyncio.sleep(0.01)


# ---- peers that break


JUNK: dict[str, tuple[bytes, ...]] = {
    "an_empty_frame": (b"",),
    "two_empty_frames": (b"", b""),
    "noise": (os.urandom(200),),
    "text": (b"GET / HTTP/1.1\r\n\r\n",),
    "an_unknown_event": (b"\x81\xa1t\xa5Mince",),
    "a_field_of_a_wrong_type": (b"\x82\xa1t\xadCancelRequest\xa6ticket\xa1x",),
    "a_hundred_frames": tuple(b"x" for _ in range(100)),
    "a_megabyte": (b"\xff" * 2**20,),
    "a_worker_s_event": (wire.encode(events.Done(1, "source")),),
    "a_stop_from_a_client": (wire.encode(events.StopServing(0.0)),),
    "an_exit_from_a_client": (wire.encode(events.Exited("source.0")),),
    "a_submit_without_payload": (wire.encode(events.Submit(1, "", RequestOptions(), 5.0)),),
    "a_register_of_another_s_name": (
        wire.encode(
            events.Register(worker="source.0", pid=1, host="", boot="", replicas=(events.StageReplica("source", "cpu", 1),))
        ),
    ),
}


@pytest.mark.parametrize("greets", [True, False], ids=["from_a_client", "from_a_stranger"])
async def test_junk_hurts_only_its_sender(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker, greets: bool
) -> None:
    running = await submit(client)
    request = (await worker.hear(events.Open)).request
    for frames in JUNK.values():
        peer = Peer(broker.run_dir.broker, wire.HeaderDecoder(events.BrokerToClient | events.BrokerToWorker))
        if greets:
            peer.say(events.Hello("client"))
            await peer.hear(events.Welcome)
        peer.say_raw(*frames)
        await client.status()
        peer.close()
    finish(worker, request)
    assert await read(running) == ["end"]
    await serves(client, worker)
    assert broker.process.poll() is None


async def test_junk_from_a_worker_fails_its_requests_and_another_replica_serves_on(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    other = ScriptedWorker(broker.run_dir, "source.1")
    other.register()
    await ready(client, replicas=2)
    stream = await submit(client)
    await worker.hear(events.Open)
    worker.say_raw(b"junk")
    with pytest.raises(ReplicaLost):
        await read(stream)
    await worker.hear(events.Shutdown)
    await serves(client, other)
    other.close()


async def test_a_worker_whose_socket_closed_is_lost_at_the_next_word_to_it(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    stream = await submit(client, last=False)
    await worker.hear(events.Open)
    worker.close()
    with pytest.raises(OmniBusError) as caught:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await stream.append(CHAT)
                await client.status()
                if stream._request.sent == 4:  # the next would wait for credit
                    await read(stream)
    assert caught.value.code == "replica_lost"
    assert {replica.state for replica in (await client.status()).replicas if replica.worker == "source.0"} == {"lost"}


async def test_a_worker_that_the_supervisor_saw_exit_is_lost_at_once(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    supervisor = Peer(broker.run_dir.broker, wire.HeaderDecoder(events.BrokerToClient))
    supervisor.say(events.Hello("supervisor"))
    supervisor.say(events.StatusQuery(1, watch=True))
    await supervisor.hear(events.Status)
    stream = await submit(client)
    await worker.hear(events.Open)
    supervisor.say(events.Exited("source.0"))
    with pytest.raises(ReplicaLost):
        await read(stream)
    status = await supervisor.hear(events.Status)
    assert status.missing == ("source", "relay", "sink") and not status.ready
    supervisor.close()


# ---- the broker's own life


async def test_streams_end_when_the_broker_is_gone_and_the_next_broker_serves_the_same_client(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    stream, waiting = await submit(client), asyncio.ensure_future(client.status())
    await waiting
    reader = asyncio.ensure_future(read(stream))
    await worker.hear(events.Open)
    broker.kill()
    with pytest.raises(BrokerLost):
        await reader
    await stream.cancel()
    with pytest.raises(BrokerLost):
        await submit(client)
    broker.restart()
    worker.register()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(ShuttingDown):
                if (await client.status()).replicas[0].state == "ready":
                    break
            await asyncio.sleep(0.02)
    await serves(client, worker)


async def test_a_client_that_watches_is_told_of_each_change_and_of_the_brokers_going_and_coming(
    broker: BrokerProcess, client: BusClient
) -> None:
    told = asyncio.Event()
    client.watch(told.set)

    async def until(holds: Callable[[], Awaitable[bool]]) -> None:
        """Looks when it is told, and never else."""
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():
                await told.wait()
                told.clear()

    async def is_ready() -> bool:
        with contextlib.suppress(ShuttingDown):
            return any(replica.state == "ready" for replica in (await client.status()).replicas)
        return False

    async def is_gone() -> bool:
        with contextlib.suppress(ShuttingDown):
            await client.status()
            return False
        return True

    worker = ScriptedWorker(broker.run_dir, "source.0")
    worker.register()
    await until(is_ready)
    broker.kill()
    await until(is_gone)
    broker.restart()
    worker.register()
    await until(is_ready)
    worker.close()


async def test_a_worker_that_an_earlier_broker_knew_attaches_to_the_next_one(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    broker.restart()
    worker.say(events.Heartbeat(()))  # of a step that the old broker's end came into
    worker.register()
    again = await BusClient.connect(broker.run_dir.broker, PIPELINE)
    await ready(again)
    await serves(again, worker)
    assert not worker.heard(events.Shutdown)
    await again.close()


async def test_a_stopped_worker_is_lost_long_before_a_slow_one_would_be(run_dir: RunDir) -> None:
    """Its connection stands; what is missing is the answer of its process to ZeroMQ's own heartbeats."""
    broker = BrokerProcess(run_dir, deployment(bus=BusConfig(heartbeat_s=0.2, lost_after_s=2.0, step_s=3600)))
    script = (
        "import sys, time, zmq; s = zmq.Context().socket(zmq.DEALER); s.setsockopt(zmq.ROUTING_ID, sys.argv[2].encode());"
        " s.connect(sys.argv[1]); [s.send(bytes.fromhex(each)) for each in sys.argv[3:]]; print('up', flush=True); time.sleep(600)"
    )
    register = events.Register(
        worker="source.0", pid=1, host="h", boot="b", replicas=(events.StageReplica("source", "cpu", 4),)
    )
    said = [wire.encode(event).hex() for event in (register, events.Ready("source", 4))]
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", script, run_dir.broker, "source.0", *said)
    try:
        client = await BusClient.connect(run_dir.broker, PIPELINE)
        await ready(client)
        await asyncio.sleep(4.0)  # nothing is said, and all are well
        assert "is lost" not in broker.log
        other.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            while "source.0 is lost: its connection is gone" not in broker.log:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await client.close()
    finally:
        other.kill()
        await other.wait()
        broker.kill()


async def test_sigterm_ends_in_order(broker: BrokerProcess, client: BusClient, worker: ScriptedWorker) -> None:
    stream = await submit(client)
    request = (await worker.hear(events.Open)).request
    reader = asyncio.ensure_future(read(stream))
    broker.process.send_signal(signal.SIGTERM)
    await worker.hear(events.Drain)
    await worker.hear(events.Cancel, request=request)
    with pytest.raises(ShuttingDown):
        await reader
    worker.say(events.Cancelled(request, "source"))
    await worker.hear(events.Shutdown)
    assert await asyncio.to_thread(broker.process.wait, PATIENCE_S) == 0
    assert not (broker.run_dir.path / "broker.sock").exists()


async def test_sigterm_does_not_wait_for_a_worker_that_never_answers(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    await submit(client)
    await worker.hear(events.Open)
    broker.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(broker.process.wait, PATIENCE_S) == 0


async def test_the_supervisor_s_stop_refuses_waits_and_tells_all(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    supervisor = Peer(broker.run_dir.broker, wire.HeaderDecoder(events.BrokerToClient))
    supervisor.say(events.Hello("supervisor"))
    running = await submit(client)
    request = (await worker.hear(events.Open)).request
    supervisor.say(events.StopServing(60.0))
    await worker.hear(events.Drain)
    with pytest.raises(ShuttingDown):
        await read(await submit(client))
    finish(worker, request)
    assert await read(running) == ["end"]
    await worker.hear(events.Shutdown)
    await supervisor.hear(events.Shutdown)
    assert broker.process.poll() is None, "the supervisor ends it, when the others have gone"
    assert await asyncio.to_thread(broker.stop) == 0
    supervisor.close()


async def test_ctrl_c_is_for_the_supervisor(broker: BrokerProcess, client: BusClient, worker: ScriptedWorker) -> None:
    broker.process.send_signal(signal.SIGINT)
    await serves(client, worker)


def test_the_broker_dies_with_its_supervisor(run_dir: RunDir) -> None:
    run_dir.write(deployment())
    parent = (
        "import subprocess, sys, zmq\n"
        "from omni_bus import events, wire\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'omni_bus.broker_main', {str(run_dir.path)!r}])\n"
        "socket = zmq.Context().socket(zmq.DEALER)\n"
        f"socket.connect({run_dir.broker!r})\n"
        "socket.send(wire.encode(events.Hello('client')))\n"
        "socket.recv()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    watch = os.pidfd_open(pid)
    supervisor.kill()
    supervisor.wait(PATIENCE_S)
    poller = zmq.Poller()
    poller.register(watch, zmq.POLLIN)
    ended = poller.poll(PATIENCE_S * 1000)
    os.close(watch)
    assert ended


async def test_an_idle_broker_sleeps(broker: BrokerProcess, client: BusClient, worker: ScriptedWorker) -> None:
    await serves(client, worker)
    before = broker.cpu_s()
    await asyncio.sleep(2.0)
    assert broker.cpu_s() - before <= 0.05


async def test_an_ended_request_leaves_one_line_in_the_log(
    broker: BrokerProcess, client: BusClient, worker: ScriptedWorker
) -> None:
    stream = await submit(client, label="chat/../42\n")
    request = (await worker.hear(events.Open)).request
    finish(worker, request)
    await read(stream)
    lines = [line for line in broker.log.splitlines() if f"request {request} " in line]
    assert len(lines) == 1 and " label=chat____42_ done first_output_s=" in lines[0]
