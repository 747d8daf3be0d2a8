"""Two API processes on one port: whichever answers a scrape tells of both, before and after one of them died."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.running_server import Server, eventually, running

ONE_PROCESS = [f"stages.{stage}.{key}" for stage in ("source", "relay", "sink") for key in ("process=all", "faults=true")]
CHATS = 'omni_bus_requests_total{route="/v1/chat/completions",status="200"}'
SCRAPES = 20
Figures = dict[str, float]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("probe.toml", sets=[*ONE_PROCESS, "api.processes=2", "bus.heartbeat_s=0.2"]) as server:
        yield server


def scrape(server: Server) -> tuple[Figures, Figures]:
    """Counters (histograms' among them) and gauges; no series twice."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    counters: Figures = {}
    gauges: Figures = {}
    kind = ""
    for line in text.splitlines():
        if line.startswith("#"):
            kind = line.split()[-1] if line.startswith("# TYPE") else kind
            continue
        name, _, value = line.rpartition(" ")
        assert name not in counters and name not in gauges, f"{name} is there twice"
        (gauges if kind == "gauge" else counters)[name] = float(value)
    return counters, gauges


def answered(server: Server, index: int) -> int:
    """Chats that this API process answered, by its own log."""
    return server.run_dir.joinpath(f"api.{index}.log").read_text().count("POST /v1/chat/completions 200")


def test_counters_of_both_add_up_and_never_go_down(server: Server) -> None:
    before, _ = scrape(server)
    last = before
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(SCRAPES):
            list(pool.map(lambda words: server.answer(words, audio=True), ["one", "two words", "three", "four"]))
            now, gauges = scrape(server)
            assert not {name: (last[name], now.get(name)) for name in last if now.get(name, 0.0) < last[name]}
            assert gauges["omni_bus_broker_up"] == 1
            last = now
    # A client has its answer a moment before the process that gave it has counted it.
    eventually(lambda: in_flight(server) == 1, 20, "the scrape itself")
    last, _ = scrape(server)
    asked = 4 * SCRAPES
    eventually(lambda: answered(server, 0) + answered(server, 1) == asked, 20, "each is in one log")
    assert min(answered(server, 0), answered(server, 1)) > 0, "both had a part in it"
    assert last[CHATS] - before.get(CHATS, 0.0) == asked
    for name in ("ttft", "ttfp", "e2el"):
        assert last[f"omni_bus_{name}_seconds_count"] - before.get(f"omni_bus_{name}_seconds_count", 0.0) == asked
    ended = 'omni_bus_broker_ended_total{how="done"}'
    assert last[ended] - before.get(ended, 0.0) == asked, "the broker's own, once"
    recent = server.get("/v1/status")["recent"]
    assert recent["ttfp_s"]["count"] == recent["rtf"]["count"] == asked, "whichever process says it, of both"


def test_a_process_that_died_leaves_its_counts_and_takes_its_gauges(server: Server) -> None:
    counters, _ = scrape(server)
    threads = [threading.Thread(target=cut_off, args=(server,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    eventually(lambda: in_flight(server) == 7, 10, "six hang in either process")
    for name in ("api.0", "api.1"):
        killed = server.processes()[name]
        killed.kill()
        eventually(lambda name=name, killed=killed: _replaced(server, name, killed.pid), 20, f"{name} is back")
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    eventually(lambda: in_flight(server) == 1, 20, "nothing but the scrape itself is in flight")
    eventually(lambda: sum(server.get("/v1/status")["requests"].values()) == 0, 10, "the broker has let go of them")
    again, _ = scrape(server)
    assert not {name: (counters[name], again.get(name)) for name in counters if again.get(name, 0.0) < counters[name]}
    files = sorted(path.name for path in pathlib.Path(server.run_dir / "metrics").iterdir())
    assert files == sorted(
        name
        for index in (0, 1)
        for name in (
            f"{index}.recent",
            *(f"{kind}_{index}.db" for kind in ("counter", "gauge_livemax", "gauge_livesum", "histogram")),
        )
    )


def in_flight(server: Server) -> float | None:
    """None while nobody listens."""
    with contextlib.suppress(OSError):
        return scrape(server)[1]["omni_bus_requests_in_flight"]
    return None


def cut_off(server: Server) -> None:
    with pytest.raises(OSError):
        server.answer("!hang:source")


def _replaced(server: Server, name: str, pid: int) -> bool:
    processes = server.processes()
    return name in processes and processes[name].pid != pid
