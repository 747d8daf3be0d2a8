"""The broker's door for other hosts: who gets in, what they are told, what they may say, and that a cut connection is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import random
import socket
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import zmq

from omni_bus import __version__, events, wire
from omni_bus.attach import OTHER_SERVER
from omni_bus.client import BusClient
from omni_bus.curve_client import secure
from omni_bus.deployment import Deployment, RunDir
from omni_bus.errors import ReplicaLost
from omni_bus.events import Attach, Attached, EdgeRoute, Refused, RequestOptions
from omni_bus.keys import KeyPair, KnownKeys, WorkerKey
from omni_bus.payloads import ChatInput, Message, TextDelta, TextPart
from omni_bus.remote_door import RemoteDoor
from omni_bus.spec import load_pipeline
from tests.support.broker_process import PATIENCE_S, Peer, ScriptedWorker
from tests.support.remote_peer import ListeningBroker, RemotePeer
from tests.support.tcp_wire import Wire

PIPELINE = load_pipeline("probe")
CHAT = ChatInput((Message("user", (TextPart("hello"),)),))
OUT = "source->client"
FAR = "source@far-1.0"
ASK = Attach(stages=("relay",), version=__version__)
NOTICED_MS = 3000  # docs/remote.md: a connection that is cut


@pytest.fixture
def broker(tmp_path: pathlib.Path) -> Iterator[ListeningBroker]:
    path = tmp_path / "r"
    path.mkdir(mode=0o700)
    process = ListeningBroker(RunDir(path), tmp_path, retries=1)
    yield process
    process.kill()


@pytest.fixture
async def client(broker: ListeningBroker) -> AsyncIterator[BusClient]:
    client = await BusClient.connect(broker.run_dir.broker, PIPELINE)
    yield client
    await client.close()


@contextlib.contextmanager
def peer(broker: ListeningBroker, name: str, key: WorkerKey | None, endpoint: str = "") -> Iterator[RemotePeer]:
    far = RemotePeer(endpoint or broker.endpoint, name, key)
    try:
        yield far
    finally:
        far.close()


async def states(client: BusClient) -> dict[str, str]:
    return {replica.worker: replica.state for replica in (await client.status()).replicas}


async def until_state(client: BusClient, worker: str, state: str | None) -> None:
    """None: the broker knows it no longer."""
    async with asyncio.timeout(PATIENCE_S):
        while (await states(client)).get(worker) != state:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_logged(broker: ListeningBroker, text: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while text not in broker.log:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def server(broker: ListeningBroker) -> str:
    secrets = broker.run_dir.secrets()
    assert secrets is not None
    return secrets.server


async def answered(client: BusClient, worker: Peer) -> None:
    """A request is served by that worker."""
    stream = await client.submit(options=RequestOptions(), payload=CHAT)
    request = (await worker.hear(events.Open)).request
    await worker.hear(events.Chunk, request=request)
    worker.say(events.Chunk(request, OUT, 0, True), wire.encode(TextDelta("far")))
    worker.say(events.Done(request, "source"))
    async with asyncio.timeout(PATIENCE_S):
        assert [item.payload async for item in stream] == [TextDelta("far")]


async def test_a_known_key_is_told_the_deployment_without_what_concerns_the_api(
    broker: ListeningBroker, client: BusClient
) -> None:
    with peer(broker, "attach@far-1.0", broker.key) as far:
        far.say(ASK)
        said = await far.hear(Attached)
    told = msgspec.json.decode(said.deployment, type=Deployment)
    assert told.stages == broker.plan.stages and told.model == broker.plan.model
    assert b"/secret/file" not in said.deployment and told.bus.keys == ""
    assert said.server == server(broker) and said.data_secret not in broker.log
    assert not any("attach" in worker for worker in await states(client))


async def test_a_remote_worker_registers_serves_and_leaves(broker: ListeningBroker, client: BusClient) -> None:
    with peer(broker, FAR, broker.key) as far:
        far.register(server(broker))
        await until_state(client, FAR, "ready")
        await answered(client, far)
        far.say(events.Leave())
        await far.hear(events.Drain)
        await far.hear(events.Shutdown)
    await until_state(client, FAR, None)


async def test_a_worker_that_leaves_finishes_what_it_has(broker: ListeningBroker, client: BusClient) -> None:
    with peer(broker, FAR, broker.key) as far:
        far.register(server(broker))
        await until_state(client, FAR, "ready")
        stream = await client.submit(options=RequestOptions(), payload=CHAT)
        request = (await far.hear(events.Open)).request
        far.say(events.Leave())
        await far.hear(events.Drain)
        await until_state(client, FAR, "draining")
        assert not far.heard(events.Shutdown)
        far.say(events.Chunk(request, OUT, 0, True), wire.encode(TextDelta("whole")))
        far.say(events.Done(request, "source"))
        async with asyncio.timeout(PATIENCE_S):
            assert [item.payload async for item in stream] == [TextDelta("whole")]
        await far.hear(events.Shutdown)


async def test_tensors_take_the_data_sockets_where_hosts_differ(broker: ListeningBroker, client: BusClient) -> None:
    near = ScriptedWorker(broker.run_dir, "source.0")
    sink = ScriptedWorker(broker.run_dir, "sink.0")
    with peer(broker, "relay@far-1.0", broker.key) as far:
        for worker, port in ((near, 7), (sink, 8)):
            stage = worker.name.split(".")[0]
            replicas = (events.StageReplica(stage, "cpu", 4),)
            data = f"tcp://*:{port}"
            worker.say(events.Register(worker=worker.name, pid=os.getpid(), host="far", boot="b", replicas=replicas, data=data))
            worker.say(events.Ready(stage, 4))
        far.register(server(broker), data="tcp://10.0.0.2:9")
        async with asyncio.timeout(PATIENCE_S):
            while not (await client.status()).ready:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        _stream = await client.submit(options=RequestOptions(modalities=("text", "audio")), payload=CHAT)
        routes = {worker: (await worker.hear(events.Open)).outputs for worker in (near, far, sink)}
        # The same host's name changes nothing: what came over the network shares no memory with anybody.
        assert [route for route in routes[near] if route.edge == "source->relay"] == [
            EdgeRoute("source->relay", "tcp", 64, "tcp://10.0.0.2:9")
        ]
        assert routes[far] == (EdgeRoute("relay->sink", "tcp", 64, "tcp://*:8"),)
        assert routes[sink] == (EdgeRoute("sink->client", "inline", 64),)
    near.close()
    sink.close()


@pytest.mark.parametrize("kind", ["no key", "unknown key", "another server's key"])
async def test_without_a_known_key_nothing_is_heard_and_the_log_says_so_once(
    broker: ListeningBroker, client: BusClient, kind: str
) -> None:
    good = broker.key
    key, reason = {
        "no key": (None, "refused a connection"),  # either end may be the first to see that they do not understand each other
        "unknown key": (WorkerKey(KeyPair.new(), good.server), "its key is not known here"),
        "another server's key": (WorkerKey(good.pair, KeyPair.new().public), "refused a connection"),
    }[kind]
    for _ in range(4):
        with peer(broker, "attach@far-1.0", key) as stranger:
            stranger.say(ASK)
            await until_logged(broker, reason)
            await asyncio.sleep(0.3)  # long enough for more tries, and an answer, if there were one
            assert not stranger.heard(Attached)
    told = [line.partition("refused")[2] for line in broker.log.splitlines() if "refused a connection" in line]
    assert told and len(told) == len(set(told)), told
    assert key is None or (key.pair.public not in broker.log and key.pair.secret not in broker.log)
    with peer(broker, "attach@far-2.0", good) as far:
        far.say(ASK)
        await far.hear(Attached)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"protocol": 99}, f"the broker has protocol {events.PROTOCOL} and the worker protocol 99"),
        ({"version": "9.9.9"}, f"the broker has omni-bus {__version__} and the worker omni-bus 9.9.9"),
        ({"version": ""}, "the worker omni-bus of an unknown version"),
        ({"pipeline": "cascade"}, 'the broker has pipeline probe and the worker pipeline "cascade"'),
        ({"stages": ("rely",)}, 'pipeline probe of the broker has no stage "rely" (did you mean "relay"?)'),
    ],
)
async def test_what_does_not_fit_is_told_with_both_sides(
    broker: ListeningBroker, changes: dict[str, object], says: str
) -> None:
    with peer(broker, "attach@far-1.0", broker.key) as far:
        far.say(msgspec.structs.replace(ASK, **changes))
        assert says in (await far.hear(Refused)).error.message
    if "stages" not in changes:
        with peer(broker, FAR, broker.key) as far:
            far.register(server(broker), **changes)
            assert says in (await far.hear(Refused)).error.message


async def test_a_worker_of_an_earlier_server_is_told_to_attach_anew(broker: ListeningBroker, client: BusClient) -> None:
    with peer(broker, FAR, broker.key) as far:
        far.register("0123456789abcdef")
        assert (await far.hear(Refused)).error.code == OTHER_SERVER
        assert FAR not in await states(client)


@pytest.mark.parametrize(
    "name", ["source.0", "source", "@far.0", "source@far", "source@far/x.0", "source@" + "f" * 60 + ".0", ""]
)
async def test_a_name_that_is_not_for_other_hosts_gets_no_answer(broker: ListeningBroker, client: BusClient, name: str) -> None:
    near = ScriptedWorker(broker.run_dir, "source.0")
    near.register()
    await until_state(client, "source.0", "ready")
    with peer(broker, name, broker.key) as far:
        far.say(ASK)
        far.register(server(broker))
        await asyncio.sleep(0.5)
        assert not far.heard(Attached) and not far.heard(Refused)
    assert (await states(client))["source.0"] == "ready"
    await answered(client, near)
    near.close()


async def test_other_hosts_may_say_only_what_workers_say(broker: ListeningBroker, client: BusClient) -> None:
    near = ScriptedWorker(broker.run_dir, "source.0")
    near.register()
    await until_state(client, "source.0", "ready")
    with peer(broker, FAR, broker.key) as far:
        far.say(events.Hello("supervisor"))
        far.say(events.StopServing(0.0))
        far.say(events.Exited("source.0"))
        far.say(events.Submit(1, "", RequestOptions(), 10.0), wire.encode(CHAT))
        far.say(events.StatusQuery(1))
        far.say(ASK)
        await far.hear(Attached)  # the broker has read all of it
        assert not far.heard(events.Shutdown)
    local = Peer(broker.run_dir.broker, wire.HeaderDecoder(events.BrokerToWorker), FAR.encode())
    local.say(ASK)  # and that name is not for us
    await answered(client, near)
    assert not local.heard(Attached)
    local.close()
    near.close()


async def test_ten_thousand_random_frames_do_no_harm(broker: ListeningBroker, client: BusClient) -> None:
    port = int(broker.endpoint.rsplit(":", 1)[1])
    dice = random.Random(5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x00" + bytes(31)
    sent = 0
    while sent < 10_000:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stranger:
            stranger.settimeout(PATIENCE_S)
            if dice.random() < 0.5:
                stranger.sendall(greeting)  # as far as anybody gets without a key
            for _ in range(100):
                sent += 1
                stranger.sendall(dice.randbytes(dice.randint(1, 80)))
    with peer(broker, "attach@far-1.0", broker.key) as far:
        for _ in range(2000):
            far.say_raw(*(dice.randbytes(dice.randint(0, 60)) for _ in range(dice.randint(1, 4))))
        far.say(ASK)
        await far.hear(Attached)
    with peer(broker, FAR, broker.key) as far:
        far.register(server(broker))
        await until_state(client, FAR, "ready")
        await answered(client, far)


@pytest.mark.parametrize("side", ["broker", "worker"])
async def test_by_its_heartbeats_neither_side_takes_a_cut_connection_for_whole_after_three_seconds(
    tmp_path: pathlib.Path, side: str
) -> None:
    """Read back from the sockets as they are made: how soon a cut is noticed is ZeroMQ's doing, and no test can time it soundly."""
    server, theirs = KeyPair.new(), KeyPair.new()
    with zmq.Context() as context:
        if side == "broker":
            door = RemoteDoor(
                context,
                "tcp://127.0.0.1:*",
                server,
                KnownKeys(tmp_path),
                on_message=lambda frames: None,
                on_closed=lambda: None,
                log=lambda line: None,
            )
            options = heartbeats(door._socket)
            door.close()
        else:
            with context.socket(zmq.DEALER) as socket:
                secure(socket, "tcp://127.0.0.1:1", WorkerKey(theirs, server.public))
                options = heartbeats(socket)
    interval, timeout, ttl = options
    assert interval > 0 and timeout > 0, "0 would be none at all"
    assert interval + timeout <= NOTICED_MS, "asked after a silence, and no answer"
    assert interval < ttl <= NOTICED_MS, "the other end is told by it how long our silence may last"


