"""The figures of one answer, told by a clock that the test moves."""

from __future__ import annotations

import pytest

from omni_bus.api import timing
from omni_bus.api.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def figure(metrics: Metrics, name: str) -> float:
    lines = metrics.text(None).decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == f"omni_bus_{name}")


def test_every_figure_of_an_answer_that_starves_its_listener_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, metrics = Clock(), Metrics()
    monkeypatch.setattr(timing, "time", clock)
    answer = timing.AnswerTiming(metrics, clock.now)
    steps = [
        (0.2, "text", 1),  # TTFT
        (0.4, "audio", 0.5),  # TTFP; plays to 0.9
        (0.6, "text", 2),
        (0.8, "audio", 0.5),  # 0.1 s before it is needed; plays to 1.4
        (1.2, "text", 3),
        (1.7, "audio", 1.0),  # 0.3 s too late: the rest of the speech shifts by them, and plays to 2.7
        (2.2, "audio", 1.0),  # 0.5 s before it is needed
    ]
    for at, kind, amount in steps:
        clock.now = 100 + at
        answer.text(int(amount)) if kind == "text" else answer.audio(amount)
    clock.now = 103.0
    answer.ended()
    assert figure(metrics, "ttft_seconds_sum") == pytest.approx(0.2)
    assert figure(metrics, "ttfp_seconds_sum") == pytest.approx(0.4)
    assert figure(metrics, "tpot_seconds_sum") == pytest.approx((1.2 - 0.2) / 5)
    assert figure(metrics, "e2el_seconds_sum") == pytest.approx(3.0)
    assert figure(metrics, "rtf_sum") == pytest.approx(3.0 / 3.0)
    assert figure(metrics, "audio_seconds_total") == pytest.approx(3.0)
    assert figure(metrics, "underruns_total") == 1
    assert figure(metrics, "underrun_seconds_total") == pytest.approx(0.3)
    # The leads 0.1, -0.3 and 0.5 s, by their buckets.
    below = {
        bound: figure(metrics, f'playback_lead_seconds_bucket{{le="{bound}"}}') for bound in ("-0.5", "-0.2", "0.0", "0.2")
    }
    assert below == {"-0.5": 0, "-0.2": 1, "0.0": 1, "0.2": 2}
    assert figure(metrics, "playback_lead_seconds_count") == 3
    recent = metrics.recent.figures()
    assert recent["ttfp_s"] == {"count": 1, "p50": pytest.approx(0.4), "p95": pytest.approx(0.4)}
    assert recent["rtf"] == {"count": 1, "p50": pytest.approx(1.0), "p95": pytest.approx(1.0)}
    assert recent["underrun"] == {"count": 1, "seconds": pytest.approx(0.3)}


def test_a_text_without_speech_has_neither_ttfp_nor_rtf() -> None:
    metrics = Metrics()
    answer = timing.AnswerTiming(metrics, 0.0)
    answer.text(1)
    answer.ended()
    counts = [
        figure(metrics, f"{name}_count") for name in ("ttft_seconds", "e2el_seconds", "ttfp_seconds", "rtf", "tpot_seconds")
    ]
    assert counts == [1, 1, 0, 0, 0]
