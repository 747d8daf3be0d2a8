"""How far a stage's audio is ahead of its playback, as a worker tells it: by scripts of times, without a clock."""

from __future__ import annotations

import pytest
import torch

from omni_bus.events import RequestOptions
from omni_bus.payloads import AudioDelta, TextDelta
from omni_bus.workers.playback import BEGUN_S, HELD_S, STALLED_S, Playback, seconds_of

SPEECH = RequestOptions(modalities=("text", "audio"))


@pytest.fixture
def playback() -> Playback:
    """Two spoken answers, 1 and 2, are open."""
    opened = Playback()
    opened.open(1, SPEECH)
    opened.open(2, SPEECH)
    return opened


def test_only_what_is_to_be_heard_is_bound_to_real_time(playback: Playback) -> None:
    playback.open(3, RequestOptions(modalities=("text",)))
    playback.open(4, RequestOptions(modalities=("text", "audio"), prepare=True))
    assert len(playback) == 2
    playback.close(1)
    playback.close(1)
    assert len(playback) == 1


def test_the_lead_is_what_was_sent_less_the_time_since_the_first_packet(playback: Playback) -> None:
    assert playback.smallest_lead(10.0) is None, "nobody has heard anything yet"
    playback.sent(1, 1.0, 10.0)
    assert playback.smallest_lead(10.75) == pytest.approx(0.25)
    assert playback.smallest_lead(11.25) == pytest.approx(-0.25), "the listener has waited for a quarter of a second"
    playback.sent(1, 1.0, 11.5)
    assert playback.smallest_lead(11.5) == pytest.approx(0.5)
    assert playback.audio_s == pytest.approx(2.0)


def test_one_that_has_just_begun_counts_once_its_listener_waits(playback: Playback) -> None:
    """Every stream begins with little: a replica at which one has begun is no worse than another for that."""
    playback.sent(1, 3.0, 9.0)
    playback.sent(2, 0.08, 10.0)
    assert playback.smallest_lead(10.05) == pytest.approx(1.95)
    assert playback.smallest_lead(10.2) == pytest.approx(-0.12), "it has to wait for its second packet"
    playback.sent(2, 0.32, 10.25)
    assert playback.smallest_lead(10.25) == pytest.approx(1.75)
    assert playback.smallest_lead(10.0 + BEGUN_S) == pytest.approx(0.4 - BEGUN_S)
    playback.close(1)
    playback.sent(2, 1.0, 10.6)
    assert playback.smallest_lead(10.6) == pytest.approx(0.8)


def test_the_smallest_of_all_counts_until_it_has_ended(playback: Playback) -> None:
    playback.sent(1, 3.0, 10.0)
    playback.sent(2, 1.1, 10.0)
    assert playback.smallest_lead(11.0) == pytest.approx(0.1)
    playback.close(2)
    assert playback.smallest_lead(11.0) == pytest.approx(2.0)
    playback.close(1)
    assert playback.smallest_lead(11.0) is None


def test_a_listener_who_takes_nothing_makes_nobody_late(playback: Playback) -> None:
    playback.sent(1, 1.0, 10.0)
    playback.pause(1, 10.5)
    assert playback.smallest_lead(100.0) is None
    playback.resume(1, 100.0)
    assert playback.smallest_lead(100.0) == pytest.approx(0.5), "as far ahead as it was"
    assert playback.smallest_lead(101.0) == pytest.approx(-0.5), "and from here on it is the stage's turn again"


def test_behind_a_pause_a_listener_has_not_more_left_than_one_who_asks_for_more(playback: Playback) -> None:
    playback.sent(1, 60.0, 10.0)
    playback.pause(1, 10.0)
    playback.resume(1, 68.0)
    assert playback.smallest_lead(68.0) == pytest.approx(HELD_S)
    playback.pause(2, 70.0)
    playback.resume(2, 71.0)
    assert playback.smallest_lead(71.0) == pytest.approx(HELD_S - 3.0), "one that has not begun has no lead"


def test_a_stream_that_stands_still_tells_nothing_of_the_load(playback: Playback) -> None:
    playback.sent(1, 1.0, 10.0)
    assert playback.smallest_lead(10.0 + STALLED_S - 0.01) == pytest.approx(1.01 - STALLED_S)
    assert playback.smallest_lead(10.0 + STALLED_S) is None
    playback.sent(1, 1.0, 20.0)
    assert playback.smallest_lead(20.0) == pytest.approx(-8.0)


def test_what_is_audio_in_a_chunk() -> None:
    pcm = {"pcm": torch.zeros(12_000, dtype=torch.int16)}
    assert seconds_of(AudioDelta(24_000), pcm) == pytest.approx(0.5)
    assert seconds_of(AudioDelta(24_000), {}) == 0.0
    assert seconds_of(TextDelta("a"), pcm) == 0.0
