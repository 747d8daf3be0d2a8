"""The user's audio as its client gets it back: the same sound in the session's format, and no more than a client reads as one event."""

from __future__ import annotations

import numpy
import pytest

from omni_bus.api.voice.formats import AudioFormat, InputAudioDecoder, duration_ms
from omni_bus.api.voice.items import SAMPLE_RATE, InputAudio, InputText, Item
from omni_bus.api.voice.kept_audio import MAX_AUDIO_SHOWN, audio_of


@pytest.mark.parametrize("audio_format", ["pcm16", "pcmu", "pcma"])
def test_it_is_the_same_sound(audio_format: AudioFormat) -> None:
    sound = (numpy.sin(numpy.arange(SAMPLE_RATE) * 2 * numpy.pi * 440 / SAMPLE_RATE) * 0.4).astype(numpy.float32)
    found = audio_of(Item.message("user", [InputText("hear this"), InputAudio(sound)]), audio_format)
    assert list(found) == [1]
    assert duration_ms(audio_format, len(found[1])) == pytest.approx(1000, abs=2)
    decoder = InputAudioDecoder(audio_format)
    again = numpy.concatenate([decoder.push(found[1]), decoder.flush()])[: len(sound)]
    error = again - sound[: len(again)]
    assert numpy.sqrt(numpy.mean(error[400:-400] ** 2)) < 0.01


def test_samples_beyond_full_scale_stay_there() -> None:
    loud = numpy.array([2.0, -2.0] * 800, numpy.float32)
    [pcm] = audio_of(Item.message("user", [InputAudio(loud)]), "pcm16_16k").values()
    assert set(numpy.frombuffer(pcm, "<i2")) == {32767, -32768}


def test_what_is_too_long_is_left_out_whole() -> None:
    minute = InputAudio(numpy.zeros(60 * SAMPLE_RATE, numpy.float32))
    found = audio_of(Item.message("user", [minute, minute, minute, InputAudio(numpy.zeros(100, numpy.float32))]), "pcm16")
    assert list(found) == [0, 1, 3]
    assert sum(map(len, found.values())) <= MAX_AUDIO_SHOWN
    assert MAX_AUDIO_SHOWN * 4 / 3 < 8 * 2**20 - 100_000, "as base64, with the rest of the event"


def test_words_alone_have_no_audio() -> None:
    said = InputAudio(numpy.empty(0, numpy.float32), "hello")
    assert audio_of(Item.message("user", [said, InputText("hi")]), "pcm16") == {}