def heartbeats(socket: zmq.Socket[bytes]) -> tuple[int, int, int]:
    """Interval, time for the answer, and how long the other end may wait for the next one; ms."""
    interval, timeout, ttl = (
        socket.getsockopt(option) for option in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL)
    )
    assert isinstance(interval, int) and isinstance(timeout, int) and isinstance(ttl, int)
    return interval, timeout, ttl


async def test_a_cut_connection_is_noticed_and_a_healed_one_registers_anew(broker: ListeningBroker, client: BusClient) -> None:
    async with Wire(int(broker.endpoint.rsplit(":", 1)[1])) as line:
        with peer(broker, FAR, broker.key, f"tcp://127.0.0.1:{line.port}") as far:
            far.register(server(broker))
            await until_state(client, FAR, "ready")
            stream = await client.submit(options=RequestOptions(), payload=CHAT)
            request = (await far.hear(events.Open)).request
            far.say(events.Chunk(request, OUT, 0, False), wire.encode(TextDelta("half")))
            async with asyncio.timeout(PATIENCE_S):
                items = aiter(stream)
                assert (await anext(items)).payload == TextDelta("half")
            line.cut()
            with pytest.raises(ReplicaLost):
                async with asyncio.timeout(PATIENCE_S):
                    await anext(items)
            await until_state(client, FAR, None)
            line.heal()
            far.register(server(broker))
            await until_state(client, FAR, "ready")
            await answered(client, far)


