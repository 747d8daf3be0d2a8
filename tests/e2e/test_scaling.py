"""Replicas of a running server: added, drained and replaced while it carries 16 streams, with the commands that operators have."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.closed_loop import ClosedLoop
from tests.support.running_server import PATIENCE_S, Server, eventually, running

STREAMS = 16
TWO_EACH = [f"stages.{stage}.replicas=2" for stage in ("source", "relay", "sink")]
ONE_THREAD = [f"stages.{stage}.threads=1" for stage in ("source", "relay", "sink")]


def omni_bus(server: Server, *arguments: str, timeout: float = 500.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omni_bus", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(server.run_base), "TMPDIR": str(server.run_base), "OMNI_BUS_URL": ""},
    )


def done(server: Server, *arguments: str) -> list[str]:
    answer = omni_bus(server, *arguments)
    assert answer.returncode == 0, answer.stderr + server.stderr
    return answer.stdout.splitlines()


def refused(server: Server, *arguments: str) -> str:
    answer = omni_bus(server, *arguments)
    assert answer.returncode == 2 and answer.stdout == "", (answer, server.stderr)
    return answer.stderr


def workers(server: Server) -> dict[str, str]:
    """Worker → state, as the broker sees them."""
    stages = server.get("/v1/status")["stages"]
    return {replica["worker"]: replica["state"] for stage in stages for replica in stage["replicas"]}


def spoken(*words: str) -> Callable[[dict[str, Any]], None]:
    def check(answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        assert message["content"].split() == list(words) and message["audio"]["data"], answer

    return check


@pytest.fixture(scope="module")
def probe() -> Iterator[Server]:
    """Each test leaves it with one replica of the source, and two of the others."""
    sets = [*ONE_THREAD, *TWO_EACH[1:], "stages.source.tensor_bytes=131072"]
    with running("probe.toml", sets=sets) as server:
        yield server


@pytest.mark.timeout(1200)  # two cores may have other work
def test_up_and_down_under_load_without_a_failed_request(probe: Server) -> None:
    with ClosedLoop(probe, STREAMS, "one two three", spoken("one", "two", "three")) as load:
        eventually(lambda: load.answered > STREAMS or load.failures != [], 120, "the load runs")
        grown = done(probe, "scale", "source", "3")
        assert workers(probe) == {
            name: "ready" for name in ("source.0", "source.1", "source.2", "relay.0", "relay.1", "sink.0", "sink.1")
        }
        assert {"source.1 is started", "source.2 is started", "source.1 is ready", "source.2 is ready"} < set(grown)
        assert grown[-1] == "stage source: 3 replicas"

        def all_work() -> bool:
            [source] = [stage for stage in probe.get("/v1/status")["stages"] if stage["name"] == "source"]
            return all((replica["load"] or {}).get("steps", 0) > 0 for replica in source["replicas"])

        eventually(all_work, 60, "all three have had requests")
        drained = done(probe, "drain", "source/1")
        assert drained == ["source.1 is drained", "source.1 has left", "stage source: 2 replicas"]
        assert set(probe.processes()) >= {"source.0", "source.2"} and "source.1" not in probe.processes()
        shrunk = done(probe, "scale", "source", "1")
        assert shrunk[-1] == "stage source: 1 replica" and len(shrunk) == 3
        seen = load.answered
        eventually(lambda: load.answered > seen + STREAMS or load.failures != [], 120, "it goes on")
    assert load.failures == []
    assert [name for name in workers(probe) if name.startswith("source")] in (["source.0"], ["source.2"])


@pytest.mark.timeout(1200)  # two cores may have other work
def test_a_rolling_restart_under_load_without_a_failed_request(probe: Server) -> None:
    before = {name: process.pid for name, process in probe.processes().items()}
    with ClosedLoop(probe, STREAMS, "a b c d", spoken("a", "b", "c", "d")) as load:
        eventually(lambda: load.answered > STREAMS or load.failures != [], 120, "the load runs")
        lines = done(probe, "restart", "--rolling")
        seen = load.answered
        eventually(lambda: load.answered > seen + STREAMS or load.failures != [], 120, "it goes on")
    assert load.failures == []
    assert sum(line.endswith("has left") for line in lines) == 5
    after = {name: process.pid for name, process in probe.processes().items()}
    roles = lambda found: sorted(name.rpartition(".")[0] for name in found)  # noqa: E731
    assert roles(after) == roles(before)
    assert set(before.values()) & set(after.values()) == {before[name] for name in ("supervisor", "broker", "api.0")}
    assert set(workers(probe).values()) == {"ready"} and len(workers(probe)) == 5


def test_what_cannot_be_done_is_refused_with_its_reason(probe: Server) -> None:
    [source] = [name for name in workers(probe) if name.startswith("source")]
    number = source.rpartition(".")[2]
    assert 'there is no stage "sorce" (did you mean "source"?)' in refused(probe, "scale", "sorce", "2")
    assert "a stage has from 1 to 256 replicas" in refused(probe, "scale", "source", "0")
    assert f"{source} is the only replica of stage source; start another first" in refused(probe, "drain", f"source/{number}")
    assert 'there is no replica "source/9"' in refused(probe, "drain", "source/9")
    assert 'there is no replica "broker"' in refused(probe, "drain", "broker")
    elsewhere = omni_bus(probe, "scale", "source", "2", "--url", "http://127.0.0.1:1")
    assert (elsewhere.returncode, "no server of this user listens at" in elsewhere.stderr) == (1, True)
    control = probe.run_dir / "control"
    assert control.is_socket() and probe.run_dir.stat().st_mode & 0o777 == 0o700


def test_a_worker_that_was_added_is_started_again_like_any_other(probe: Server) -> None:
    done(probe, "scale", "source", "2")
    [added] = [name for name in workers(probe) if name.startswith("source") and name != "source.0"] or ["source.1"]
    killed, broker = probe.processes()[added], probe.processes()["broker"]
    killed.kill()

    def back() -> bool:
        replicas = [replica for stage in probe.get("/v1/status")["stages"] for replica in stage["replicas"]]
        return any((r["worker"], r["state"]) == (added, "ready") and r["pid"] != killed.pid for r in replicas)

    eventually(back, 90, "it was lost, and another has its place")
    broker.kill()
    eventually(lambda: probe.processes().get("broker", broker).pid != broker.pid, 60, "there is another broker")
    eventually(lambda: probe.ready() and set(workers(probe).values()) == {"ready"}, 90, "a new broker knows all of them")
    assert len(workers(probe)) == 6
    done(probe, "scale", "source", "1")


@pytest.mark.timeout(1200)  # two cores may have other work
def test_stages_of_one_process_are_scaled_together_and_what_will_not_start_is_told(
    omni_checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Tiny Qwen3-Omni, 16 streams, every worker replaced; then a spare that finds no checkpoint leaves all as it was."""
    checkpoint = shutil.copytree(omni_checkpoint, tmp_path / "omni")
    groups = {"processor": "ears", "thinker": "ears", "talker": "mouth", "code2wav": "mouth"}
    sets = [f"model.path={checkpoint}", "stages.thinker.sampling.max_tokens=8", "stages.talker.sampling.max_tokens=8"]
    sets += [f"stages.{stage}.process={group}" for stage, group in groups.items()]
    sets += [f"stages.{stage}.{key}" for stage in groups for key in ("threads=1", "replicas=2")]
    texts: set[str] = set()

    def check(answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        texts.add(message["content"])
        assert message["audio"]["data"]

    with running("qwen3_omni_tiny.toml", sets=[*sets, "bus.drain_s=60"], ready_s=240) as server:
        with ClosedLoop(server, STREAMS, "Tell me a story.", check) as load:
            eventually(lambda: load.answered > STREAMS or load.failures != [], 120, "the load runs")
            lines = done(server, "restart", "--rolling")
        assert load.failures == [] and len(texts) == 1
        assert [line.split()[0] for line in lines if line.endswith("has left")] == ["ears.0", "ears.1", "mouth.0", "mouth.1"]
        for weights in checkpoint.glob("*.safetensors"):
            cut = weights.read_bytes()[: weights.stat().st_size // 2]
            weights.unlink()  # those that serve have the old one mapped
            weights.write_bytes(cut)
        failed = omni_bus(server, "scale", "talker", "3")
        assert failed.returncode == 1 and "mouth.1 ended before it was ready" in failed.stderr, failed
        seen = workers(server)
        assert len(seen) == 4 and set(seen.values()) == {"ready"}, (seen, server.stderr)
        assert done(server, "scale", "thinker", "1")[-1] == "stages processor, thinker (one process): 1 replica"


def test_sigterm_lets_what_runs_finish_and_takes_nothing_new(serve: Callable[..., Server]) -> None:
    """The running answer is longer than sockets hold, and lasts until its client has read it."""
    server = serve("probe.toml", sets=[*ONE_THREAD, "bus.drain_s=200"])
    body = {
        "model": "probe",
        "messages": [{"role": "user", "content": "word " * 4000}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "stream": True,
    }
    asked = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    tag = server.tag
    with urllib.request.urlopen(asked, timeout=200) as answer:
        assert answer.readline().startswith(b"data: {")
        server.process.send_signal(signal.SIGTERM)

        def refusal(ask: Callable[[], object]) -> tuple[int, str]:
            try:
                ask()
            except urllib.error.HTTPError as error:
                return error.code, json.loads(error.read())["error"]["code"]
            return 200, ""

        eventually(lambda: refusal(lambda: server.get("/ready")) == (503, "shutting_down"), 60, "it says that it is not ready")
        assert refusal(lambda: server.chat("new")) == (503, "shutting_down")
        shown = omni_bus(server, "status", "--url", server.url).stdout
        assert "draining: nothing new is taken" in shown.splitlines()[0]
        assert omni_bus(server, "scale", "source", "2").returncode != 0
        assert server.process.poll() is None, "all of that while the answer was given"
        rest = answer.read()
    assert rest.rstrip().endswith(b"data: [DONE]") and rest.count(b"word ") >= 3999 and b'"error"' not in rest
    assert server.process.wait(60) == 0
    server.assert_nothing_left(tag)


def test_a_drain_ends_what_would_never_end(serve: Callable[..., Server]) -> None:
    """`bus.drain_s` alone ends it: the request has no end, an hour until its deadline, and is not run again. How it ended tells what
    ended it; how soon is held by a clock of scripts (tests/omni_bus/test_drains.py)."""
    sets = ["stages.sink.faults=true", "bus.drain_s=1", "bus.retries=0", "api.deadline_s=3600"]
    server = serve("probe.toml", sets=[*ONE_THREAD, *TWO_EACH[2:], *sets])

    drained = Endless(server)
    [holder] = drained.holders()
    assert done(server, "drain", holder)[-1] == "stage sink: 1 replica"
    assert drained.code() == "replica_lost"
    said = (server.run_dir / "broker.log").read_text()
    assert f"worker {holder} is lost: its requests outlived its drain" in said, said

    stopped = Endless(server)
    assert len(stopped.holders()) == 1
    server.stop(signal.SIGTERM)
    assert "draining for up to 1 s" in server.stderr
    assert stopped.code() == "shutting_down"


class Endless:
    """A request that some sink never finishes, asked by a thread of its own."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._code = ""
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def holders(self) -> list[str]:
        """The sinks with a request, once there is one."""

        def now() -> list[str]:
            [sink] = [stage for stage in self._server.get("/v1/status")["stages"] if stage["name"] == "sink"]
            return [replica["worker"] for replica in sink["replicas"] if replica["requests"]]

        eventually(lambda: now() != [], 60, "the request runs")
        return now()

    def code(self) -> str:
        """Of the error that it ends with."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "it has not ended"
        return self._code

    def _ask(self) -> None:
        try:
            self._server.chat("a !hang:sink b", audio=True)
        except urllib.error.HTTPError as error:
            self._code = json.loads(error.read())["error"]["code"]
