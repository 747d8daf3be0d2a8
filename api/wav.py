"""WAV headers and PCM16 as text: what little audio framing the API does itself."""

from __future__ import annotations

import struct

STREAMED = 0xFFFF_FFFF  # the length field of a stream whose end is not known


def wav_header(sample_rate: int, data_bytes: int | None) -> bytes:
    """44 bytes: RIFF, PCM, 16 bits, mono; `data_bytes` None = a stream of unknown length."""
    data = STREAMED if data_bytes is None else data_bytes
    riff = STREAMED if data_bytes is None else data_bytes + 36
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, sample_rate, sample_rate * 2, 2, 16, b"data", data
    )
