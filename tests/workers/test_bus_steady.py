"""The real broker with real probe workers: whatever requests do, nothing of them stays."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq

from omni_bus import events, segments, wire
from omni_bus.client import BusClient, ClientStream
from omni_bus.deployment import Deployment, RunDir
from omni_bus.errors import Cancelled, OmniBusError, ReplicaLost
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, Message, TextDelta, TextPart
from omni_bus.segments import SHM
from omni_bus.spec import load_pipeline
from tests.support.worker_process import WorkerProcess, deployment

PATIENCE_S = 120.0
BIG = 80_000  # bytes beside each word: through shared memory
GROWTH_KIB = (
    6 << 10
)  # of a process's private memory over 1,000 requests; a leak of one chunk's tensor each would be 13 times that


class Bus:
    """Broker and workers as processes, a client, and the supervisor's word."""

    def __init__(self, run_dir: RunDir, plan: Deployment) -> None:
        self.run_dir = run_dir
        run_dir.write(plan)
        with run_dir.log("broker").open("wb") as log:
            self.broker = subprocess.Popen(
                [sys.executable, "-m", "omni_bus.broker_main", str(run_dir.path)], stdout=log, stderr=log
            )
        self.workers = {name: WorkerProcess(run_dir, name, grace_s=30) for name in plan.workers()}

    async def connect(self) -> None:
        self.client = await BusClient.connect(self.run_dir.broker, load_pipeline("probe"))
        await self.until(lambda status: status.ready and all(replica.state == "ready" for replica in status.replicas))

    async def until(self, good: object) -> events.Status:
        """The first status that is good."""
        assert callable(good)
        end = time.monotonic() + PATIENCE_S
        while not good(status := await self.client.status()):
            assert time.monotonic() < end, status
            await asyncio.sleep(0.1)
        return status

    async def submit(self, text: str, *, audio: bool = True) -> ClientStream:
        options = RequestOptions(modalities=("text", "audio") if audio else ("text",))
        payload = ChatInput((Message("user", (TextPart(text),)),))
        return await self.client.submit(options=options, payload=payload, deadline_s=PATIENCE_S)

    async def empty(self) -> events.Status:
        """Wait until every table is empty: the broker's, the workers', the stages', the connectors'."""
        return await self.until(
            lambda status: (
                not any(status.requests.values())
                and all(
                    (replica.load.held, replica.load.segments_used, replica.load.slots_used) == (0, 0, 0)
                    for replica in status.replicas
                    if replica.load is not None and replica.state == "ready"
                )
            )
        )

    @staticmethod
    def loads(status: events.Status) -> dict[str, events.StageLoad]:
        """By worker; each hosts one stage here."""
        return {replica.worker: replica.load for replica in status.replicas if replica.load is not None}

    def exited(self, worker: str) -> None:
        """What the supervisor does after a death."""
        segments.sweep(tag=self.run_dir.tag, pid=self.workers[worker].pid)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(self.run_dir.broker)
        socket.send(wire.encode(events.Hello("supervisor")))
        socket.send(wire.encode(events.Exited(worker)))
        socket.close(linger=5000)

    def private_kib(self) -> dict[str, int]:
        pids = {"broker": self.broker.pid} | {name: worker.pid for name, worker in self.workers.items()}
        found = {}
        for name, pid in pids.items():
            [line] = [
                line for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")
            ]
            found[name] = int(line.split()[1])
        return found

    def shared(self) -> dict[str, int]:
        """Segment → bytes."""
        return {path.name: path.stat().st_blocks * 512 for path in SHM.glob(f"omnibus-{self.run_dir.tag}-*")}

    def stop(self) -> None:
        for process in (*(worker.process for worker in self.workers.values()), self.broker):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in (*(worker.process for worker in self.workers.values()), self.broker):
            process.wait(PATIENCE_S)


@contextlib.contextmanager
def running(run_dir: RunDir, plan: Deployment) -> Iterator[Bus]:
    bus = Bus(run_dir, plan)
    try:
        yield bus
    finally:
        bus.stop()
    assert bus.shared() == {}


@pytest.fixture(scope="module")
def processes(module_run_dir: RunDir) -> Iterator[Bus]:
    with running(module_run_dir, deployment(source={"tensor_bytes": BIG}, relay={"replicas": 2})) as bus:
        yield bus


@pytest.fixture
async def bus(processes: Bus) -> AsyncIterator[Bus]:
    """Connected, every worker ready. Each test leaves the bus empty and complete."""
    await processes.connect()
    yield processes
    await processes.empty()
    await processes.client.close()


