"""semantic_vad: how long a silence must last follows eagerness, how the voice ended, and the pauses made before."""

from __future__ import annotations

import numpy
import pytest

from omni_bus.api.voice.turn_config import Eagerness, SemanticVad, ServerVad, TurnDetection
from omni_bus.api.voice.turn_end import LONGEST_MS, SHORTEST_MS, fallen, silence_needed_ms
from omni_bus.api.voice.turns import SpeechStarted, SpeechStopped, TurnDetector
from omni_bus.api.voice.vad import Vad, model_file
from omni_bus.errors import ModelRefused
from tests.support.lacking import lacking
from tests.support.spoken_audio import RATE, Samples, say, silence, skip_without_speech, with_noise

CLOSE_MS = 100
EAGERNESS: tuple[Eagerness, ...] = ("high", "auto", "medium", "low")
FINISHED = (
    "What is the capital of France?",
    "I would like to book a table for two people tomorrow evening.",
    "Please turn off the light in the kitchen.",
    "Yes.",
    "The weather is nice today.",
)


@pytest.fixture(scope="module")
def vad() -> Vad:
    try:
        model_file()
    except ModelRefused as error:
        lacking(error.message)
    skip_without_speech()
    return Vad.load()


def held() -> Samples:
    """A voice that stops in the middle of a word, at its loudest."""
    whole = say("Thank you very much.")
    return whole[: len(whole) * 6 // 10]


def waited_ms(vad: Vad, speech: Samples, config: TurnDetection, noise: float = 0.0) -> float:
    """From the end of the speech to the end of the turn; there must be exactly one."""
    detector = TurnDetector(config, vad)
    events = detector.push(with_noise(numpy.concatenate([silence(0.5), speech, silence(9.0)]), noise))
    assert [type(event) for event in events] == [SpeechStarted, SpeechStopped]
    assert isinstance(events[1], SpeechStopped)
    return events[1].audio_end_ms - 500 - len(speech) * 1000 / RATE


@pytest.mark.parametrize("noise", [0.0, 0.005])
@pytest.mark.parametrize("text", FINISHED)
def test_a_finished_sentence_is_answered_soon(vad: Vad, text: str, noise: float) -> None:
    for eagerness in EAGERNESS:
        waited = waited_ms(vad, say(text), SemanticVad(eagerness=eagerness), noise)
        assert waited == pytest.approx(SHORTEST_MS[eagerness], abs=2 * CLOSE_MS)


def test_a_voice_that_is_held_is_waited_for(vad: Vad) -> None:
    for eagerness in EAGERNESS:
        waited = waited_ms(vad, held(), SemanticVad(eagerness=eagerness))
        assert waited > (SHORTEST_MS[eagerness] + LONGEST_MS[eagerness]) / 2
        assert waited < LONGEST_MS[eagerness] + CLOSE_MS


@pytest.mark.parametrize("speech", ["finished", "held"])
def test_eagerness_orders_the_stops(vad: Vad, speech: str) -> None:
    said = say(FINISHED[0]) if speech == "finished" else held()
    high, auto, medium, low = (waited_ms(vad, said, SemanticVad(eagerness=eagerness)) for eagerness in EAGERNESS)
    assert high < medium < low and auto == medium


def test_a_hesitation_does_not_end_a_turn_that_server_vad_would_end(vad: Vad) -> None:
    heard = numpy.concatenate([silence(0.5), held(), silence(1.2), say(FINISHED[0]), silence(5.0)])
    by_silence = TurnDetector(ServerVad(), vad).push(heard)
    by_voice = TurnDetector(SemanticVad(), vad).push(heard)
    assert len(by_silence) == 4 and len(by_voice) == 2


def test_who_has_paused_may_pause_again(vad: Vad) -> None:
    """A sentence that sounds finished is waited for longer behind a pause than it is without one."""
    first, second = held(), say(FINISHED[2])
    pause_s = 1.2
    heard = numpy.concatenate([silence(0.5), first, silence(pause_s), second, silence(9.0)])
    start, stop = TurnDetector(SemanticVad(), vad).push(heard)
    assert isinstance(start, SpeechStarted) and isinstance(stop, SpeechStopped)
    waited = stop.audio_end_ms - 500 - pause_s * 1000 - (len(first) + len(second)) * 1000 / RATE
    assert waited == pytest.approx(1.25 * pause_s * 1000, abs=2 * CLOSE_MS)
    assert waited_ms(vad, second, SemanticVad()) < waited - 500


def test_the_rule_alone() -> None:
    room = silence(0.16)
    voice = numpy.sin(numpy.arange(2 * RATE, dtype=numpy.float32) * 0.08).astype(numpy.float32) * 0.3
    fading = voice * numpy.minimum(1.0, numpy.linspace(8.0, 0.0, len(voice)) ** 2).astype(numpy.float32)
    assert fallen(voice, room) == 0.0 and fallen(fading, room) == 1.0
    half = voice.copy()
    half[-RATE // 5 :] *= 10 ** (-8 / 20)  # 8 dB: half way between held and fallen
    assert fallen(half, room) == pytest.approx(0.5, abs=0.1)
    assert silence_needed_ms(half, room, 0.0, "medium") == pytest.approx(2250, abs=400)


def test_a_steady_noise_does_not_hide_that_a_voice_falls() -> None:
    room = silence(0.16)
    noisy = with_noise(numpy.concatenate([say(FINISHED[0]), room]), 0.02)
    speech, noise = noisy[: -len(room)], noisy[-len(room) :]
    assert fallen(speech, noise) > 0.9
    assert fallen(speech, room) < 0.5  # were the noise taken for the voice


def test_loudness_itself_does_not_matter() -> None:
    said, room = say(FINISHED[0]), silence(0.16)
    for level in (0.01, 0.1, 1.0):
        assert fallen(said * level, room) == pytest.approx(fallen(said, room), abs=0.01)


def test_too_little_to_tell_is_waited_for() -> None:
    room = silence(0.16)
    for speech in (silence(0.0), silence(1.0), say(FINISHED[0])[: RATE // 10]):
        assert fallen(speech, room) == 0.0
    assert silence_needed_ms(silence(0.0), room, 0.0, "high") == LONGEST_MS["high"]


def test_no_pause_makes_it_wait_longer_than_eagerness_allows() -> None:
    for eagerness in EAGERNESS:
        assert silence_needed_ms(say(FINISHED[0]), silence(0.16), 60_000.0, eagerness) == LONGEST_MS[eagerness]
