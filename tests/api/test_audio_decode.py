"""Audio files of every kind that clients send, made here and decoded to float32 mono 16 kHz."""

from __future__ import annotations

import base64
import io
import tracemalloc
import wave
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from omni_bus.api.audio_decode import decode_audio
from omni_bus.api.audio_encode import encode_audio
from omni_bus.api.wav import wav_header
from omni_bus.errors import TooLarge, UndecodableMedia

SECONDS = 1.0
TONE_HZ = 440.0


def tone(rate: int, channels: int, seconds: float = SECONDS) -> np.ndarray[Any, Any]:
    """Amplitude 0.5; in stereo the left channel alone, so that mono has half of it."""
    wave_form = 0.5 * np.sin(2 * np.pi * TONE_HZ * np.arange(int(rate * seconds)) / rate)
    return wave_form if channels == 1 else np.stack([wave_form, np.zeros_like(wave_form)], axis=1)


def by_soundfile(kind: str, rate: int, channels: int) -> bytes:
    container, _, subtype = kind.partition("/")
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(rate, channels), rate, format=container, subtype=subtype or None)
    return buffer.getvalue()


def by_av(container_format: str, codec: str, rate: int) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        samples = tone(rate, 1).astype(np.float32)
        size = stream.codec_context.frame_size or 1024
        for start in range(0, len(samples), size):
            frame = av.AudioFrame.from_ndarray(samples[None, start : start + size], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = rate, start
            for part in av.AudioResampler(format=stream.format, layout="mono", rate=rate).resample(frame):
                container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def check(content: bytes, channels: int, *, slack: float) -> None:
    samples = np.frombuffer(decode_audio(content, False, "field"), dtype="<f4")
    assert len(samples) / 16_000 == pytest.approx(SECONDS, abs=slack)
    middle = samples[4000:12_000]
    amplitude = 0.5 / channels
    assert np.sqrt((middle**2).mean()) == pytest.approx(amplitude / np.sqrt(2), rel=0.06)  # LAME turns the volume down a little
    spectrum = np.abs(np.fft.rfft(middle))
    assert np.argmax(spectrum) * 16_000 / len(middle) == pytest.approx(TONE_HZ, abs=4)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
@pytest.mark.parametrize(
    "kind", ["WAV/PCM_16", "WAV/PCM_24", "WAV/FLOAT", "WAV/PCM_U8", "WAV/ULAW", "WAV/ALAW", "FLAC", "OGG/VORBIS", "MP3"]
)
def test_decoding(kind: str, rate: int, channels: int) -> None:
    lossy = kind in ("OGG/VORBIS", "MP3")
    check(by_soundfile(kind, rate, channels), channels, slack=0.05 if lossy else 0.001)


@pytest.mark.parametrize(
    ("container_format", "codec", "rate"),
    [
        ("ogg", "libopus", 48_000),
        ("webm", "libopus", 48_000),
        ("ipod", "aac", 44_100),
        ("adts", "aac", 48_000),
        ("mp3", "libmp3lame", 24_000),
    ],
)
def test_decoding_what_browsers_and_phones_record(container_format: str, codec: str, rate: int) -> None:
    check(by_av(container_format, codec, rate), 1, slack=0.12)


def test_a_16_khz_wav_comes_through_exactly() -> None:
    samples = (tone(16_000, 1) * 32767).astype(np.int16)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 16_000, format="WAV", subtype="PCM_16")
    decoded = np.frombuffer(decode_audio(buffer.getvalue(), False, "field"), dtype="<f4")
    assert np.array_equal(decoded, samples.astype(np.float32) / 32768)


def test_raw_pcm16_is_24_khz() -> None:
    pcm = (tone(24_000, 1) * 32767).astype("<i2").tobytes()
    assert len(decode_audio(pcm, True, "field")) == 16_000 * 4


@pytest.mark.parametrize("audio_format", ["wav", "mp3", "opus", "flac"])
def test_what_is_encoded_decodes(audio_format: str) -> None:
    pcm = (tone(24_000, 1) * 32767).astype("<i2").tobytes()
    check(encode_audio(pcm, 24_000, audio_format), 1, slack=0.05)


@pytest.mark.parametrize("cut", [0, 3, 12, 44, 45])
def test_cut_wav(cut: int) -> None:
    with pytest.raises(UndecodableMedia):
        decode_audio(by_soundfile("WAV/PCM_16", 16_000, 1)[:cut], False, "field")


@pytest.mark.parametrize("kind", ["FLAC", "OGG/VORBIS", "MP3", "WAV/PCM_16"])
def test_damage_is_an_error_or_sound_but_never_a_crash(kind: str) -> None:
    content = bytearray(by_soundfile(kind, 16_000, 1))
    generator = np.random.default_rng(5)
    for _ in range(30):
        damaged = bytearray(content)
        for position in generator.integers(0, len(damaged), 20):
            damaged[position] = generator.integers(0, 256)
        try:
            samples = decode_audio(damaged, False, "field")
        except UndecodableMedia:
            continue
        assert 0 < len(samples) < 16_000 * 4 * 60


def test_a_small_file_does_not_unpack_beyond_the_limit() -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(8_000 * 1200, dtype=np.int16), 8_000, format="FLAC")
    assert len(buffer.getvalue()) < 100_000, "20 minutes of silence in a small file"
    with pytest.raises(TooLarge, match="minutes"):
        decode_audio(buffer.getvalue(), False, "field", 600.0)


def test_a_video_without_sound_has_no_audio() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
        for _ in range(3):
            container.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24").reformat(format="yuv420p")
                )
            )
        container.mux(stream.encode(None))
    with pytest.raises(UndecodableMedia, match="no audio"):
        decode_audio(buffer.getvalue(), False, "field")


async def test_audio_reaches_the_bus_as_float32(server: Any) -> None:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(48_000)
        file.writeframes(np.full(96_000, 16_384, dtype="<i2").tobytes())
    data = base64.b64encode(buffer.getvalue()).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(bytes(480)).decode(), "format": "pcm16"}},
    ]
    status, _ = await server.chat(messages=[{"role": "user", "content": parts}])
    assert status == 200
    tensors = server.bus.submissions[0].tensors
    assert [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()] == [
        ("media0", "float32", (16_000,)),
        ("media1", "float32", (16_000,)),
        ("media2", "float32", (160,)),
    ]
    samples = np.frombuffer(tensors["media0"].data, dtype="<f4")
    assert np.allclose(samples[100:-100], 0.5, atol=1e-3) and bytes(tensors["media1"].data) == samples.tobytes()


async def test_one_request_may_not_hold_more_audio_than_the_limit(server: Any) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(8_000 * 1000, dtype=np.int16), 8_000, format="FLAC")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(buffer.getvalue()).decode(), "format": "flac"}}
    status, answer = await server.chat(messages=[{"role": "user", "content": [part, part]}])
    assert (status, answer["error"]["code"]) == (413, "too_large")
    assert answer["error"]["param"] == "messages[0].content[1].input_audio.data"


def test_a_large_file_is_not_copied_before_it_is_decoded() -> None:
    """A copy holds the interpreter, and with it every other request, for as long as it takes."""
    content = bytearray(wav_header(48_000, 2**25) + bytes(2**25))
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decode_audio(content, False, "file", max_seconds=1.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**22
