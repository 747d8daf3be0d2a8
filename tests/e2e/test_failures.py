"""docs/failures.md, row by row: one process of a server goes in one way under 16 streams, and the others lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator

import psutil
import pytest

from tests.support.cut_socket import cut_unix_sockets
from tests.support.running_server import Server, eventually, running
from tests.support.steady_load import BROKEN, SteadyLoad, Stream

LOST_AFTER_S = 4.0
STEP_S = 8.0
AT_ONCE_S = 60.0  # a hang; it takes milliseconds on an idle machine
BACK_S = 90.0
STOP_NOTICED_S = 3.0  # by the supervisor, of a broker that is stopped
WORKS_AGAIN_S = 5.0  # after the broker's death, on a machine that starts Python with the broker's modules within IDLE_START_S
IDLE_START_S = 0.25
SETS = (
    *(f"stages.{stage}.{key}" for stage in ("source", "relay", "sink") for key in ("faults=true", "threads=1")),
    "stages.relay.replicas=2",
    "stages.source.tensor_bytes=100000",  # through shared memory
    "bus.heartbeat_s=0.5",
    f"bus.lost_after_s={LOST_AFTER_S}",
    f"bus.step_s={STEP_S}",
    "bus.restart_backoff_s=0.1",
    "api.processes=2",
)


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    with running("probe.toml", sets=SETS) as server:
        yield server


@pytest.fixture
def server(module_server: Server) -> Iterator[Server]:
    """Every test begins with all there, and must leave nothing of its requests behind."""
    eventually(lambda: whole(module_server), BACK_S, "all processes are there and ready")
    yield module_server
    eventually(lambda: whole(module_server) and idle(module_server), BACK_S, "all is as it was")


def whole(server: Server) -> bool:
    roles = {"supervisor", "broker", "api.0", "api.1", "source.0", "relay.0", "relay.1", "sink.0"}
    if set(server.processes()) != roles or not server.ready():
        return False
    return all(replica["state"] == "ready" for stage in server.get("/v1/status")["stages"] for replica in stage["replicas"])


def idle(server: Server) -> bool:
    """No request anywhere, no row, slot or chunk held for one."""
    status = server.get("/v1/status")
    loads = [replica["load"] or {} for stage in status["stages"] for replica in stage["replicas"]]
    held = sum(load.get(key, 1) for load in loads for key in ("running", "waiting", "segments_used", "held", "slots_used"))
    return sum(status["requests"].values()) + held == 0


def load_on(server: Server, **more: int) -> SteadyLoad:
    return SteadyLoad(server.url, **{"count": 16, "words": 100, "text_only": 4, **more})


def pid(server: Server, name: str) -> int:
    return int(server.processes()[name].pid)


def only_text(streams: list[Stream]) -> list[Stream]:
    return [stream for stream in streams if stream.modalities == ("text",)]


def why_lost(server: Server, worker: str) -> str:
    """What the broker noted when it lost it last."""
    lost = f"worker {worker} is lost: "
    return [line.partition(lost)[2] for line in (server.run_dir / "broker.log").read_text().splitlines() if lost in line][-1]


async def ask(server: Server, text: str) -> str:
    """A request with speech beside the load; the code of the error it meets, or "done"."""

    def chat() -> str:
        try:
            server.chat(text, audio=True)
        except urllib.error.HTTPError as error:
            return str(json.loads(error.read())["error"]["code"])
        return "done"

    return await asyncio.to_thread(chat)


def ask_until_answered(server: Server) -> float:
    """Seconds until a request with speech is answered to a client that asks again as docs/failures.md says, when Retry-After says."""
    began = time.monotonic()
    while True:
        try:
            server.chat("a b", audio=True)
        except urllib.error.HTTPError as error:
            code = json.loads(error.read())["error"]["code"]
            assert code in {"broker_lost", "no_ready_replica"}, code
            assert time.monotonic() < began + BACK_S, f"still {code}"
            time.sleep(float(error.headers["Retry-After"]))
        else:
            return time.monotonic() - began


def slowness() -> float:
    """How many times longer than on an idle machine of ours a broker takes to start, less its work; at least 1."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import omni_bus.broker_main"], check=True, timeout=BACK_S)
    return max(1.0, (time.monotonic() - began) / IDLE_START_S)


def bound(server: Server, worker: str) -> int:
    """Requests, as the broker counts them."""
    replicas = [replica for stage in server.get("/v1/status")["stages"] for replica in stage["replicas"]]
    return sum(replica["requests"] for replica in replicas if replica["worker"] == worker)


