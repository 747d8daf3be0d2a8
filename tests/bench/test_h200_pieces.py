"""What bench/h200.py is made of: what it starts, what it makes of the passes, and that nothing it started is left."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from bench.h200 import BASELINE, Result, deployment_sets, per_step, write_all
from bench.measured_server import MeasuredServer, alive, descendants
from omni_bus.bench_load import Measured
from omni_bus.bench_report import summarise
from tests.support.running_server import CONFIGS, free_port


def arguments(**said: object) -> argparse.Namespace:
    usual = {
        "device": "cuda:0",
        "weights": "random",
        "placement": "processes",
        "max_batch": 64,
        "sets": [],
        "trace": False,
        "size": "full",
        "warmups": 1,
        "prompt_words": 60,
        "text_tokens": 64,
        "temperature": 0.0,
        "frames": 128,
        "label": "h200",
        "baseline": BASELINE,
    }
    return argparse.Namespace(**{**usual, **said})


def test_the_users_settings_come_last() -> None:
    sets = deployment_sets(arguments(placement="one", sets=["stages.talker.max_batch=8"]), pathlib.Path("/model"))
    assert sets[0] == "model.path=/model" and sets[-1] == "stages.talker.max_batch=8"
    for stage in ("thinker", "talker", "code2wav"):
        assert {f'stages.{stage}.load="random"', f'stages.{stage}.process="gpu"'} < set(sets)
    assert not any(".process=" in one for one in deployment_sets(arguments(), pathlib.Path("/model")))


def test_a_thread_for_each_stage_is_one_process_of_own_loops() -> None:
    sets = deployment_sets(arguments(placement="threads"), pathlib.Path("/model"))
    for stage in ("thinker", "talker", "code2wav"):
        assert {f'stages.{stage}.process="gpu"', f'stages.{stage}.loop="own"'} < set(sets)
    assert not any(".loop=" in one for one in deployment_sets(arguments(placement="one"), pathlib.Path("/model")))


def test_mps_is_asked_for_or_off_whatever_the_file_says() -> None:
    for placement, mps in (("processes", "off"), ("one", "off"), ("threads", "off"), ("mps", "on")):
        assert f'bus.mps="{mps}"' in deployment_sets(arguments(placement=placement), pathlib.Path("/model"))


def test_steps_between_two_looks() -> None:
    assert per_step({"a": (10, 1.0), "gone": (1, 1.0)}, {"new": (1, 1.0), "a": (14, 1.2)}) == {
        "a": {"steps": 4, "busy_s": 0.2, "ms_per_step": 50.0}
    }


def test_what_is_written_after_a_run_that_was_cut_short(tmp_path: pathlib.Path) -> None:
    result = Result({"date": "2026-01-02T03:04:05+00:00", "command": "c", "gpu": [], "cpu": "x", "versions": {}})
    for concurrency, number, ttfp in ((1, 1, 0.9), (1, 2, 0.1), (4, 1, 0.5)):
        measured = [Measured(first_text_s=0.05, last_text_s=0.1, text_tokens=2, packets=[(ttfp, 1.0)], end_s=1.0)]
        summary = summarise(concurrency, measured, 1.0)
        result.passes.append({**summary, "warm": number == 2, "pass": number, "stages": {}})
    result.problem("something broke")
    write_all(arguments(out=tmp_path), result)
    saved = json.loads((tmp_path / "2026-01-02-h200.json").read_text())
    assert [(one["concurrency"], one["ttfp_p50_ms"]) for one in saved["rows"]] == [(1, 100.0), (4, 500.0)]
    note = (tmp_path / "2026-01-02-h200.md").read_text()
    assert "| 1 | vllm-omni 0.26.0 | 35 | 221 / 238 |" in note and "problem: something broke" in note
    assert "At 4 streams the time was used up" in note


def test_a_server_that_is_not_ready_in_time_leaves_nothing() -> None:
    scratch = pathlib.Path(f"/tmp/ob-{time.monotonic_ns():x}")
    scratch.mkdir()
    try:
        server = MeasuredServer(CONFIGS / "probe.toml", free_port(), [], scratch)
        assert server.wait_ready(0.0) is None
        seen = descendants(server._process.pid)
        assert server.stop() == []
        assert not [pid for pid in seen if alive(pid)]
    finally:
        shutil.rmtree(scratch)


def test_a_server_that_refuses_its_configuration_says_why(tmp_path: pathlib.Path) -> None:
    server = MeasuredServer(CONFIGS / "probe.toml", free_port(), ["stages.sauce.replicas=2"], tmp_path)
    assert server.wait_ready(60.0) is None
    assert "sauce" in server.tails()
    assert server.stop() == []


def test_descendants_are_found_over_two_generations() -> None:
    code = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); print(p.pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        me = descendants(os.getpid())
        assert {parent.pid, grandchild} <= me
        parent.communicate(b"\n")
