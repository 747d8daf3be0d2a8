"""`omni-bus up`: its start, its end, and what it does when one of its processes, or it itself, is killed."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator

import pytest

from tests.support.running_server import PATIENCE_S, Server, eventually, free_port, running, started

FAULTS = ("stages.source.faults=true", "stages.relay.faults=true", "stages.sink.faults=true")
# One import of torch in place of three, where a test is not about the workers.
ONE_PROCESS = ("stages.source.process=all", "stages.relay.process=all", "stages.sink.process=all")
LARGE = "stages.source.tensor_bytes=262144"  # so that shared memory is in use


def in_background(work: Callable[[], object]) -> threading.Thread:
    """A request that the server's end will cut off."""

    def run() -> None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def running_requests(server: Server) -> int:
    return sum(server.get("/v1/status")["requests"].values())


def test_progress_and_one_line_with_the_address(serve: Callable[..., Server]) -> None:
    server = serve("probe.toml")
    for stage in ("source", "relay", "sink"):
        assert any(line.startswith(f"omni-bus: {stage} ") and "ready" in line for line in server.stderr.splitlines())
    assert server.answer("one two", audio=True).split() == ["one", "two"]
    assert set(server.processes()) == {"supervisor", "broker", "api.0", "source.0", "relay.0", "sink.0"}
    assert server.run_dir.stat().st_mode & 0o777 == 0o700
    server.stop()
    assert server.process.stdout is not None
    assert server.process.stdout.read() == b"", "stdout holds the one line only"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_in_order_with_requests_running(serve: Callable[..., Server], number: signal.Signals) -> None:
    server = serve("probe.toml", sets=[*FAULTS, LARGE, "bus.drain_s=1"])
    thread = in_background(lambda: server.chat("a b c !hang:sink d", audio=True))
    eventually(lambda: running_requests(server) == 1, 10, "the request runs")
    eventually(lambda: server.segments() != [], 10, "shared memory is in use")
    server.stop(number)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_worker_that_does_not_listen_is_killed_in_time(serve: Callable[..., Server]) -> None:
    server = serve("probe.toml", sets=[*FAULTS, *ONE_PROCESS])
    in_background(lambda: server.chat("!sleep:sink:60000", audio=True))
    eventually(lambda: running_requests(server) == 1, 10, "the request runs")
    server.stop()


def test_a_second_signal_hurries(serve: Callable[..., Server]) -> None:
    server = serve("probe.toml", sets=[*FAULTS, *ONE_PROCESS, "bus.drain_s=250"])
    in_background(lambda: server.chat("!hang:sink", audio=True))
    eventually(lambda: running_requests(server) == 1, 10, "the request runs")
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: "draining for up to 250 s; once more, and it ends at once" in server.stderr, 20, "it waits for it")
    server.stop()


def test_ctrl_c_before_it_is_ready() -> None:
    with started("probe.toml") as server:
        eventually(lambda: "sink.0" in server.processes(), 20, "the workers start")
        server.stop()


@pytest.fixture(scope="module")
def robust() -> Iterator[Server]:
    """One server for the tests that kill a part of it: each leaves it ready."""
    with running("probe.toml", sets=[LARGE]) as server:
        yield server


def test_a_killed_worker_is_started_again_and_requests_go_on(robust: Server) -> None:
    server = robust
    assert server.answer("before", audio=True).split() == ["before"]
    before = {name: process.pid for name, process in server.processes().items()}
    [segment] = [name for name in server.segments() if f"-{before['source.0']}-" in name]
    server.processes()["relay.0"].kill()
    assert server.answer("text needs no relay").split() == ["text", "needs", "no", "relay"]
    server.processes()["source.0"].kill()
    eventually(lambda: segment not in server.segments(), 5, "the dead worker's segment is swept")
    eventually(
        lambda: "source.0 is ready again" in server.stderr and "relay.0 is ready again" in server.stderr, 30, "they are back"
    )
    eventually(server.ready, 10, "the server is ready")
    assert server.answer("after it", audio=True).split() == ["after", "it"]
    after = {name: process.pid for name, process in server.processes().items()}
    assert {name for name in before if before[name] != after[name]} == {"relay.0", "source.0"}


def test_a_killed_api_process_is_started_again(robust: Server) -> None:
    server = robust
    first = server.processes()["api.0"]
    first.kill()
    eventually(lambda: not first.is_running() and server.ready(), 30, "the API is back")
    assert server.answer("again").split() == ["again"]


def test_api_processes_share_the_port_and_stand_in_for_each_other(serve: Callable[..., Server]) -> None:
    server = serve("probe.toml", sets=[*ONE_PROCESS, "api.processes=2"])
    assert {name for name in server.processes() if name.startswith("api.")} == {"api.0", "api.1"}
    first = server.processes()["api.0"]
    first.kill()
    eventually(lambda: not first.is_running(), 5, "it has ended")
    assert [server.answer(f"number {index}") for index in range(8)] == [f"number {index} " for index in range(8)]
    eventually(lambda: "api.0" in server.processes() and server.processes()["api.0"].pid != first.pid, 10, "it is back")


