"""Turns by server_vad on real speech: when they begin and end, what each field does, and that nothing piles up."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterable

import numpy
import pytest

from omni_bus.api.voice import vad as vad_module
from omni_bus.api.voice.turn_config import (
    SemanticVad,
    ServerVad,
    TurnDetection,
    parse_turn_detection,
    turn_detection_to_json,
)
from omni_bus.api.voice.turns import IdleTimeout, SpeechStarted, SpeechStopped, TurnDetector, TurnEvent
from omni_bus.api.voice.vad import FRAME, Vad, VadState, model_file
from omni_bus.errors import InvalidRequest, ModelRefused
from tests.support.lacking import lacking
from tests.support.spoken_audio import RATE, Samples, say, silence, skip_without_speech, with_noise

CLOSE_MS = 100  # how far a time may be from the truth: three frames
DEFAULT = ServerVad()


@pytest.fixture(scope="module")
def vad() -> Vad:
    try:
        model_file()
    except ModelRefused as error:
        lacking(error.message)
    skip_without_speech()
    return Vad.load()


@pytest.fixture(scope="module")
def question() -> Samples:
    skip_without_speech()
    return say("What is the capital of France?")


def pushed(detector: TurnDetector, samples: Samples, size: int = RATE // 50, **fields: bool) -> list[TurnEvent]:
    return [event for start in range(0, len(samples), size) for event in detector.push(samples[start : start + size], **fields)]


def turns(vad: Vad, samples: Samples, config: TurnDetection = DEFAULT) -> list[TurnEvent]:
    return pushed(TurnDetector(config, vad), samples)


def times(events: Iterable[TurnEvent]) -> list[tuple[int, int]]:
    """(start, stop) of each turn; the events must come in pairs."""
    events = list(events)
    begun, ended = events[::2], events[1::2]
    pairs = []
    for start, stop in zip(begun, ended, strict=True):
        assert isinstance(start, SpeechStarted) and isinstance(stop, SpeechStopped)
        pairs.append((start.audio_start_ms, stop.audio_end_ms))
    return pairs


def ms(*samples: Samples) -> float:
    return sum(map(len, samples)) * 1000 / RATE


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.01])
def test_a_turn_begins_and_ends_with_its_speech(vad: Vad, question: Samples, noise: float) -> None:
    heard = with_noise(numpy.concatenate([silence(1.0), question, silence(1.5)]), noise)
    ((start, stop),) = times(turns(vad, heard))
    assert start == pytest.approx(1000 - DEFAULT.prefix_padding_ms, abs=CLOSE_MS)
    assert stop == pytest.approx(1000 + ms(question) + DEFAULT.silence_duration_ms, abs=CLOSE_MS)


def test_several_turns_of_one_stream(vad: Vad) -> None:
    first, second = say("Please turn off the light in the kitchen."), say("Thank you very much.")
    heard = numpy.concatenate([silence(0.7), first, silence(1.2), second, silence(1.0)])
    (one, two) = times(turns(vad, heard))
    assert one == pytest.approx((400, 700 + ms(first) + 500), abs=CLOSE_MS)
    assert two == pytest.approx((700 + ms(first) + 1200 - 300, 700 + ms(first) + 1200 + ms(second) + 500), abs=CLOSE_MS)


def test_an_event_comes_as_soon_as_it_can(vad: Vad, question: Samples) -> None:
    """Speech is told within 100 ms of its first sound, its end within a frame of the silence that makes it one."""
    detector = TurnDetector(DEFAULT, vad)
    heard = numpy.concatenate([silence(1.0), question, silence(1.0)])
    seen = {
        type(event): (start + 160) * 1000 / RATE
        for start in range(0, len(heard), 160)
        for event in detector.push(heard[start : start + 160])
    }
    assert seen[SpeechStarted] <= 1000 + 100
    assert seen[SpeechStopped] <= 1000 + ms(question) + 500 + CLOSE_MS


@pytest.mark.parametrize("config", [DEFAULT, SemanticVad()], ids=["server_vad", "semantic_vad"])
def test_how_the_stream_is_cut_changes_nothing(vad: Vad, question: Samples, config: TurnDetection) -> None:
    heard = with_noise(numpy.concatenate([silence(0.6), question, silence(1.3), question, silence(1.3)]), 0.002)
    whole = TurnDetector(config, vad).push(heard)
    assert len(whole) == 4
    for size in (1, 160, 511, 512, 513, 4_000) if config is DEFAULT else (160, 4_000):
        assert pushed(TurnDetector(config, vad), heard[: 2 * RATE] if size == 1 else heard, size) == (
            whole[:1] if size == 1 else whole
        )
    sizes, detector, position, events = random.Random(4), TurnDetector(config, vad), 0, []
    while position < len(heard):
        size = sizes.randrange(0, 3_000)
        events += detector.push(heard[position : position + size])
        position += size
    assert events == whole


def test_silence_noise_and_clicks_are_no_turn(vad: Vad) -> None:
    clicks = silence(3.0)
    clicks[RATE // 2 :: RATE // 2] = 0.9
    burst = silence(2.0)
    burst[RATE : RATE + 300] = with_noise(silence(1.0), 0.3)[:300]
    for heard in (silence(3.0), with_noise(silence(3.0), 0.02), clicks, burst):
        detector = TurnDetector(DEFAULT, vad)
        assert pushed(detector, heard) == [] and not detector.speaking


def test_threshold(vad: Vad, question: Samples) -> None:
    """In the same noise a low threshold hears speech that a high one does not."""
    heard = with_noise(numpy.concatenate([silence(1.0), 0.03 * question, silence(1.0)]), 0.004)
    assert turns(vad, heard, ServerVad(threshold=0.1))
    assert not turns(vad, heard, ServerVad(threshold=0.98))
    assert turns(vad, silence(0.1), ServerVad(threshold=0.0)) == [SpeechStarted(0)]


@pytest.mark.parametrize("padding", [0, 120, 800])
def test_prefix_padding(vad: Vad, question: Samples, padding: int) -> None:
    heard = numpy.concatenate([silence(1.0), question, silence(1.0)])
    ((start, _),) = times(turns(vad, heard, ServerVad(prefix_padding_ms=padding)))
    ((unpadded, _),) = times(turns(vad, heard, ServerVad(prefix_padding_ms=0)))
    assert start == unpadded - padding and unpadded == pytest.approx(1000, abs=CLOSE_MS)


def test_padding_reaches_neither_before_the_stream_nor_into_the_turn_before(vad: Vad, question: Samples) -> None:
    heard = numpy.concatenate([silence(0.1), question, silence(0.7), question, silence(1.0)])
    config = ServerVad(prefix_padding_ms=2000, silence_duration_ms=200)
    (first, second) = times(turns(vad, heard, config))
    assert first[0] == 0 and second[0] == first[1]


@pytest.mark.parametrize("duration", [0, 200, 1000, 2000])
def test_silence_duration(vad: Vad, duration: int) -> None:
    word = say("Yes.")
    heard = numpy.concatenate([silence(1.0), word, silence(3.0)])
    ((_, stop),) = times(turns(vad, heard, ServerVad(silence_duration_ms=duration)))
    assert stop == pytest.approx(1000 + ms(word) + duration, abs=CLOSE_MS)


def test_a_pause_shorter_than_the_silence_is_part_of_the_turn(vad: Vad, question: Samples) -> None:
    heard = numpy.concatenate([silence(1.0), question, silence(0.8), question, silence(2.0)])
    assert len(times(turns(vad, heard, ServerVad(silence_duration_ms=1200)))) == 1
    assert len(times(turns(vad, heard, ServerVad(silence_duration_ms=300)))) == 2


def test_idle_timeout(vad: Vad, question: Samples) -> None:
    config = ServerVad(idle_timeout_ms=5000)
    detector = TurnDetector(config, vad)
    assert pushed(detector, silence(8.0)) == []  # nothing has been said to the user yet
    assert pushed(detector, silence(2.0), playing=True) == []
    assert pushed(detector, silence(4.9)) == []
    (event,) = pushed(detector, silence(0.2))
    assert isinstance(event, IdleTimeout)
    assert (event.audio_start_ms, event.audio_end_ms) == pytest.approx((10_000, 15_000), abs=CLOSE_MS)
    assert pushed(detector, silence(8.0)) == []  # once for each answer
    pushed(detector, silence(1.0), playing=True)
    assert [type(event) for event in pushed(detector, silence(6.0))] == [IdleTimeout]
    pushed(detector, silence(1.0), playing=True)
    spoken = pushed(detector, numpy.concatenate([silence(1.0), question, silence(8.0)]))
    assert [type(event) for event in spoken] == [SpeechStarted, SpeechStopped]


def test_without_an_idle_timeout_silence_says_nothing(vad: Vad) -> None:
    detector = TurnDetector(DEFAULT, vad)
    pushed(detector, silence(1.0), playing=True)
    assert pushed(detector, silence(40.0), 4000) == []


def test_a_commit_in_the_middle_of_speech_begins_a_new_turn(vad: Vad, question: Samples) -> None:
    detector = TurnDetector(DEFAULT, vad)
    half = len(question) // 2
    (begun,) = pushed(detector, numpy.concatenate([silence(1.0), question[:half]]))
    assert isinstance(begun, SpeechStarted) and detector.speaking
    detector.reset()
    assert not detector.speaking
    (start, stop) = pushed(detector, numpy.concatenate([question[half:], silence(1.0)]))
    assert isinstance(start, SpeechStarted) and start.audio_start_ms >= 1000 + half * 1000 // RATE
    assert isinstance(stop, SpeechStopped) and stop.audio_end_ms == pytest.approx(1000 + ms(question) + 500, abs=CLOSE_MS)


def test_a_detector_may_take_over_in_the_middle_of_a_stream(vad: Vad, question: Samples) -> None:
    heard = numpy.concatenate([silence(1.0), question, silence(1.0)])
    first = TurnDetector(ServerVad(threshold=1.0), vad)
    assert pushed(first, silence(3.0)) == [] and first.position == 3 * RATE
    second = TurnDetector(DEFAULT, vad, position=first.position)
    ((start, stop),) = times(pushed(second, heard))
    assert (start, stop) == pytest.approx((3700, 4000 + ms(question) + 500), abs=CLOSE_MS)


def test_what_a_buffer_must_keep_is_the_padding_or_the_turn(vad: Vad, question: Samples) -> None:
    """No event ever speaks of audio that `needed_from_ms` had given up before."""
    config = ServerVad(prefix_padding_ms=400, idle_timeout_ms=5000)
    detector = TurnDetector(config, vad)
    heard = numpy.concatenate([silence(2.0), question, silence(2.0), question, silence(1.0)])
    given_up = 0
    for start in range(0, len(heard), 320):
        playing = start < RATE
        for event in detector.push(heard[start : start + 320], playing=playing):
            if isinstance(event, SpeechStarted):
                assert event.audio_start_ms >= given_up
        assert detector.needed_from_ms >= given_up
        given_up = detector.needed_from_ms
    assert ms(heard) - given_up <= 400 + 2 * 32 + 5000
    pushed(detector, silence(20.0))
    assert detector.position * 1000 / RATE - detector.needed_from_ms <= 400 + 2 * 32


@pytest.mark.parametrize("config", [ServerVad(idle_timeout_ms=5000), SemanticVad()], ids=["server_vad", "semantic_vad"])
def test_ten_minutes_of_silence_leave_nothing_behind(vad: Vad, question: Samples, config: TurnDetection) -> None:
    detector = TurnDetector(config, vad)
    pushed(detector, numpy.concatenate([silence(1.0), question, silence(5.0)]))
    minute = with_noise(silence(60.0), 0.001)
    gc.collect()
    tracemalloc.start()
    try:
        pushed(detector, minute, 4000)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(9):
            assert not [event for event in pushed(detector, minute, 4000) if not isinstance(event, IdleTimeout)]
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 4096


def test_the_model_is_loaded_once_whoever_asks(vad: Vad) -> None:
    found: list[Vad] = []
    threads = [threading.Thread(target=lambda: found.append(Vad.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4 and {id(one) for one in found} == {id(vad)}


def test_streams_do_not_touch_each_other(vad: Vad, question: Samples) -> None:
    alone, mixed = VadState(), VadState()
    other = VadState()
    frames = [question[start : start + FRAME] for start in range(0, len(question) - FRAME, FRAME)]
    expected = [vad.probability(frame, alone) for frame in frames]
    heard = []
    for frame in frames:
        heard.append(vad.probability(frame, mixed))
        vad.probability(frame[::-1].copy(), other)
    assert heard == expected


def test_each_frame_is_heard_with_the_end_of_the_frame_before(vad: Vad, question: Samples) -> None:
    """As silero's own code feeds the model: 64 samples of context in front of each 512, the recurrent state handed on."""
    state = VadState()
    padded = numpy.concatenate([silence(64 / RATE), question])
    recurrent = numpy.zeros((2, 1, 128), numpy.float32)
    for start in range(0, 20 * FRAME, FRAME):
        feed = {"input": padded[None, start : start + 64 + FRAME], "state": recurrent, "sr": numpy.array(RATE, numpy.int64)}
        expected, recurrent = vad._session.run(None, feed)
        assert vad.probability(question[start : start + FRAME], state) == float(expected[0, 0])


