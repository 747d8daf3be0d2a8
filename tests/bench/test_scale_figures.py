"""The arithmetic of `python -m bench.scale`: where the broker's knee is, what replicas are worth, and that every part gets its table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.scale import broker_peers
from bench.scale.broker_load import Rung, knee, percentile
from bench.scale.replicas import with_ratios
from bench.scale.report import report


def rungs(*p99_ms: float) -> list[Rung]:
    """Rates of 1000, 2000, … chunks a second."""
    return [Rung(1000 * index, 1500 * index, 0.1, p99, 0.05, 40.0) for index, p99 in enumerate(p99_ms, 1)]


@pytest.mark.parametrize(
    ("p99_ms", "offered"),
    [
        ((0.4, 0.6, 1.0, 1.1, 5.0), 3000),
        ((0.4, 1.3, 0.6, 1.1, 5.0), 3000),  # one rung by accident
        ((0.4, 1.3, 1.2, 0.9), 1000),  # what comes behind two in a row counts no more
        ((1.3, 0.5, 2.0, 2.0), 2000),
        ((0.4, 0.5, 2.0), 2000),
        ((1.3, 1.2), None),
    ],
)
def test_the_knee_is_the_last_rate_before_two_that_pass_the_limit(p99_ms: tuple[float, ...], offered: int | None) -> None:
    best = knee(rungs(*p99_ms))
    assert (None if best is None else best.offered) == offered


def test_percentiles_are_of_what_was_measured() -> None:
    values = [number * 1_000_000 for number in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values[:1], 0.99)) == (51.0, 100.0, 100.0)


def test_replicas_are_measured_against_one() -> None:
    found = with_ratios(
        [{"replicas": 1, "audio_s_per_s": 8.0}, {"replicas": 2, "audio_s_per_s": 14.0}, {"replicas": 4, "audio_s_per_s": 24.0}]
    )
    assert [(row["ratio"], row["efficiency"]) for row in found] == [(1.0, 1.0), (1.75, 0.88), (3.0, 0.75)]


def test_the_report_has_a_table_for_what_was_measured_and_medians_of_what_was_repeated() -> None:
    def run(best: Rung | None) -> dict[str, Any]:
        flood = {"events_per_s": 40_000, "broker_us_per_event": 21.5, "broker_core_busy": 0.9}
        return {
            "knee": best and dataclasses.asdict(best),
            "flood": flood,
            "rungs": [dataclasses.asdict(one) for one in rungs(0.4, 1.2)],
        }

    row = {
        "stage": "sink",
        "replicas": 1,
        "audio_s_per_s": 8.0,
        "ratio": 1.0,
        "efficiency": 1.0,
        "ttfp_p50_ms": 40.0,
        "ttfp_p95_ms": 90.0,
    }
    times = [{"attached_s": 0.5, "ready_s": 2.0 + index, "first_chunk_s": 2.1 + index} for index in range(3)]
    deaths = [{"target": "broker", "restored_s": 0.9 + index, "whole_s": 2.0, "failed": 3} for index in range(3)]
    result = {
        "date": "2026-12-01",
        "commit": "abc",
        "command": "python -m bench.scale",
        "machine": {"cores": 2},
        "load_1min_after": 0.5,
        "broker": {
            "streams": 64,
            "rung_s": 1.5,
            "limit_ms": 1.0,
            "runs": [run(rungs(0.4)[0]), run(None), run(rungs(0.4, 0.5)[1])],
        },
        "replicas": {
            "probe": {
                "step_ms": 40,
                "max_batch": 4,
                "streams": 24,
                "words": 24,
                "requests": 48,
                "ideal_audio_s_per_s": 8.0,
                "rows": [row],
            },
            "tiny": {"streams": 8, "text_tokens": 24, "frames": 48, "requests": 16, "rows": [{**row, "stage": "talker"}]},
        },
        "attach": {"stage": "relay", "runs": times},
        "kill": {"rows": deaths},
    }
    text = report(result)
    assert "**1500 events/s at p99 ≤ 1 ms** (median of 3: 1500, 0, 3000)" in text
    assert "| sink | 1 | 8.0 | 1.0 | 1.0 | 40.0 | 90.0 |" in text and "| talker | 1 |" in text
    assert "| median of 3 | 0.5 | 3.0 | 3.1 |" in text and "| most | 0.5 | 4.0 | 4.1 |" in text
    assert "| broker | 3 | 1.90 (0.90 to 2.90) | 2.00 (2.00 to 2.00) | 3 |" in text
    assert "## From" not in report({name: value for name, value in result.items() if name != "kill"})


def test_the_mix_is_that_of_a_spoken_stream() -> None:
    """A chunk on every edge that leads from a stage, sound on the last one."""
    assert [edge.name for edge in broker_peers.EDGES] == ["source->relay", "relay->sink", "source->client", "sink->client"]