def test_a_worker_that_hangs_is_killed_and_started_again(serve: Callable[..., Server]) -> None:
    server = serve("probe.toml", sets=[*ONE_PROCESS, "bus.heartbeat_s=0.5", "bus.lost_after_s=3"])
    hung = server.processes()["all.0"]
    hung.suspend()
    eventually(lambda: "all.0 ended (SIGKILL)" in server.stderr, 20, "it is killed")
    eventually(lambda: "all.0 is ready again" in server.stderr and server.ready(), 30, "it is back")
    assert server.processes()["all.0"].pid != hung.pid
    assert server.answer("well again", audio=True).split() == ["well", "again"]


def test_a_killed_supervisor_leaves_no_orphan_and_the_next_one_sweeps(serve: Callable[..., Server]) -> None:
    server = serve("probe.toml", sets=[*FAULTS, LARGE])
    in_background(lambda: server.chat("a b !hang:sink", audio=True))
    eventually(lambda: server.segments() != [], 10, "shared memory is in use")
    tag, run_dir = server.tag, server.run_dir
    # One that cannot end in order leaves its segments behind, as a crash does.
    source = server.processes()["source.0"]
    source.suspend()
    server.process.kill()
    server.process.wait()
    source.kill()
    eventually(lambda: not server.living(), 5, "its children end")
    assert run_dir.exists()
    second = serve("probe.toml", run_base=server.run_base)
    assert not run_dir.exists()
    server.assert_nothing_left(tag)
    assert second.answer("fresh").split() == ["fresh"]


def test_a_supervisor_killed_while_workers_still_import_leaves_no_orphan() -> None:
    with started("probe.toml") as server:
        eventually(lambda: "api.0" in server.processes(), 20, "all were started")
        server.process.kill()
        eventually(lambda: not server.living(), 5, "its children end")


def broken_torch(directory: pathlib.Path, statement: str) -> dict[str, str]:
    """An environment in which the first thing a worker does fails; broker and API import no torch."""
    (directory / "torch").mkdir()
    (directory / "torch" / "__init__.py").write_text(statement)
    return {"PYTHONPATH": str(directory)}


@contextlib.contextmanager
def failed_start(env: dict[str, str]) -> Iterator[tuple[int, Server]]:
    with started("probe.toml", env=env, sets=["bus.restart_backoff_s=0.05"]) as server:
        yield server.process.wait(timeout=PATIENCE_S), server


def test_a_worker_that_never_starts_ends_the_server_with_its_last_lines(tmp_path: pathlib.Path) -> None:
    with failed_start(broken_torch(tmp_path, "raise ImportError('libnothing.so is not there')\n")) as (code, server):
        assert code == 1
        assert ".0 | ImportError: libnothing.so is not there" in server.stderr
        assert "ended 3 times before it was ready (exit code 1)" in server.stderr
        assert f"the logs are in {server.run_dir}" in server.stderr
        assert {entry.suffix for entry in server.run_dir.iterdir()} == {".log"}
        server.assert_nothing_left(server.tag)


def test_a_worker_that_refuses_what_the_user_gave_is_not_tried_again(tmp_path: pathlib.Path) -> None:
    refusal = "import sys\nprint('weights: no such thing', file=sys.stderr)\nsys.exit(2)\n"
    with failed_start(broken_torch(tmp_path, refusal)) as (code, server):
        assert code == 2
        assert "weights: no such thing" in server.stderr
        assert "starting it again" not in server.stderr


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "omni_bus", "up", "configs/probe.toml", "--port", str(port)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert answer.returncode == 2
    assert (
        answer.stderr
        == f"omni-bus: api.port: cannot listen on 127.0.0.1:{port} (Address already in use); choose another with --port\n"
    )


def test_commands_against_a_running_server(shared_server: Callable[..., Server], tmp_path: pathlib.Path) -> None:
    server = shared_server("probe.toml")
    out, figures = tmp_path / "reply.wav", tmp_path / "figures.json"

    def omni_bus(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "omni_bus", *arguments], capture_output=True, text=True, timeout=200, check=False
        )

    said = omni_bus("chat", "three words now", "--url", server.url, "--out", str(out))
    assert (said.returncode, said.stdout.split()) == (0, ["three", "words", "now"])
    assert out.stat().st_size == 44 + 2 * 3 * 1920
    assert omni_bus("chat", "x", "--url", server.url, "--voice", "nobody").returncode == 2
    shown = omni_bus("status", "--url", server.url)
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()[2:6]] == ["stage", "source", "relay", "sink"]
    assert re.search(r"^speech    TTFP p50 \d+ ms, p95 \d+ ms; RTF p50 \d+\.\d\d, ", shown.stdout, re.M), shown.stdout
    load = ("--concurrency", "1,3", "--requests", "4", "--warmup", "0", "--prompt-words", "5", "--json", str(figures))
    bench = omni_bus("bench", server.url, *load)
    assert bench.returncode == 0, bench.stderr
    assert "concurrency 3: 4 of 4 requests" in bench.stdout
    passes = json.loads(figures.read_text())["passes"]
    assert [len(one["each"]) for one in passes] == [4, 4]
    assert all(one["figures"]["audio"]["p50"] == pytest.approx(5 * 1920 / 24000) for one in passes)
    assert omni_bus("status", "--url", f"http://127.0.0.1:{free_port()}").returncode == 1
