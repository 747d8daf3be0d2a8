"""`omni-bus bench` against a running server: what it prints and what it writes."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.running_server import ROOT, Server, running

BASELINE = ROOT / "bench" / "results" / "2026-11-30-vllm-omni-0.26.0-h200.json"
ROUTE = ["source->relay", "relay->sink", "sink->client"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("probe.toml") as started:
        yield started


def bench(server: Server, directory: pathlib.Path, *arguments: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    file = directory / "figures.json"
    command = [sys.executable, "-m", "omni_bus", "bench", server.url, "--prompt-words", "5", "--json", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_a_closed_loop_beside_a_baseline(server: Server, tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "picture.svg"
    more = ("--baseline", str(BASELINE), "--picture", str(picture))
    said, saved = bench(server, tmp_path, "--concurrency", "1,4", "--requests", "8", "--repeat", "2", *more)
    assert said.count("concurrency 4: 8 of 8 requests") == 2, "two passes"
    assert "| 4 | vllm-omni 0.26.0 | 102 | 524 / 590 |" in said
    assert [row["concurrency"] for row in saved["rows"]] == [1, 4]
    assert saved["load"]["repeat"] == 2 and len(saved["passes"]) == 2, "the last pass of each counts"
    for one, row in zip(saved["passes"], saved["rows"], strict=True):
        split = one["first_chunk_ms"]
        assert [edge for edge in split if edge in ROUTE] == ROUTE and 0 < split["sink->client"] < row["ttfp_p95_ms"]
        assert all(list(each["first_chunk_ms"]) for each in one["each"])
    ElementTree.fromstring(picture.read_text())


def test_requests_that_arrive_as_they_will(server: Server, tmp_path: pathlib.Path) -> None:
    said, saved = bench(server, tmp_path, "--rate", "40,80", "--requests", "20", "--warmup", "0")
    assert "40 requests/s: 20 of 20 requests" in said and "80 requests/s: 20 of 20 requests" in said
    assert [(one["rate"], one["concurrency"], one["requests"]) for one in saved["passes"]] == [(40, None, 20), (80, None, 20)]
    assert 20 / saved["passes"][0]["seconds"] < 40 * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rate", "0"], "must be numbers above 0"),
        (["--rate", "2", "--concurrency", "1"], "not allowed with"),
        (["--baseline", "nowhere.json"], "nowhere.json: No such file"),
        (["--picture", "/nowhere/at/all.svg"], "no such directory"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omni_bus", "bench", "http://127.0.0.1:9", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and says in done.stderr
