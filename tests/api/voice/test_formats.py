"""Audio formats of a voice connection: streaming equals one piece, nothing is lost on the way, speed keeps the pitch."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

from omni_bus.api.voice.formats import (
    RATES,
    SAMPLE_BYTES,
    AudioFormat,
    InputAudioDecoder,
    OutputAudioEncoder,
    duration_ms,
    format_to_json,
    parse_format,
)
from omni_bus.errors import InvalidRequest

FORMATS: tuple[AudioFormat, ...] = ("pcm16", "pcm16_16k", "pcm16_8k", "pcmu", "pcma")


def tone(rate: int, seconds: float, hertz: float = 440.0, level: float = 12_000.0) -> NDArray[numpy.int16]:
    return (numpy.sin(numpy.arange(int(rate * seconds)) * (2 * numpy.pi * hertz / rate)) * level).astype(numpy.int16)


def noise(seconds: float, audio_format: AudioFormat) -> bytes:
    size = int(seconds * RATES[audio_format]) * SAMPLE_BYTES[audio_format]
    return numpy.random.default_rng(3).integers(0, 256, size, numpy.uint8).tobytes()


def pieces(data: bytes, seed: int, largest: int) -> list[bytes]:
    """`data` cut at random, into empty pieces too."""
    sizes, cut = random.Random(seed), []
    position = 0
    while position < len(data):
        size = sizes.randrange(0, largest)
        cut.append(data[position : position + size])
        position += size
    return cut


def decoded(audio_format: AudioFormat, data: list[bytes]) -> NDArray[numpy.float32]:
    decoder = InputAudioDecoder(audio_format)
    return numpy.concatenate([*(decoder.push(piece) for piece in data), decoder.flush()])


def encoded(audio_format: AudioFormat, data: list[bytes], rate: int = 24_000, speed: float = 1.0) -> bytes:
    encoder = OutputAudioEncoder(audio_format, rate, speed)
    return b"".join([*(encoder.push(piece) for piece in data), encoder.flush()])


def snr_db(heard: NDArray[Any], ideal: NDArray[Any]) -> float:
    """Without the ends, where a filter has only one side."""
    count = min(len(heard), len(ideal)) - 1600
    heard, ideal = heard[1600:count].astype(numpy.float64), ideal[1600:count].astype(numpy.float64)
    return float(10 * numpy.log10(numpy.mean(ideal**2) / numpy.mean((heard - ideal) ** 2)))


def hertz(samples: NDArray[Any], rate: int) -> float:
    window = samples[2000:-2000].astype(numpy.float64)
    spectrum = numpy.abs(numpy.fft.rfft(window * numpy.hanning(len(window))))
    return float(spectrum.argmax() * rate / len(window))


@pytest.mark.parametrize("audio_format", FORMATS)
@pytest.mark.parametrize(("seed", "largest"), [(1, 5), (2, 999), (3, 200_000)])
def test_input_in_odd_pieces_equals_one_piece(audio_format: AudioFormat, seed: int, largest: int) -> None:
    data = noise(0.5 if largest < 10 else 3.0, audio_format)
    whole = decoded(audio_format, [data])
    cut = decoded(audio_format, pieces(data, seed, largest))
    assert numpy.array_equal(whole, cut)
    assert whole.dtype == numpy.float32 and len(whole) == pytest.approx(
        len(data) / SAMPLE_BYTES[audio_format] * 16_000 / RATES[audio_format], abs=2
    )


@pytest.mark.parametrize("audio_format", FORMATS)
@pytest.mark.parametrize("rate", [16_000, 24_000, 48_000])
def test_output_in_odd_pieces_equals_one_piece(audio_format: AudioFormat, rate: int) -> None:
    data = tone(rate, 2.0).tobytes()
    assert encoded(audio_format, pieces(data, 1, 777), rate) == encoded(audio_format, [data], rate)


def test_pcm16_at_24_khz_passes_as_it_is() -> None:
    data = noise(1.0, "pcm16")
    encoder = OutputAudioEncoder("pcm16", 24_000)
    assert encoder.push(data[:5]) == data[:4]  # half a sample waits
    assert encoder.push(data[5:]) == data[4:] and encoder.flush() == b""


def test_output_leaves_almost_at_once() -> None:
    """A first packet is not held back by a filter for longer than 2 ms."""
    for audio_format in FORMATS:
        out = OutputAudioEncoder(audio_format, 24_000).push(tone(24_000, 0.08).tobytes())
        assert duration_ms(audio_format, len(out)) >= 78


def test_input_is_at_most_2_ms_behind() -> None:
    for audio_format in FORMATS:
        decoder = InputAudioDecoder(audio_format)
        sent = noise(0.1, audio_format)
        assert len(decoder.push(sent)) >= 0.098 * 16_000


@pytest.mark.parametrize(
    ("audio_format", "at_least_db"), [("pcm16", 70), ("pcm16_16k", 70), ("pcm16_8k", 60), ("pcmu", 35), ("pcma", 35)]
)
def test_there_and_back(audio_format: AudioFormat, at_least_db: float) -> None:
    """What a client hears of us, sent back to us, is what we said: G.711 costs what G.711 costs, and nothing is shifted."""
    back = decoded(audio_format, [encoded(audio_format, [tone(24_000, 2.0).tobytes()])])
    assert snr_db(back, tone(16_000, 2.0) / 32768) > at_least_db


@pytest.mark.parametrize("level", [300.0, 3_000.0, 30_000.0])
@pytest.mark.parametrize("audio_format", ["pcmu", "pcma"])
def test_g711_is_as_good_for_quiet_as_for_loud(audio_format: AudioFormat, level: float) -> None:
    sent = tone(8_000, 2.0, level=level)
    back = decoded(audio_format, [encoded(audio_format, [sent.tobytes()], 8_000)])
    assert snr_db(back, tone(16_000, 2.0, level=level) / 32768) > (25 if level == 300.0 else 35)


def test_g711_silence_is_the_standards_byte() -> None:
    """So that the two laws cannot be mixed up unnoticed."""
    silence = bytes(1600)
    assert set(encoded("pcmu", [silence], 8_000)) == {0xFF}
    assert set(encoded("pcma", [silence], 8_000)) == {0xD5}
    assert not decoded("pcmu", [b"\xff" * 800]).any()


@pytest.mark.parametrize("speed", [0.25, 0.4, 0.5, 0.8, 1.25, 1.5])
@pytest.mark.parametrize("audio_format", FORMATS)
def test_speed_changes_the_duration_and_not_the_pitch(audio_format: AudioFormat, speed: float) -> None:
    out = encoded(audio_format, pieces(tone(24_000, 4.0).tobytes(), 2, 5_000), speed=speed)
    assert duration_ms(audio_format, len(out)) * speed == pytest.approx(4000, rel=0.02)
    assert hertz(decoded(audio_format, [out]), 16_000) == pytest.approx(440, rel=0.01)


@pytest.mark.parametrize("speed", [0.24, 1.51, 0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_out_of_range_is_refused(speed: float) -> None:
    with pytest.raises(InvalidRequest, match=r"speed must be a number from 0\.25 to 1\.5"):
        OutputAudioEncoder("pcm16", 24_000, speed)


@pytest.mark.parametrize("speed", [1.0, 1.3])
@pytest.mark.parametrize("audio_format", FORMATS)
def test_after_a_flush_a_stream_begins_anew(audio_format: AudioFormat, speed: float) -> None:
    data = tone(16_000, 1.0).tobytes()
    encoder = OutputAudioEncoder(audio_format, 16_000, speed)
    first = encoder.push(data + b"x") + encoder.flush()
    assert encoder.push(data) + encoder.flush() == first
    decoder = InputAudioDecoder(audio_format)
    heard = numpy.concatenate([decoder.push(first), decoder.flush()])
    assert numpy.array_equal(numpy.concatenate([decoder.push(first), decoder.flush()]), heard)


def test_nothing_in_is_nothing_out() -> None:
    for audio_format in FORMATS:
        assert len(decoded(audio_format, [])) == 0 and len(decoded(audio_format, [b""])) == 0
        assert encoded(audio_format, []) == b"" and encoded(audio_format, [b""], speed=1.2) == b""


def test_any_buffer_will_do() -> None:
    data = tone(24_000, 0.1).tobytes()
    decoder, encoder = InputAudioDecoder("pcm16"), OutputAudioEncoder("pcm16", 24_000)
    assert numpy.array_equal(numpy.concatenate([decoder.push(bytearray(data)), decoder.flush()]), decoded("pcm16", [data]))
    assert encoder.push(memoryview(data)) == data


def test_formats_as_the_protocol_has_them() -> None:
    for shown, name in (
        ({"type": "audio/pcm", "rate": 24000}, "pcm16"),
        ({"type": "audio/pcmu"}, "pcmu"),
        ({"type": "audio/pcma"}, "pcma"),
    ):
        assert parse_format(shown, "p") == name
        assert format_to_json(parse_format(shown, "p")) == shown
    assert parse_format({"type": "audio/pcm"}, "p") == "pcm16"


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (None, "audio.format.type"),
        ("pcm16", "audio.format.type"),
        ({}, "audio.format.type"),
        ({"type": "audio/opus"}, "audio.format.type"),
        ({"type": ["audio/pcm"]}, "audio.format.type"),
        ({"type": "audio/pcm", "rate": 16000}, "audio.format.rate"),
        ({"type": "audio/pcm", "rate": "24000"}, "audio.format.rate"),
        ({"type": "audio/pcmu", "rate": 24000}, "audio.format.rate"),
        ({"type": "audio/pcm", "rate": True}, "audio.format.rate"),
    ],
)
def test_a_wrong_format_is_refused_by_its_field(raw: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_format(raw, "audio.format")
    assert caught.value.param == param and param in caught.value.message