async def converse(bus: Bus, number: int, dice: random.Random) -> str:
    """One request to its end; about three of ten are cancelled at a moment that the dice choose. How it ended."""
    words = [f"w{number}.{index}" for index in range(dice.randint(1, 10))]
    audio = dice.random() < 0.7
    cancel_after = dice.choice(["at once", "pause", dice.randint(1, len(words))]) if number % 10 < 3 else None
    stream = await bus.submit(" ".join(words), audio=audio)
    if cancel_after == "pause":
        await asyncio.sleep(dice.random() * 0.05)
    if cancel_after in ("at once", "pause"):
        await stream.cancel()
        return "cancelled"
    said, sounds = [], 0
    try:
        async for item in stream:
            if isinstance(item.payload, TextDelta):
                said.append(item.payload.text.strip())
            else:
                sounds += 1
                assert bytes(item.tensors["pcm"].data) == sounds.to_bytes(2, "little") * 1920
            if len(said) == cancel_after:
                await stream.cancel()
                return "cancelled"
    except Cancelled:
        return "cancelled"
    assert said == words and sounds == (len(words) if audio else 0)
    return "done"


async def crowd(bus: Bus, count: int, dice: random.Random, width: int = 24) -> collections.Counter[str]:
    """`count` requests, `width` at a time."""
    ends: collections.Counter[str] = collections.Counter()
    numbers = iter(range(count))

    async def one_after_another() -> None:
        for number in numbers:
            ends[await converse(bus, number, dice)] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(one_after_another())
    return ends


async def test_a_thousand_requests_with_three_hundred_cancels_leave_memory_flat(bus: Bus) -> None:
    dice = random.Random(7)
    await crowd(bus, 150, dice)
    await bus.empty()
    shared, private = bus.shared(), bus.private_kib()
    assert len(shared) == 3  # source and two relays send large tensors, one segment each

    ends = await crowd(bus, 1000, dice)
    status = await bus.empty()
    assert ends == {"done": 700, "cancelled": 300}
    assert all(name == "done" or name == "cancelled" for name in status.ended), status.ended
    assert bus.shared() == shared
    grown = {name: now - private[name] for name, now in bus.private_kib().items()}
    assert all(growth < GROWTH_KIB for growth in grown.values()), grown


async def test_a_killed_worker_leaves_nothing_and_the_others_go_on(bus: Bus) -> None:
    streams = [await bus.submit(f"!repeat:{1000 + number}") for number in range(12)]
    # Longer than all credits together: no relay has sent all of one before it is read.
    readers = [stream.__aiter__() for stream in streams]
    for reader in readers:
        await anext(reader)
    held = {replica.worker: replica.requests for replica in (await bus.client.status()).replicas}
    assert held["relay.0"] > 0 and held["relay.1"] > 0
    bus.workers["relay.0"].stop(signal.SIGKILL)
    bus.exited("relay.0")

    async def end(reader: AsyncIterator[object]) -> str:
        try:
            async for _ in reader:
                pass
        except ReplicaLost:
            return "lost"
        return "done"

    ends = collections.Counter(await asyncio.gather(*map(end, readers)))
    assert ends == {"lost": held["relay.0"], "done": held["relay.1"]}
    await bus.empty()
    assert bus.workers["relay.0"].segments() == []
    assert (await crowd(bus, 20, random.Random(1)))["done"] == 14

    # Started again, it takes its place.
    bus.workers["relay.0"] = WorkerProcess(bus.run_dir, "relay.0")
    await bus.until(lambda status: all(replica.state == "ready" for replica in status.replicas))
    assert (await crowd(bus, 20, random.Random(1)))["done"] == 14


async def test_a_fault_in_any_stage_fails_its_request_only(bus: Bus) -> None:
    async def said(text: str) -> str:
        try:
            async for _ in await bus.submit(text):
                pass
        except OmniBusError as error:
            return error.code
        return "done"

    texts = [f"a b !raise:{stage} c d" for stage in ("source", "relay", "sink")] + ["a b c d e f"] * 3
    assert await asyncio.gather(*map(said, texts)) == ["stage_failed"] * 3 + ["done"] * 3


async def test_a_reader_that_stops_holds_up_nobody_else(bus: Bus) -> None:
    slow = await bus.submit("!repeat:3000")
    reader = slow.__aiter__()
    await anext(reader)
    assert (await crowd(bus, 30, random.Random(2)))["done"] == 21
    # Once the crowd is gone and the row paused, source holds one request, its two edges, and no more chunks than it has credits.
    # A status shows what source last told, which may be of a moment before that: it is waited for as a whole.
    await bus.until(
        lambda status: (
            (bus.loads(status)["source.0"].slots_used, bus.loads(status)["source.0"].running) == (1, 0)
            and 64 < bus.loads(status)["source.0"].held <= 3 + 2 * 64
        )
    )
    count = 1
    async for item in reader:
        count += isinstance(item.payload, TextDelta)
    assert count == 3000
