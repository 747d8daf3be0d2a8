"""The bus's seven rules with nothing scripted: the broker's process, three worker processes, clients over real sockets."""

from __future__ import annotations

import asyncio
import pathlib
import random
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from omni_bus import events, wire
from omni_bus.client import BusClient, ClientStream
from omni_bus.deployment import RunDir
from omni_bus.errors import Cancelled, DeadlineExceeded, ReplicaLost, StageFailed
from omni_bus.events import RequestOptions
from omni_bus.payloads import AudioDelta, ChatInput, Message, TextDelta, TextPart
from omni_bus.spec import load_pipeline
from tests.support.broker_process import PATIENCE_S, BrokerProcess, Peer
from tests.support.worker_process import WorkerProcess, deployment

PIPELINE = load_pipeline("probe")
STAGES = tuple(stage.name for stage in PIPELINE.stages)
TENSOR_BYTES = 200_000  # beside each word; too large for a frame, so it goes through shared memory


class Server:
    """Broker and workers, and what a supervisor does for them."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.broker = BrokerProcess(run_dir, deployment(source={"tensor_bytes": TENSOR_BYTES}))
        self.workers = {stage: WorkerProcess(run_dir, f"{stage}.0", grace_s=30) for stage in STAGES}

    async def replace(self, stage: str) -> None:
        """Wait for the end of a stage's process, tell the broker, start another."""
        await asyncio.to_thread(self.workers[stage].process.wait, PATIENCE_S)
        boss = Peer(self.run_dir.broker, wire.HeaderDecoder(events.BrokerToClient))
        boss.say(events.Hello("supervisor"))
        boss.say(events.Exited(f"{stage}.0"))
        boss.say(events.StatusQuery(1))
        await boss.hear(events.Status)
        boss.close()
        self.workers[stage] = WorkerProcess(self.run_dir, f"{stage}.0", grace_s=30)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.process.terminate()
        for worker in self.workers.values():
            worker.stop()
        self.broker.kill()
        for worker in self.workers.values():
            assert not worker.segments()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: pathlib.Path = tmp_path_factory.mktemp("rules") / "r-rules"
    path.mkdir(mode=0o700)
    server = Server(RunDir(path))
    yield server
    server.close()


