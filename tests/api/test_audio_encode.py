"""Every format, whole and in pieces: what is decoded is what went in, and pieces leave before the end."""

from __future__ import annotations

import itertools

import numpy
import pytest

from omni_bus.api.audio_decode import decode_audio
from omni_bus.api.audio_encode import FORMATS, AudioEncoder, encode_audio
from omni_bus.api.tempo import Tempo

RATE = 24_000
PACKED = [name for name in FORMATS if name != "pcm16"]


def tone(seconds: float, hertz: float = 440.0) -> bytes:
    time = numpy.arange(int(seconds * RATE)) / RATE
    return bytes((0.3 * numpy.sin(2 * numpy.pi * hertz * time) * 32767).astype("<i2").tobytes())


def pieces(pcm: bytes, sizes: list[int]) -> list[bytes]:
    """The samples in pieces of these sizes, over and over."""
    cut, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(pcm):
            return cut
        cut.append(pcm[at : at + 2 * size])
        at += 2 * size
    raise AssertionError("unreachable")


def decoded(file: bytes) -> numpy.ndarray:
    """float32 [samples] at 16 kHz."""
    return numpy.frombuffer(bytes(decode_audio(file, False, "file")), "<f4")


def pitch(samples: numpy.ndarray) -> float:
    """Of the loudest tone, in hertz."""
    return float(numpy.abs(numpy.fft.rfft(samples)).argmax()) * 16_000 / len(samples)


@pytest.mark.parametrize("audio_format", PACKED)
@pytest.mark.parametrize("streamed", [True, False])
def test_what_is_decoded_is_what_went_in(audio_format: str, streamed: bool) -> None:
    encoder = AudioEncoder(audio_format, RATE, streamed=streamed)
    file = b"".join(map(encoder.push, pieces(tone(3.0), [4800]))) + encoder.close()
    heard = decoded(file)
    assert len(heard) / 16_000 == pytest.approx(3.0, abs=0.08)
    assert pitch(heard) == pytest.approx(440.0, abs=1.0)
    middle = heard[8_000:40_000]
    assert numpy.sqrt(numpy.mean(middle**2)) == pytest.approx(0.3 / 2**0.5, rel=0.08)  # LAME lowers it by 5 %


@pytest.mark.parametrize("audio_format", FORMATS)
def test_pieces_leave_while_the_audio_is_still_being_made(audio_format: str) -> None:
    encoder = AudioEncoder(audio_format, RATE)
    first = encoder.push(tone(0.5))
    more = [encoder.push(tone(0.5)) for _ in range(10)]
    assert first and all(more), "half a second of audio never waits for the next"
    assert encoder.close() is not None


@pytest.mark.parametrize("audio_format", FORMATS)
@pytest.mark.parametrize("speed", [1.0, 1.3])
def test_the_file_does_not_depend_on_how_the_audio_was_cut(audio_format: str, speed: float) -> None:
    files = set()
    for sizes in ([48_000], [4_800], [1, 7, 333], [23_999, 2]):
        encoder = AudioEncoder(audio_format, RATE, speed=speed)
        made = [encoder.push(piece) for piece in pieces(tone(0.7), sizes)] + [encoder.close()]
        file = b"".join(made)
        # An ogg stream's serial number is drawn anew, and with it every page's checksum.
        files.add(decoded(file).tobytes() if audio_format == "opus" else file)
    assert len(files) == 1


@pytest.mark.parametrize("audio_format", FORMATS)
def test_no_audio_is_a_file_too(audio_format: str) -> None:
    for streamed, speed in ((True, 1.0), (False, 1.0), (True, 2.0)):
        encoder = AudioEncoder(audio_format, RATE, streamed=streamed, speed=speed)
        file = encoder.push(b"") + encoder.close()
        assert len(file) < 10_000
        if audio_format == "wav":
            assert file[:4] == b"RIFF" and len(file) == 44


def test_a_whole_wav_knows_its_length_and_a_streamed_one_does_not() -> None:
    whole, encoder = encode_audio(tone(1.0), RATE, "wav"), AudioEncoder("wav", RATE)
    assert int.from_bytes(whole[40:44], "little") == 48_000 == len(whole) - 44
    streamed = encoder.push(tone(0.5)) + encoder.push(tone(0.5)) + encoder.close()
    assert streamed[40:44] == b"\xff" * 4 and streamed.count(b"RIFF") == 1
    assert encode_audio(tone(1.0), RATE, "pcm16") == tone(1.0)


def test_an_encoder_that_is_given_up_does_no_harm() -> None:
    for audio_format in FORMATS:
        encoder = AudioEncoder(audio_format, RATE)
        encoder.push(tone(0.5))
        del encoder


@pytest.mark.parametrize("speed", [0.25, 0.3, 0.5, 0.9, 1.5, 2.0, 2.5, 4.0])
def test_speed_changes_the_length_and_not_the_pitch(speed: float) -> None:
    encoder = AudioEncoder("wav", RATE, speed=speed)
    heard = decoded(b"".join(map(encoder.push, pieces(tone(4.0), [12_000]))) + encoder.close())
    assert len(heard) / 16_000 == pytest.approx(4.0 / speed, rel=0.02)
    assert pitch(heard) == pytest.approx(440.0, abs=2.0)


def test_a_tempo_without_samples_makes_none() -> None:
    tempo = Tempo(RATE, 1.5)
    assert tempo.push(b"") == b"" == tempo.flush()
