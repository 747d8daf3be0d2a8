"""Audio on a voice connection: PCM16 at 24, 16 or 8 kHz, or G.711 at 8 kHz, to and from what the models take and make. Streaming.

Codecs, resampler and tempo are FFmpeg's, through PyAV. Its resampler and codecs give the same samples however a stream is cut.
"""

from __future__ import annotations

from typing import Any, Literal

import av
import numpy
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from omni_bus.api.tempo import Tempo
from omni_bus.api.voice.items import SAMPLE_RATE
from omni_bus.errors import InvalidRequest

AudioFormat = Literal["pcm16", "pcm16_16k", "pcm16_8k", "pcmu", "pcma"]

RATES: dict[AudioFormat, int] = {"pcm16": 24_000, "pcm16_16k": 16_000, "pcm16_8k": 8_000, "pcmu": 8_000, "pcma": 8_000}
SAMPLE_BYTES: dict[AudioFormat, int] = {"pcm16": 2, "pcm16_16k": 2, "pcm16_8k": 2, "pcmu": 1, "pcma": 1}
MIN_SPEED, MAX_SPEED = 0.25, 1.5

# By their names in the Realtime protocol, which has PCM at one rate only.
_TYPES: dict[AudioFormat, str] = {"pcm16": "audio/pcm", "pcmu": "audio/pcmu", "pcma": "audio/pcma"}
_CODECS: dict[AudioFormat, str] = {"pcmu": "pcm_mulaw", "pcma": "pcm_alaw"}
_PIECE = 64 * 1024  # samples that go through FFmpeg at a time: bounds what a large push needs


def parse_format(raw: object, param: str) -> AudioFormat:
    """{"type": "audio/pcm", "rate": 24000} | {"type": "audio/pcmu"} | {"type": "audio/pcma"}; InvalidRequest otherwise."""
    named = raw.get("type") if isinstance(raw, dict) else None
    audio_format = next((name for name, type_name in _TYPES.items() if type_name == named), None)
    if audio_format is None or not isinstance(raw, dict):
        raise InvalidRequest(f"{param}.type must be one of {', '.join(_TYPES.values())}", param=f"{param}.type")
    rate = raw.get("rate")
    if rate is not None and (isinstance(rate, bool) or rate != RATES[audio_format]):
        raise InvalidRequest(f"{param}.rate of {named} must be {RATES[audio_format]}", param=f"{param}.rate")
    return audio_format


def format_to_json(audio_format: AudioFormat) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": _TYPES[audio_format]}
    return shown | {"rate": RATES[audio_format]} if audio_format == "pcm16" else shown


def duration_ms(audio_format: AudioFormat, size: int) -> float:
    """Milliseconds of `size` bytes."""
    return size * 1000 / (RATES[audio_format] * SAMPLE_BYTES[audio_format])


class InputAudioDecoder:
    """One stream of audio from a client. A cut inside a sample is carried over to the next piece."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self._format = audio_format
        self._rest = b""
        self._start()

    def _start(self) -> None:
        self._codec = _codec(self._format, "r") if self._format in _CODECS else None
        self._resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)

    def push(self, data: bytes | bytearray | memoryview) -> NDArray[numpy.float32]:
        """float32 [samples], mono, 16 kHz; may be empty, and is about a millisecond behind what came in."""
        whole = self._rest + bytes(data)
        end = len(whole) - len(whole) % SAMPLE_BYTES[self._format]
        self._rest = whole[end:]
        step = _PIECE * SAMPLE_BYTES[self._format]
        return _joined([self._samples(whole[start : min(start + step, end)]) for start in range(0, end, step)])

    def flush(self) -> NDArray[numpy.float32]:
        """The rest; the decoder is then as new."""
        samples = _joined([_floats(frame) for frame in self._resampler.resample(None)])
        self._rest = b""
        self._start()
        return samples

    def _samples(self, data: bytes) -> NDArray[numpy.float32]:
        frames = [_frame(data, RATES[self._format])] if self._codec is None else self._codec.decode(av.Packet(data))
        return _joined([_floats(part) for frame in frames for part in self._resampler.resample(_untimed(frame))])


class OutputAudioEncoder:
    """One answer's audio to a client. speed: 0.25 to 1.5 times as fast, the pitch kept."""

    def __init__(self, audio_format: AudioFormat, source_rate: int, speed: float = 1.0) -> None:
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequest(f"speed must be a number from {MIN_SPEED} to {MAX_SPEED}", param="speed")
        self._format = audio_format
        self._source_rate = source_rate
        self._speed = speed
        self._as_it_is = audio_format not in _CODECS and source_rate == RATES[audio_format] and speed == 1.0
        self._rest = b""
        self._start()

    def _start(self) -> None:
        self._tempo = None if self._speed == 1.0 else Tempo(self._source_rate, self._speed)
        self._resampler = AudioResampler(format="s16", layout="mono", rate=RATES[self._format])
        self._codec = _codec(self._format, "w") if self._format in _CODECS else None

    def push(self, pcm: bytes | bytearray | memoryview) -> bytes:
        """pcm: int16 mono at `source_rate`. May return nothing yet."""
        whole = self._rest + bytes(pcm)
        end = len(whole) - len(whole) % 2
        self._rest = whole[end:]
        if self._as_it_is:
            return whole[:end]
        return b"".join(self._encoded(whole[start : min(start + 2 * _PIECE, end)]) for start in range(0, end, 2 * _PIECE))

    def flush(self) -> bytes:
        """The rest; the encoder is then as new."""
        rest = b""
        if not self._as_it_is:
            late = self._tempo.flush() if self._tempo is not None else b""
            rest = (self._resampled(_frame(late, self._source_rate)) if late else b"") + self._resampled(None)
        self._rest = b""
        self._start()
        return rest

    def _encoded(self, pcm: bytes) -> bytes:
        played = pcm if self._tempo is None else self._tempo.push(pcm)
        return self._resampled(_frame(played, self._source_rate)) if played else b""

    def _resampled(self, frame: AudioFrame | None) -> bytes:
        parts = self._resampler.resample(None if frame is None else _untimed(frame))
        if self._codec is None:
            return b"".join(bytes(memoryview(part.planes[0])[: part.samples * 2]) for part in parts)
        return b"".join(bytes(packet) for part in parts for packet in self._codec.encode(_untimed(part)))


def _codec(audio_format: AudioFormat, mode: Literal["r", "w"]) -> AudioCodecContext:
    codec = av.CodecContext.create(_CODECS[audio_format], mode)
    assert isinstance(codec, AudioCodecContext)
    codec.sample_rate = RATES[audio_format]
    codec.layout = "mono"
    if mode == "w":
        codec.format = "s16"
    codec.open()
    return codec


def _frame(pcm: bytes, rate: int) -> AudioFrame:
    frame = AudioFrame(format="s16", layout="mono", samples=len(pcm) // 2)
    frame.planes[0].update(pcm)
    frame.sample_rate = rate
    return frame


def _untimed(frame: AudioFrame) -> AudioFrame:
    """Without a time of its own: samples are in the order in which they come, and FFmpeg is not to stretch them to any clock."""
    frame.pts = None
    return frame


def _floats(frame: AudioFrame) -> NDArray[numpy.float32]:
    return numpy.frombuffer(bytes(frame.planes[0]), numpy.float32, frame.samples)


def _joined(parts: list[NDArray[numpy.float32]]) -> NDArray[numpy.float32]:
    if len(parts) == 1:
        return parts[0]
    return numpy.concatenate(parts) if parts else numpy.empty(0, numpy.float32)
