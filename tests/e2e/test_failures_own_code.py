"""docs/failures.md on faults of the server's own processes: exceptions and no memory in broker and API, hangs there and in a load."""

from __future__ import annotations

import asyncio
import pathlib
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.test_failures import BACK_S, SETS, idle, only_text, pid, whole
from tests.support.running_server import Server, eventually, running
from tests.support.steady_load import BROKEN, SteadyLoad

OWN_FAULTS = pathlib.Path(__file__).parents[1] / "support" / "own_faults"
LOAD_S = 5.0


@pytest.fixture(scope="module")
def hang_load(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("flag") / "hang"


@pytest.fixture(scope="module")
def module_server(hang_load: pathlib.Path) -> Iterator[Server]:
    env = {"PYTHONPATH": str(OWN_FAULTS), "HANGING_LOAD": str(hang_load)}
    with running("probe.toml", sets=(*SETS, f"bus.load_s={LOAD_S}"), env=env) as server:
        yield server


@pytest.fixture
def server(module_server: Server) -> Iterator[Server]:
    """Every test begins with all there, and must leave nothing of its requests behind."""
    eventually(lambda: whole(module_server), BACK_S, "all processes are there and ready")
    yield module_server
    eventually(lambda: whole(module_server) and idle(module_server), BACK_S, "all is as it was")


def load_on(server: Server) -> SteadyLoad:
    return SteadyLoad(server.url, count=16, words=100, text_only=4)


def pids(server: Server) -> dict[str, int]:
    return {name: process.pid for name, process in server.processes().items()}


def log_of(server: Server) -> str:
    return (server.run_dir / "relay.0.log").read_text()


@pytest.mark.parametrize(("way", "code"), [(signal.SIGUSR1, "internal_error"), (signal.SIGUSR2, "out_of_memory")])
async def test_what_the_broker_fails_on_costs_one_request(server: Server, way: signal.Signals, code: str) -> None:
    before = pids(server)
    async with load_on(server) as load:
        await load.all_run()
        psutil.Process(before["broker"]).send_signal(way)
        await asyncio.to_thread(eventually, lambda: code in load.ends(), BACK_S, "it is met")
        await load.serves(BACK_S)
    ends = load.ends()
    assert set(ends) == {"done", code} and ends[code] == 1, ends
    assert pids(server) == before
    log = (server.run_dir / "broker.log").read_text()
    assert ("MemoryError" if code == "out_of_memory" else "RuntimeError: broken for a test") in log


async def test_a_broker_that_is_broken_beyond_a_request_is_replaced(server: Server) -> None:
    before = pids(server)
    async with load_on(server) as load:
        await load.all_run()
        psutil.Process(before["broker"]).send_signal(signal.SIGPROF)
        await load.serves(BACK_S)
    ends = load.ends()
    assert set(ends) <= {"done", "broker_lost", "no_ready_replica"} and ends["broker_lost"], ends
    after = pids(server)
    assert {name for name in before if before[name] != after[name]} == {"broker"}
    assert "broker ended (exit code 1); starting it again" in server.stderr


@pytest.mark.parametrize("way", [signal.SIGUSR1, signal.SIGUSR2])
async def test_what_an_api_process_fails_on_costs_one_request(server: Server, way: signal.Signals) -> None:
    before = pids(server)
    async with load_on(server) as load:
        await load.all_run()
        for name in ("api.0", "api.1"):
            psutil.Process(before[name]).send_signal(way)
        await asyncio.to_thread(eventually, lambda: load.ends()["internal_error"] == 2, BACK_S, "each meets it")
        await load.serves(BACK_S)
    ends = load.ends()
    assert set(ends) == {"done", "internal_error"} and ends["internal_error"] == 2, ends
    assert pids(server) == before


@pytest.mark.parametrize("victim", ["broker", "api.0"])
async def test_a_loop_that_hangs_is_noticed_by_its_silence(server: Server, victim: str) -> None:
    before = pids(server)
    async with load_on(server) as load:
        await load.all_run()
        psutil.Process(before[victim]).send_signal(signal.SIGALRM)
        await asyncio.to_thread(
            eventually, lambda: f"{victim} does not answer; ending it by force" in server.stderr, BACK_S, "it is noticed"
        )
        await load.serves(BACK_S)
    ends = load.ends()
    assert set(ends) <= {"done", "no_ready_replica", "broker_lost" if victim == "broker" else BROKEN}, ends
    after = pids(server)
    assert {name for name in before if before[name] != after[name]} == {victim}


async def test_a_load_that_hangs_is_ended_and_others_go_on(server: Server, hang_load: pathlib.Path) -> None:
    async with load_on(server) as load:
        await load.all_run()
        await asyncio.to_thread(hang_load.touch)
        psutil.Process(pid(server, "relay.0")).kill()
        await asyncio.to_thread(eventually, lambda: "Timeout (0:00:05)!" in log_of(server), BACK_S, "the load is ended")
    await asyncio.to_thread(eventually, lambda: whole(server), BACK_S, "it is loaded")
    assert "in hangs_or_loads" in log_of(server).rpartition("Timeout (")[2]
    ends = load.ends()
    assert set(ends) <= {"done", "replica_lost"}, ends
    assert {stream.end for stream in only_text(load.streams)} == {"done"}
