"""A server whose stages are threads of one process (`loop = "own"`): the same answers, its failures, its operators' commands, its end."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import pathlib
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.e2e.test_scaling import done, refused, spoken, workers
from tests.support.closed_loop import ClosedLoop
from tests.support.running_server import Server, eventually, running

STAGES = ("source", "relay", "sink")


def own_loops(stages: tuple[str, ...], process: str) -> list[str]:
    keys = (f"process={process}", "loop=own", "threads=1")
    return [f"stages.{stage}.{key}" for stage in stages for key in keys]


@pytest.fixture(scope="module")
def probe() -> Iterator[Server]:
    """Ends by Ctrl-C, and leaves no process and no segment behind."""
    faults = [f"stages.{stage}.faults=true" for stage in STAGES]
    sets = [*own_loops(STAGES, "all"), *faults, "stages.source.tensor_bytes=131072", "bus.drain_s=60"]
    with running("probe.toml", sets=sets) as server:
        yield server


def replicas(server: Server) -> list[dict[str, Any]]:
    return [replica for stage in server.get("/v1/status")["stages"] for replica in stage["replicas"]]


def nothing_held(server: Server) -> bool:
    loads = [replica["load"] for replica in replicas(server)]
    return all(load is not None and not load["held"] and not load["segments_used"] for load in loads)


def test_stages_of_one_process_are_workers_of_one_pid(probe: Server) -> None:
    assert set(probe.processes()) == {"supervisor", "broker", "api.0", "all.0"}
    assert workers(probe) == {f"{stage}.0": "ready" for stage in STAGES}
    assert {replica["pid"] for replica in replicas(probe)} == {probe.processes()["all.0"].pid}
    with ClosedLoop(probe, 8, "one two three", spoken("one", "two", "three")) as load:
        eventually(lambda: load.answered > 40 or load.failures != [], 60, "the stages work side by side")
    assert load.failures == []
    eventually(lambda: nothing_held(probe), 20, "no slot and no segment is held")


def test_a_client_that_goes_and_a_row_that_fails_leave_nothing(probe: Server) -> None:
    before = probe.processes()["all.0"].pid
    body = {
        "model": "probe",
        "messages": [{"role": "user", "content": "a !hang:sink"}],
        "modalities": ["text", "audio"],
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", probe.port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data:")
    connection.close()
    with pytest.raises(urllib.error.HTTPError) as failed:
        probe.chat("a !raise:relay", audio=True)
    assert json.loads(failed.value.read())["error"]["message"] == "stage relay failed"
    eventually(lambda: not sum(probe.get("/v1/status")["requests"].values()), 30, "no request is left")
    eventually(lambda: nothing_held(probe), 20, "no slot and no segment is held")
    assert probe.answer("well", audio=True).split() == ["well"] and probe.processes()["all.0"].pid == before


def test_one_that_cannot_go_on_ends_all_and_they_come_back_together(probe: Server) -> None:
    before = probe.processes()["all.0"].pid
    with contextlib.suppress(urllib.error.HTTPError):  # tried again where the process is back in time, and lost again
        probe.chat("a !device:sink", audio=True)
    said = "omni-bus: all.0 (source.0, relay.0, sink.0) ended ("
    eventually(lambda: said in probe.stderr, 60, "it is told what ended")

    def back() -> bool:
        process, found = probe.processes().get("all.0"), replicas(probe)
        return process is not None and {(one["state"], one["pid"]) for one in found} == {("ready", process.pid)} != {
            ("ready", before)
        }

    eventually(lambda: probe.ready() and back(), 90, "all three are ready in another process")
    assert probe.answer("back", audio=True).split() == ["back"]


def test_they_are_scaled_and_drained_together(probe: Server) -> None:
    with ClosedLoop(probe, 8, "a b c d", spoken("a", "b", "c", "d")) as load:
        eventually(lambda: load.answered > 8 or load.failures != [], 60, "the load runs")
        assert done(probe, "scale", "relay", "2")[-1] == "stages source, relay, sink (one process): 2 replicas"
        assert workers(probe) == {f"{stage}.{number}": "ready" for stage in STAGES for number in (0, 1)}
        assert done(probe, "drain", "sink/0") == [
            "all.0 is drained",
            "all.0 has left",
            "stages source, relay, sink (one process): 1 replica",
        ]
        eventually(lambda: load.answered > 24 or load.failures != [], 60, "it goes on")
    assert load.failures == []
    assert workers(probe) == {f"{stage}.1": "ready" for stage in STAGES}
    assert "all.1 is the only replica of stages source, relay, sink" in refused(probe, "drain", "relay.1")


def test_qwen3_omni_says_the_same_as_in_processes_of_its_own(
    omni_checkpoint: pathlib.Path, shared_server: Callable[..., Server]
) -> None:
    """All four stages, each with weights and caches that nothing else in the process may touch: text, codes and so the samples."""
    stages = ("processor", "thinker", "talker", "code2wav")
    alike = [f"model.path={omni_checkpoint}"]
    short = [f"stages.{stage}.sampling.max_tokens=8" for stage in ("thinker", "talker")]
    sampling = {stage: {"temperature": 0.0, "max_tokens": 8} for stage in ("thinker", "talker")}

    def said(server: Server, text: str) -> tuple[str, np.ndarray]:
        message = server.chat(text, audio=True, sampling=sampling)["choices"][0]["message"]
        wav = base64.b64decode(message["audio"]["data"])
        return message["content"], np.frombuffer(wav[44:], np.int16).astype(int)

    def check(answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        assert message["content"] and message["audio"]["data"]

    with running("qwen3_omni_tiny.toml", sets=[*alike, *short, *own_loops(stages, "gpu")]) as server:
        assert len({replica["pid"] for replica in replicas(server)}) == 1
        for text in ("Tell me a story.", "One, two, three."):
            (words, samples), (expected, wanted) = (
                said(server, text),
                said(shared_server("qwen3_omni_tiny.toml", sets=alike), text),
            )
            assert words == expected and len(samples) == len(wanted) > 0
            assert np.abs(samples - wanted).max() <= 1, "in float32 a wave depends a little on how it was cut into chunks"
        with ClosedLoop(server, 3, "Tell me a story.", check) as load:
            eventually(lambda: load.answered > 0 or load.failures != [], 60, "three at once")
        assert load.failures == []
