"""What `omni-bus bench` makes of a pass: one row, the split of its first packet, a table and a picture beside a baseline's."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import xml.etree.ElementTree as ElementTree

import pytest

from omni_bus import bench_load
from omni_bus.bench_load import Load, Measured, open_loop
from omni_bus.bench_picture import Series, picture
from omni_bus.bench_report import markdown, report, row, summarise
from omni_bus.commands import bench
from omni_bus.commands.bench import read_baseline
from omni_bus.errors import ConfigError

BASELINE = pathlib.Path(__file__).parents[2] / "bench" / "results" / "2026-11-30-vllm-omni-0.26.0-h200.json"
KEYS = [
    "concurrency",
    "ttft_p50_ms",
    "ttfp_p50_ms",
    "ttfp_p95_ms",
    "e2el_p50_ms",
    "rtf",
    "audio_s_per_s",
    "requests_per_s",
    "underrun_p50_ms",
    "underrun_p95_ms",
]


def measured(ttfp_s: float, **first_chunks_ms: float) -> Measured:
    packets = [(ttfp_s, 1.0), (ttfp_s + 1.25, 1.0)]
    return Measured(
        first_text_s=0.05, last_text_s=0.1, text_tokens=2, packets=packets, end_s=1.0, first_chunks_ms=first_chunks_ms
    )


def test_a_row_has_the_figures_that_results_are_compared_by() -> None:
    found = row(summarise(2, [measured(0.1), measured(0.2)], 4.0))
    assert list(found) == KEYS
    assert list(found.values()) == [2, 50.0, 100.0, 200.0, 1000.0, 0.5, 1.0, 0.5, 250.0, 250.0]


def test_a_pass_without_audio_has_a_row_without_its_figures() -> None:
    found = row(summarise(1, [Measured(first_text_s=0.1, last_text_s=0.1, text_tokens=1, end_s=0.2)], 1.0))
    assert (found["ttft_p50_ms"], found["ttfp_p50_ms"], found["rtf"], found["underrun_p95_ms"]) == (100.0, None, None, None)
    assert "| 1 | ours | 100 | - / - |" in markdown([("ours", [found])])


def test_the_split_of_the_first_packet_is_in_the_order_of_time() -> None:
    summary = summarise(1, [measured(0.1, b=3.0, a=9.0), measured(0.1, b=5.0, a=7.0), measured(0.1, b=4.0, a=8.0)], 1.0)
    assert list(summary["first_chunk_ms"].items()) == [("b", 4.0), ("a", 8.0)]
    assert list(report(summary))[-1].endswith("b 4.0, a 8.0")


def test_a_saved_result_is_a_baseline() -> None:
    baseline = read_baseline(BASELINE)
    assert baseline.name == "vllm-omni 0.26.0" and all(list(one) == KEYS for one in baseline.rows)
    ours = [row(summarise(8, [measured(0.1)], 1.0))]
    lines = markdown([("ours", ours), (baseline.name, baseline.rows)]).splitlines()
    [at] = [index for index, line in enumerate(lines) if line.startswith("| 8 | ours |")]
    assert lines[at + 1].startswith("| 8 | vllm-omni 0.26.0 | 118 | 692 / 1857 |")


@pytest.mark.parametrize("text", ["no json", "[1]", "{}", '{"rows": [{"concurrency": 1}]}', '{"rows": 3}'])
def test_another_file_is_no_baseline(tmp_path: pathlib.Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="holds no rows"):
        read_baseline(file)


def test_the_picture_shows_every_point_inside_its_frame() -> None:
    rows = json.loads(BASELINE.read_text())["rows"]
    drawn = ElementTree.fromstring(picture([Series("a & b", rows), Series("one", rows[:1]), Series("none", [])], "<title>"))
    names = {"svg": "http://www.w3.org/2000/svg"}
    circles = drawn.findall("svg:circle", names)
    assert len(circles) == 4 * (len(rows) + 1)
    width, height = float(drawn.attrib["width"]), float(drawn.attrib["height"])
    assert all(0 < float(one.attrib["cx"]) < width and 0 < float(one.attrib["cy"]) < height for one in circles)
    heights = [float(one.attrib["cy"]) for one in circles[: len(rows)]]  # TTFP p50 of the first, which rises
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("how", [["--concurrency", "1,4"], ["--rate", "50,90"]])
async def test_no_prompt_is_sent_twice(monkeypatch: pytest.MonkeyPatch, how: list[str]) -> None:
    """Whatever the number of passes: a server that keeps prompts would answer the second time from what it has kept."""
    prompts: list[str] = []

    async def one(load: Load, index: int) -> Measured:
        prompts.append(load.body(index)["messages"][0]["content"])
        return measured(0.1)

    async def is_ours(url: str) -> bool:
        return True

    monkeypatch.setattr(bench_load, "one", one)
    monkeypatch.setattr(bench, "is_ours", is_ours)
    parser = argparse.ArgumentParser()
    bench.arguments(parser)
    said = parser.parse_args(["http://127.0.0.1:1", "--model", "m", "--repeat", "2", "--requests", "9", *how])
    assert await bench._run(said, None) == 0
    assert len(prompts) == len(set(prompts)) >= 2 * 2 * 9


def test_what_the_server_had_of_the_prompts_is_said() -> None:
    cached = [Measured(prompt_tokens=76, cached_tokens=count, end_s=1.0) for count in (0, 64, 64)]
    assert any("76, of which the server had 64" in line for line in report(summarise(1, cached, 3.0)))
    assert not any("of which" in line for line in report(summarise(1, [measured(0.1)], 1.0)))


async def arrivals(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[float]:
    """When 400 requests at 4 a second are sent, on a clock that stands still while they are answered."""
    due: list[float] = []

    async def sleep(seconds: float) -> None:
        due.append(seconds)

    async def one(load: Load, index: int) -> Measured:
        return Measured(end_s=float(index))

    with monkeypatch.context() as patch:
        patch.setattr(bench_load, "one", one)
        patch.setattr(bench_load.time, "perf_counter", lambda: 0.0)
        patch.setattr(bench_load.asyncio, "sleep", sleep)
        results, _ = await open_loop(_load(seed), 4.0, 400, first=5)
    assert [result.end_s for result in results] == [float(index) for index in range(5, 405)]
    return due


async def test_arrivals_are_poisson_and_the_same_for_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    due = await arrivals(monkeypatch, 7)
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    assert all(gap > 0 for gap in gaps) and mean == pytest.approx(1 / 4, rel=0.15)
    assert sum(gap < mean / 4 for gap in gaps) / len(gaps) == pytest.approx(1 - math.exp(-1 / 4), abs=0.06)
    assert await arrivals(monkeypatch, 7) == due
    assert await arrivals(monkeypatch, 8) != due


def _load(seed: int) -> Load:
    return Load(
        url="",
        model="",
        ours=True,
        prompt=None,
        prompt_words=1,
        audio=None,
        speech=True,
        text_tokens=None,
        frames=None,
        speech_stage="talker",
        seed=seed,
    )
