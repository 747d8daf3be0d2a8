"""The playback clock: what a client has played that plays at once, from what was sent and when."""

from __future__ import annotations

import pytest

from omni_bus.api.voice.pacing import KEPT, PlaybackClock


def test_audio_is_played_from_the_moment_it_comes() -> None:
    clock = PlaybackClock()
    assert clock.lead_s(10.0) == 0.0
    clock.sent("a", 500, 10.0)
    clock.sent("a", 500, 10.1)
    assert clock.lead_s(10.1) == pytest.approx(0.9)
    assert clock.unheard(10.25) == {"a": pytest.approx(250)}
    assert clock.lead_s(11.0) == 0.0
    assert clock.unheard(11.0) == {}


def test_a_player_that_ran_dry_starts_again_with_what_comes_next() -> None:
    clock = PlaybackClock()
    clock.sent("a", 100, 10.0)
    clock.sent("a", 100, 11.0)
    assert clock.lead_s(11.0) == pytest.approx(0.1)
    assert clock.unheard(11.05) == {"a": pytest.approx(150)}


def test_the_next_answer_is_played_behind_the_one_before() -> None:
    clock = PlaybackClock()
    clock.sent("a", 1000, 10.0)
    clock.sent("b", 500, 10.2)
    assert clock.unheard(10.4) == {"b": 0.0, "a": pytest.approx(400)}
    assert clock.unheard(11.1) == {"b": pytest.approx(100)}


def test_what_the_client_threw_away_is_not_played() -> None:
    clock = PlaybackClock()
    clock.sent("a", 1000, 10.0)
    clock.cleared(10.3)
    assert clock.lead_s(10.3) == 0.0
    clock.sent("b", 200, 10.4)
    assert clock.unheard(10.5) == {"b": pytest.approx(100)}
    assert clock.sent_ms("a") == 1000


def test_the_client_knows_better_what_it_has_played() -> None:
    clock = PlaybackClock()
    clock.sent("a", 1000, 10.0)
    clock.played("a", 100, 10.5)  # it began late
    assert clock.lead_s(10.5) == pytest.approx(0.9)
    assert clock.unheard(10.7) == {"a": pytest.approx(300)}
    clock.played("a", 1000, 10.7)
    assert clock.lead_s(10.7) == 0.0


def test_a_report_counts_what_is_queued_behind() -> None:
    clock = PlaybackClock()
    clock.sent("a", 1000, 10.0)
    clock.sent("b", 500, 10.0)
    clock.played("a", 400, 10.1)
    assert clock.lead_s(10.1) == pytest.approx(1.1)
    clock.played("a", 1000, 11.0)
    assert clock.lead_s(11.0) == pytest.approx(0.2), "the end of a may be long ago: b is as far as our clock has it"
    clock.played("nobody's", 0, 11.0)
    assert clock.lead_s(11.0) == pytest.approx(0.2)


def test_only_the_last_answers_are_remembered() -> None:
    clock = PlaybackClock()
    for number in range(10 * KEPT):
        clock.sent(str(number), 10, 1.0)
    assert len(clock.unheard(1.0)) == KEPT
    assert clock.sent_ms("0") == 0.0