class ScriptedVad(Vad):
    """Probabilities as written, one a frame; 0 behind the last."""

    def __init__(self, *probabilities: float) -> None:
        self._left = list(probabilities)

    def probability(self, frame: Samples, state: VadState) -> float:
        return self._left.pop(0) if self._left else 0.0


def scripted(*probabilities: float, config: TurnDetection = DEFAULT, frames: int = 60) -> list[TurnEvent]:
    return TurnDetector(config, ScriptedVad(*probabilities)).push(numpy.zeros(frames * FRAME, numpy.float32))


BARE = ServerVad(prefix_padding_ms=0, silence_duration_ms=320)  # ten frames


def test_one_frame_of_speech_is_no_turn_and_two_in_a_row_are() -> None:
    assert scripted(0.0, 0.99, 0.0, 0.99, 0.3, 0.99, config=BARE) == []
    assert scripted(0.0, 0.5, 0.5, config=BARE) == [SpeechStarted(32), SpeechStopped(96 + 320)]


def test_a_voice_that_wavers_below_the_threshold_goes_on() -> None:
    wavering = [0.9, 0.9, *[0.4] * 30, 0.9]
    assert scripted(*wavering, config=BARE) == [SpeechStarted(0), SpeechStopped(len(wavering) * 32 + 320)]
    assert scripted(*[0.9, 0.9, *[0.3] * 30, 0.9], config=BARE) == [SpeechStarted(0), SpeechStopped(64 + 320)]


