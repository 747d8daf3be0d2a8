"""Audio on a voice connection: PCM16 at 24 kHz, or G.711 at 8 kHz, to and from what the models take and make. Streaming."""

from __future__ import annotations

from typing import Any, Literal

import numpy
from numpy.typing import NDArray

AudioFormat = Literal["pcm16", "pcmu", "pcma"]

RATES: dict[AudioFormat, int] = {"pcm16": 24_000, "pcmu": 8_000, "pcma": 8_000}
SAMPLE_BYTES: dict[AudioFormat, int] = {"pcm16": 2, "pcmu": 1, "pcma": 1}
MIN_SPEED, MAX_SPEED = 0.25, 1.5


def parse_format(raw: object, param: str) -> AudioFormat:
    """{"type": "audio/pcm", "rate": 24000} | {"type": "audio/pcmu"} | {"type": "audio/pcma"}; InvalidRequest otherwise."""
    raise NotImplementedError


def format_to_json(audio_format: AudioFormat) -> dict[str, Any]:
    raise NotImplementedError


def duration_ms(audio_format: AudioFormat, size: int) -> float:
    """Milliseconds of `size` bytes."""
    return size * 1000 / (RATES[audio_format] * SAMPLE_BYTES[audio_format])


class InputAudioDecoder:
    """One stream of audio from a client. A cut inside a sample is carried over to the next piece."""

    def __init__(self, audio_format: AudioFormat) -> None: ...

    def push(self, data: bytes | bytearray | memoryview) -> NDArray[numpy.float32]:
        """float32 [samples], mono, 16 kHz; may be empty, and is a fraction of a millisecond behind what came in."""
        raise NotImplementedError

    def flush(self) -> NDArray[numpy.float32]:
        """The rest; the decoder is then as new."""
        raise NotImplementedError


class OutputAudioEncoder:
    """One answer's audio to a client. speed: 0.25 to 1.5 times as fast, the pitch kept."""

    def __init__(self, audio_format: AudioFormat, source_rate: int, speed: float = 1.0) -> None: ...

    def push(self, pcm: bytes | bytearray | memoryview) -> bytes:
        """pcm: int16 mono at `source_rate`. May return nothing yet."""
        raise NotImplementedError

    def flush(self) -> bytes:
        """The rest; the encoder is then as new."""
        raise NotImplementedError