async def ready(client: BusClient) -> None:
    async with asyncio.timeout(120):
        while not (await client.status()).ready:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[BusClient]:
    """At the end of each test no stage may hold anything of any request."""
    client = await BusClient.connect(server.run_dir.broker, PIPELINE)
    await ready(client)
    yield client
    async with asyncio.timeout(PATIENCE_S):
        while not clean(await client.status()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await client.close()


def clean(status: events.Status) -> bool:
    loads = [replica.load for replica in status.replicas]
    return (
        status.ready
        and not any(status.requests.values())
        and all(load is not None and load.running + load.waiting + load.segments_used + load.held == 0 for load in loads)
    )


async def say(client: BusClient, text: str, *modalities: str, deadline_s: float = 60.0, label: str = "") -> ClientStream:
    return await client.submit(
        options=RequestOptions(modalities=modalities or ("text", "audio")),
        payload=ChatInput((Message("user", (TextPart(text),)),)),
        deadline_s=deadline_s,
        label=label,
    )


async def read(stream: ClientStream) -> tuple[str, int]:
    """The text, and the number of audio samples."""
    text, samples = "", 0
    async for item in stream:
        if isinstance(item.payload, TextDelta):
            text += item.payload.text
        elif isinstance(item.payload, AudioDelta) and "pcm" in item.tensors:
            samples += item.tensors["pcm"].shape[0]
    return text, samples


async def test_1_every_chunk_comes_in_order_through_every_stage(client: BusClient) -> None:
    streams = [await say(client, f"!repeat:{100 + n}") for n in range(4)]
    answers = await asyncio.gather(*(read(stream) for stream in streams))
    for n, (text, samples) in enumerate(answers):
        assert text.split() == [str(word) for word in range(100 + n)]
        assert samples == 1920 * (100 + n)
        assert streams[n].usage["source"]["completion_tokens"] == 100 + n


async def test_2_each_request_ends_once_whenever_it_is_cancelled(client: BusClient) -> None:
    chance = random.Random(7)
    before = (await client.status()).ended

    async def one(number: int) -> str:
        stream = await say(client, f"!repeat:{chance.randrange(1, 40)}")
        left = chance.randrange(60)
        try:
            async for _ in stream:
                left -= 1
                if left == 0:
                    await stream.cancel()
        except Cancelled:
            return "cancelled"
        return "done"

    outcomes = await asyncio.gather(*(one(n) for n in range(40)))
    after = (await client.status()).ended
    for outcome in ("done", "cancelled"):
        assert after.get(outcome, 0) - before.get(outcome, 0) == outcomes.count(outcome) > 0


async def test_3_when_a_cancel_is_acknowledged_the_shared_memory_is_free(client: BusClient) -> None:
    """The fixture looks at what the stages hold; no later request has given anything back."""
    stream = await say(client, "!repeat:100000")
    async for item in stream:
        if isinstance(item.payload, AudioDelta):
            break
    await stream.cancel()
    assert not any((await client.status()).requests.values())


async def test_4_a_reader_that_stops_stalls_its_own_request_only(client: BusClient) -> None:
    slow = await say(client, "!repeat:5000")
    await read(await say(client, "!repeat:300"))
    sent = (await client.status()).edge_chunks
    assert await read(await say(client, "!repeat:300")) == ("".join(f"{n} " for n in range(300)), 1920 * 300)
    again = (await client.status()).edge_chunks
    assert {edge: again[edge] - sent[edge] for edge in ("source->client", "source->relay")} == {
        "source->client": 300,
        "source->relay": 300,
    }, "the stalled request sent nothing meanwhile"
    await slow.cancel()


async def test_5_tickets_and_labels_of_clients_do_not_meet(server: Server, client: BusClient) -> None:
    other = await BusClient.connect(server.run_dir.broker, PIPELINE)
    streams = [await say(each, word, label="../same") for each, word in ((client, "mine"), (other, "yours"))]
    assert [(await read(stream))[0] for stream in streams] == ["mine ", "yours "]
    await other.close()


async def test_6_a_stage_that_waits_past_the_deadline_fails_that_request_only(client: BusClient) -> None:
    stuck = await say(client, "a !hang:relay b", deadline_s=0.5)
    well = await say(client, "!repeat:50")
    assert (await read(well))[0].split()[-1] == "49"
    with pytest.raises(DeadlineExceeded):
        await read(stuck)


async def test_7_an_exception_in_a_stage_fails_one_request(client: BusClient) -> None:
    well = await say(client, "!repeat:200")
    bad = await say(client, "a !raise:relay b")
    with pytest.raises(StageFailed):
        await read(bad)
    assert (await read(well))[1] == 1920 * 200


async def test_7_a_dead_replica_fails_what_is_bound_to_it_and_the_server_goes_on(server: Server, client: BusClient) -> None:
    text_only = await say(client, "a !sleep:source:300 b", "text")
    dying = await say(client, "a !exit:sink")
    replacing = asyncio.ensure_future(server.replace("sink"))
    with pytest.raises(ReplicaLost):
        await read(dying)
    assert (await read(text_only))[0].split() == ["a", "!sleep:source:300", "b"]
    await replacing
    await ready(client)
    assert (await read(await say(client, "hello")))[1] == 1920
    (sink,) = [replica for replica in (await client.status()).replicas if replica.stage == "sink"]
    assert sink.restarts >= 1


async def test_7_a_request_without_output_runs_again_when_its_replica_died(server: Server, client: BusClient) -> None:
    stream = await say(client, "!sleep:source:3000 hello")  # is bound by then, and has said nothing for three seconds
    await client.status()
    server.workers["relay"].process.send_signal(signal.SIGKILL)
    replacing = asyncio.ensure_future(server.replace("relay"))
    assert await read(stream) == ("!sleep:source:3000 hello ", 1920 * 2)
    await replacing