@pytest.mark.parametrize("victim", ["source.0", "relay.0", "sink.0"])
async def test_a_killed_worker_costs_its_own_requests_only(server: Server, victim: str) -> None:
    async with load_on(server) as load:
        running_then = await load.all_run()
        before, killed = pid(server, victim), time.monotonic()
        psutil.Process(before).kill()
        await load.serves(BACK_S)
        assert pid(server, victim) != before
    ends = load.ends(since=killed)
    assert set(ends) <= {"done", "replica_lost", "no_ready_replica"}, ends
    lost = [stream for stream in load.streams if stream.end == "replica_lost"]
    assert lost, "there were streams on it"
    # Those that were running when it died hear of it at once, and not after some heartbeats; one that begins meanwhile may meet it too.
    assert all(stream.ended - killed < AT_ONCE_S for stream in lost if stream in running_then)
    assert why_lost(server, victim) in ("its process ended", "its connection is gone")
    if victim != "source.0":
        assert {stream.end for stream in only_text(load.streams)} == {"done"}, "they have nothing to do with it"
    if victim == "relay.0":
        assert ends["no_ready_replica"] == 0, "the other replica takes the new ones"
        assert "done" in {stream.end for stream in running_then if "audio" in stream.modalities}, "the other's go on"


async def test_requests_that_have_sent_nothing_run_again_and_nobody_notices(server: Server) -> None:
    """Bound to one relay or the other, they wait for their first word, as the source sleeps, when one relay ends."""
    for _ in range(5):  # on a machine that sleeps longer than the source does, they are heard too soon
        async with load_on(server, text_only=16) as load:
            await load.all_run()
            sleeper = asyncio.ensure_future(ask(server, "!sleep:source:5000 a"))
            await load.stands_still(0.4)
            asked = [load.ask(words=3) for _ in range(8)]
            async with asyncio.timeout(BACK_S):
                while await asyncio.to_thread(bound, server, "sink.0") < 9 and not any(stream.events for stream, _ in asked):
                    pass
            on_it = await asyncio.to_thread(bound, server, "relay.0")  # no text has business there
            untouched = [stream for stream, _ in asked if not stream.events]
            psutil.Process(pid(server, "relay.0")).kill()
            async with asyncio.timeout(120):
                await asyncio.gather(sleeper, *(task for _, task in asked))
        assert {stream.end for stream in untouched} <= {"done"}
        assert set(load.ends()) <= {"done", "replica_lost"} and {stream.end for stream in only_text(load.streams)} == {"done"}
        await asyncio.to_thread(eventually, lambda: whole(server), BACK_S, "it is back")
        if len(untouched) == len(asked) and on_it >= 2:
            return
    pytest.fail("no request was there that had sent nothing")


async def test_a_stopped_worker_is_noticed_and_those_on_its_sibling_go_on(server: Server) -> None:
    async with load_on(server, words=60) as load:
        await load.all_run()
        before, stopped = pid(server, "relay.0"), time.monotonic()
        psutil.Process(before).suspend()
        await load.serves(BACK_S)
        eventually(lambda: "relay.0 does not answer; ending it by force" in server.stderr, BACK_S, "it is killed")
        await asyncio.to_thread(eventually, lambda: whole(server), BACK_S, "it is back")
    ends = load.ends(since=stopped)
    assert set(ends) <= {"done", "replica_lost"}, ends
    assert {stream.end for stream in only_text(load.streams)} == {"done"}
    meanwhile = [s for s in load.streams if stopped < s.began and s.ended < stopped + LOST_AFTER_S and s.end == "done"]
    assert meanwhile, "others were served from start to end while it stood still"


async def test_a_stopped_worker_is_noticed_even_before_it_has_started(server: Server) -> None:
    before = pid(server, "relay.0")
    psutil.Process(before).kill()
    eventually(
        lambda: server.processes().get("relay.0", psutil.Process()).pid not in (before, psutil.Process().pid),
        BACK_S,
        "the next one",
    )
    second = pid(server, "relay.0")
    psutil.Process(second).suspend()
    eventually(lambda: whole(server) and pid(server, "relay.0") != second, BACK_S, "and the one after it")


@pytest.mark.parametrize(("word", "code"), [("!panic:relay", "stage_failed"), ("!oom:relay", "out_of_memory")])
async def test_a_step_that_fails_costs_the_requests_of_its_stage_and_no_process(server: Server, word: str, code: str) -> None:
    before = {name: process.pid for name, process in server.processes().items()}
    async with load_on(server) as load:
        await load.all_run()
        failed = time.monotonic()
        assert await ask(server, f"a {word} b") == code
        await load.serves(BACK_S)
    ends = load.ends(since=failed)
    assert set(ends) <= {"done", code}, ends
    assert {stream.end for stream in only_text(load.streams)} == {"done"}
    assert {name: process.pid for name, process in server.processes().items()} == before


