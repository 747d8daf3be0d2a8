"""The line through a replica's real-time factors: careful where little was seen, right where much was."""

from __future__ import annotations

import pytest

from omni_bus.load_curve import HALF_LIFE_S, LoadCurve


def test_before_anything_was_seen_it_foretells_nothing() -> None:
    curve = LoadCurve()
    assert not curve.measured
    assert curve.at(9) == 0.0


def test_seen_at_one_number_of_streams_the_rows_are_taken_to_cost_everything() -> None:
    curve = LoadCurve()
    curve.add(2.0, 0.2, 5.0, 1.0)
    assert curve.measured
    assert [curve.at(n) for n in (1, 2, 9)] == pytest.approx([0.1, 0.2, 0.9])


def test_seen_at_several_the_step_s_own_cost_is_told_from_the_rows() -> None:
    curve = LoadCurve()
    for n in (1, 4, 8, 4, 1, 8):
        curve.add(n, 0.3 + 0.02 * n, 20.0, 1.0)
    assert curve.at(20) == pytest.approx(0.7, abs=0.03)
    assert curve.at(1) == pytest.approx(0.32, abs=0.03)


def test_one_more_stream_is_never_free() -> None:
    falling = LoadCurve()
    for n, rtf in ((1, 0.8), (8, 0.4), (16, 0.3)):  # as noise may have it
        falling.add(n, rtf, 10.0, 1.0)
    assert falling.at(1) < falling.at(16) < falling.at(64)
    assert falling.at(64) > 0.45


def test_a_line_that_would_begin_below_zero_begins_at_zero() -> None:
    steep = LoadCurve()
    for n, rtf in ((4, 0.1), (8, 0.6)):
        steep.add(n, rtf, 50.0, 1.0)
    assert steep.at(0) == 0.0
    assert steep.at(8) == pytest.approx((4 * 0.1 + 8 * 0.6) / 80 * 8, abs=0.01)


def test_what_was_long_ago_is_forgotten() -> None:
    curve = LoadCurve()
    curve.add(4.0, 0.2, 10.0, 1.0)
    for _ in range(10):
        curve.add(4.0, 0.8, 10.0, HALF_LIFE_S)
    assert curve.at(4) == pytest.approx(0.8, abs=0.01)