def test_silence_that_begins_after_wavering_begins_where_the_wavering_ends() -> None:
    assert scripted(0.9, 0.9, *[0.4] * 30, config=BARE)[1] == SpeechStopped(31 * 32 + 320)


def test_speech_within_the_silence_starts_it_anew() -> None:
    assert scripted(0.9, 0.9, *[0.0] * 8, 0.9, *[0.0] * 8, 0.9, config=BARE)[1:] == [SpeechStopped(20 * 32 + 320)]


def test_loading_imports_neither_torch_nor_the_models_package(vad: Vad) -> None:
    code = (
        "import sys; from omni_bus.api.voice import vad, turns\n"
        "assert 'onnxruntime' not in sys.modules\n"
        "vad.Vad.load(); print(sorted({'torch', 'silero_vad', 'torchaudio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["silero_vad", "onnxruntime"])
def test_a_missing_package_is_said_with_what_installs_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = vad_module.importlib.util.find_spec
    monkeypatch.setattr(vad_module.importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(vad_module, "_loaded", vad_module._loaded.__wrapped__)
    with pytest.raises(ModelRefused) as caught:
        Vad.load()
    assert caught.value.code == "turn_detection_unavailable" and "\n" not in caught.value.message
    assert missing.replace("_", "-") in caught.value.message and "pip install" in caught.value.message


def test_configurations_as_the_protocol_has_them() -> None:
    assert parse_turn_detection(None, "t") is None and turn_detection_to_json(None) is None
    assert parse_turn_detection({"type": "server_vad"}, "t") == DEFAULT
    assert turn_detection_to_json(DEFAULT) == {
        "type": "server_vad",
        "threshold": 0.5,
        "prefix_padding_ms": 300,
        "silence_duration_ms": 500,
        "idle_timeout_ms": None,
        "create_response": True,
        "interrupt_response": True,
    }
    semantic = parse_turn_detection({"type": "semantic_vad", "eagerness": "low", "unknown": 1}, "t")
    assert semantic == SemanticVad(eagerness="low")
    assert turn_detection_to_json(semantic) == {
        "type": "semantic_vad",
        "eagerness": "low",
        "create_response": True,
        "interrupt_response": True,
    }


def test_an_update_keeps_what_it_does_not_name() -> None:
    before = ServerVad(threshold=0.7, idle_timeout_ms=6000)
    after = parse_turn_detection({"type": "server_vad", "silence_duration_ms": 900, "threshold": None}, "t", before)
    assert after == ServerVad(threshold=0.7, idle_timeout_ms=6000, silence_duration_ms=900)
    assert parse_turn_detection({"idle_timeout_ms": None}, "t", after) == ServerVad(threshold=0.7, silence_duration_ms=900)
    assert parse_turn_detection({"type": "semantic_vad"}, "t", before) == SemanticVad()


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ("server_vad", "t"),
        ([], "t"),
        ({"type": "vad"}, "t.type"),
        ({"type": None}, "t.type"),
        ({"type": "server_vad", "threshold": 1.5}, "t.threshold"),
        ({"type": "server_vad", "threshold": "0.5"}, "t.threshold"),
        ({"type": "server_vad", "prefix_padding_ms": -1}, "t.prefix_padding_ms"),
        ({"type": "server_vad", "silence_duration_ms": 1.5}, "t.silence_duration_ms"),
        ({"type": "server_vad", "silence_duration_ms": 10**9}, "t.silence_duration_ms"),
        ({"type": "server_vad", "idle_timeout_ms": 10}, "t.idle_timeout_ms"),
        ({"type": "server_vad", "create_response": "yes"}, "t.create_response"),
        ({"type": "semantic_vad", "eagerness": "very"}, "t.eagerness"),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_field(raw: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_turn_detection(raw, "t")
    assert caught.value.param == param and param in caught.value.message
