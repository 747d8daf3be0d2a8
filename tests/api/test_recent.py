"""The figures of the last minutes: which count, over how many processes, and what a process that was started again goes on with."""

from __future__ import annotations

import pathlib

import pytest

from omni_bus.api import recent
from omni_bus.api.recent import KEPT, WINDOW_S, Recent


class Clock:
    now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recent, "time", clock)
    return clock


def test_nothing_yet(clock: Clock) -> None:
    assert Recent().figures() == {
        "window_s": WINDOW_S,
        "ttfp_s": None,
        "rtf": None,
        "underrun": {"count": 0, "seconds": 0},
    }


def test_percentiles_are_figures_that_were_measured(clock: Clock) -> None:
    rings = Recent()
    for hundredths in range(100, 0, -1):
        rings.note("ttfp_s", hundredths / 100)
    rings.note("rtf", 0.3)
    rings.note("underrun_s", 0.25)
    rings.note("underrun_s", 0.5)
    figures = rings.figures()
    assert figures["ttfp_s"] == {"count": 100, "p50": 0.5, "p95": 0.95}
    assert figures["rtf"] == {"count": 1, "p50": 0.3, "p95": 0.3}
    assert figures["underrun"] == {"count": 2, "seconds": 0.75}


def test_old_figures_no_longer_count(clock: Clock) -> None:
    rings = Recent()
    rings.note("rtf", 9.0)
    clock.now += WINDOW_S - 1
    rings.note("rtf", 0.1)
    assert rings.figures()["rtf"] == {"count": 2, "p50": 0.1, "p95": 9.0}
    clock.now += 2
    assert rings.figures()["rtf"] == {"count": 1, "p50": 0.1, "p95": 0.1}


def test_the_newest_push_out_the_oldest(clock: Clock) -> None:
    rings = Recent()
    for number in range(KEPT + 3):
        clock.now += 0.01
        rings.note("rtf", float(number))
    assert rings.figures()["rtf"] == {"count": KEPT, "p50": 3.0 + KEPT / 2 - 1, "p95": 3.0 + -(-KEPT * 95 // 100) - 1}


def test_every_process_tells_of_all_and_one_that_comes_back_goes_on(clock: Clock, tmp_path: pathlib.Path) -> None:
    first, second = Recent(tmp_path, 0), Recent(tmp_path, 1)
    first.note("ttfp_s", 0.2)
    clock.now += 1
    second.note("ttfp_s", 0.4)
    assert first.figures() == second.figures()
    assert first.figures()["ttfp_s"] == {"count": 2, "p50": 0.2, "p95": 0.4}
    again = Recent(tmp_path, 0)
    for _ in range(KEPT - 1):
        again.note("ttfp_s", 0.3)
    assert second.figures()["ttfp_s"] == {"count": KEPT + 1, "p50": 0.3, "p95": 0.3}, "the first one's is still there"
    again.note("ttfp_s", 0.3)  # in its place
    assert 0.2 not in second._values()[0] and len(second._values()[0]) == KEPT + 1


def test_a_file_that_is_just_being_made_is_no_fault(clock: Clock, tmp_path: pathlib.Path) -> None:
    rings = Recent(tmp_path, 0)
    (tmp_path / f"1{recent.SUFFIX}").touch()
    rings.note("rtf", 0.5)
    assert rings.figures()["rtf"] == {"count": 1, "p50": 0.5, "p95": 0.5}