@pytest.mark.parametrize("word", ["!spin:relay", "!device:relay"])
async def test_a_step_that_hangs_or_loses_its_device_ends_its_process(server: Server, word: str) -> None:
    async with load_on(server, words=60) as load:
        await load.all_run()
        failed = time.monotonic()
        # Whoever gave it that word has sent nothing yet, so it is tried once more, on the other one.
        assert await ask(server, word) == "replica_lost"
        await load.serves(BACK_S)
        await asyncio.to_thread(eventually, lambda: whole(server), BACK_S, "both are back")
    ends = load.ends(since=failed)
    assert set(ends) <= {"done", "replica_lost", "no_ready_replica"}, ends
    assert {stream.end for stream in only_text(load.streams)} == {"done"}
    logs = "".join((server.run_dir / f"relay.{number}.log").read_text() for number in (0, 1))
    assert ("in spin" in logs.rpartition("Timeout (")[2]) if word.startswith("!spin") else ("told to lose its device" in logs)


async def test_a_cut_socket_is_made_again_and_no_process_ends(server: Server) -> None:
    before = {name: process.pid for name, process in server.processes().items()}
    async with load_on(server) as load:
        for victim, codes in (
            ("relay.0", {"done", "replica_lost"}),
            ("api.0", {"done", "broker_lost"}),
            ("supervisor", {"done"}),
        ):
            await load.all_run()
            cut = time.monotonic()
            assert cut_unix_sockets(before[victim], "broker.sock") >= 1
            await load.serves(BACK_S)
            ends = load.ends(since=cut)
            assert set(ends) <= codes, (victim, ends)
    await asyncio.sleep(2 * LOST_AFTER_S)  # nobody is given up afterwards either
    assert {name: process.pid for name, process in server.processes().items()} == before


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_api_process_takes_its_own_connections_with_it(server: Server, way: signal.Signals) -> None:
    async with load_on(server, words=60) as load:
        await load.all_run()
        before, gone = pid(server, "api.0"), time.monotonic()
        psutil.Process(before).send_signal(way)
        await asyncio.to_thread(
            eventually,
            lambda: server.processes().get("api.0", psutil.Process()).pid not in (before, psutil.Process().pid),
            BACK_S,
            "it is back",
        )
        await load.serves(BACK_S)
    ends = load.ends(since=gone)
    assert set(ends) <= {"done", BROKEN} and ends["done"], ends


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_new_broker_finds_the_workers_and_the_api_as_they_were(server: Server, way: signal.Signals) -> None:
    before = {name: process.pid for name, process in server.processes().items()}
    async with load_on(server) as load:
        await load.all_run()
        slow = await asyncio.to_thread(slowness)
        running_then = await load.all_run()
        gone = time.monotonic()
        psutil.Process(before["broker"]).send_signal(way)
        answered_s = await asyncio.to_thread(ask_until_answered, server)
        slow = max(slow, await asyncio.to_thread(slowness))
        await load.serves(BACK_S)
    ends = load.ends(since=gone)
    assert set(ends) <= {"done", "broker_lost", "no_ready_replica"}, ends
    broken = [stream for stream in running_then if stream.end == "broker_lost"]
    assert all(stream.ended - gone < AT_ONCE_S for stream in broken)
    # Until a stop is noticed, streams of which the broker had sent all are read to their end.
    assert broken or way == signal.SIGSTOP
    noticed_s = STOP_NOTICED_S if way == signal.SIGSTOP else 0.0
    assert answered_s < noticed_s + WORKS_AGAIN_S * slow, f"on a machine {slow:.1f} times slower than an idle one"
    after = {name: process.pid for name, process in server.processes().items()}
    assert {name for name in before if before[name] != after[name]} == {"broker"}


async def test_a_stopped_supervisor_is_missed_by_nobody(server: Server) -> None:
    supervisor = psutil.Process(server.process.pid)
    before = {name: process.pid for name, process in server.processes().items()}
    supervisor.suspend()
    try:
        async with load_on(server) as load:
            began = time.monotonic()
            while time.monotonic() < began + 2 * LOST_AFTER_S:
                await load.all_run()
                await asyncio.sleep(0.1)
    finally:
        supervisor.resume()
    assert set(load.ends()) == {"done"}
    await asyncio.sleep(LOST_AFTER_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert {name: process.pid for name, process in server.processes().items()} == before, "it ends nobody when it goes on"
