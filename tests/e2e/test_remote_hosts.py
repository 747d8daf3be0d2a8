"""Workers on other hosts: network namespaces with addresses of their own, at the end of cables with latency and loss, cut and healed.

Where namespaces cannot be made, CI fails with the reason, and elsewhere these tests say that they were left out.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.net_host import NetHost, missing, net_host
from tests.support.remote_worker import RemoteWorker, bringing, write_config
from tests.support.running_server import Server, eventually, free_port, started

WORDS = "!repeat:25"
SPOKEN = "".join(f"{number} " for number in range(25))
NAMED = {"replica_lost", "no_ready_replica", "stale_tensor", "deadline_exceeded"}


@pytest.fixture(scope="module")
def host() -> Iterator[NetHost]:
    if reason := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must test remote hosts, and cannot: {reason}")
        pytest.skip(f"no other host can be made here: {reason}")
    with net_host(1 + os.getpid() % 254) as host:
        yield host


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="ob-") as directory:
        yield pathlib.Path(directory)


@pytest.fixture
def pair(host: NetHost, base: pathlib.Path) -> Iterator[tuple[Server, RemoteWorker]]:
    """A server here, whose relay runs on the other host; in the end both stop in order."""
    host.heal()
    host.network()
    port = free_port()
    config = write_config(base, f"tcp://{host.near}:{port}")
    with started(config) as server, bringing(base, f"tcp://{host.near}:{port}", inside=host.inside) as worker:
        server.wait_ready(120)
        yield server, worker
        host.heal()
        host.network()
        assert worker.stop() == 0
        server.stop()


def relays(server: Server) -> list[dict[str, Any]]:
    [found] = [entry for entry in server.get("/v1/status")["stages"] if entry["name"] == "relay"]
    return list(found["replicas"])


def speaks(server: Server) -> None:
    eventually(server.ready, 60, "the server is ready")
    assert server.answer(WORDS, audio=True) == SPOKEN


def ending(server: Server, text: str) -> str:
    """ "right", or the code of the error with which the request ended."""
    try:
        return "right" if server.chat(text, audio=True)["choices"][0]["message"]["content"] == SPOKEN else "wrong"
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["error"]["code"])


def chunks_of(replica: dict[str, Any]) -> int:
    """That it has sent on, as it last told."""
    return sum((replica["load"] or {}).get("chunks", {}).values())


def test_tensors_go_both_ways_over_latency_and_loss(host: NetHost, pair: tuple[Server, RemoteWorker]) -> None:
    server, worker = pair
    speaks(server)
    host.network(delay_s=0.03, loss=0.005)
    with ThreadPoolExecutor(2) as threads:  # 10 MB each way, which such a network takes seconds for
        assert list(threads.map(lambda _: ending(server, WORDS), range(2))) == ["right"] * 2
    host.network()
    eventually(
        lambda: all(
            replica["load"]["chunks"].get(edge, 0) >= 75 for replica, edge in ((relays(server)[0], "relay->sink|tcp"),)
        ),
        20,
        "the tensors took the data sockets",
    )
    assert worker.said.count("is ready") == 1


def test_a_cable_cut_in_mid_stream_ends_streams_by_name_and_healed_it_serves(
    host: NetHost, pair: tuple[Server, RemoteWorker]
) -> None:
    server, worker = pair
    host.network(delay_s=0.02)
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(ending, server, "!sleep:relay:200 " * 100) for _ in range(4)]
        before = sum(chunks_of(replica) for replica in relays(server))
        eventually(lambda: sum(chunks_of(replica) for replica in relays(server)) > before, 30, "the streams have begun to come")
        host.cut()
        # Nothing hangs: each ends by name, in spite of a network that says nothing to either end.
        assert {answer.result(120) for answer in answers} <= NAMED
        eventually(lambda: not relays(server), 20, "the worker is given up")
    host.heal()
    speaks(server)
    assert worker.said.count("is ready") == 1, "it was loaded again, though only the network was gone"


def test_a_short_cut_is_ridden_out_or_ends_by_name(host: NetHost, pair: tuple[Server, RemoteWorker]) -> None:
    server, _ = pair
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            answers = [threads.submit(ending, server, WORDS) for _ in range(3)]
            host.cut()
            eventually(lambda: True, 1, "a moment")
            host.heal()
            assert {answer.result(120) for answer in answers} <= NAMED | {"right"}
            speaks(server)