async def test_a_request_that_has_sent_nothing_runs_again_elsewhere(broker: ListeningBroker, client: BusClient) -> None:
    async with Wire(int(broker.endpoint.rsplit(":", 1)[1])) as line:
        with peer(broker, FAR, broker.key, f"tcp://127.0.0.1:{line.port}") as far:
            far.register(server(broker))
            await until_state(client, FAR, "ready")
            stream = await client.submit(options=RequestOptions(), payload=CHAT)
            await far.hear(events.Open)
            near = ScriptedWorker(broker.run_dir, "source.0")
            near.register()
            await until_state(client, "source.0", "ready")
            line.cut()
            request = (await near.hear(events.Open)).request
            near.chunk(request, OUT, wire.encode(TextDelta("near")), last=True)
            near.say(events.Done(request, "source"))
            async with asyncio.timeout(PATIENCE_S):
                assert [item.payload async for item in stream] == [TextDelta("near")]
            near.close()


async def test_a_port_that_is_taken_is_told_in_one_line(
    broker: ListeningBroker, client: BusClient, tmp_path: pathlib.Path
) -> None:
    assert await client.status()  # by now the first one has the port
    second = tmp_path / "second"
    second.mkdir(mode=0o700)
    run_dir = RunDir(second)
    other = ListeningBroker(run_dir, tmp_path)
    other.kill()
    run_dir.write(broker.plan)
    other.process = other._start()
    assert other.process.wait(PATIENCE_S) == 2
    last = other.log.splitlines()[-1]
    assert last == f"bus.listen: cannot listen at {broker.endpoint}: Address already in use"
