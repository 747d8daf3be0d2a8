"""What the events of a streamed chat hold for a listener, in our wire shape and in that of servers who send audio as content."""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

SAMPLE_RATE = 24_000  # of pcm16 without a header


@dataclasses.dataclass(slots=True)
class SpeechStream:
    """Reads events one by one. PCM is int16, little-endian, mono at `sample_rate`."""

    sample_rate: int = SAMPLE_RATE
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, event: dict[str, Any]) -> tuple[str, bytes]:
        """The text and the PCM that one event brings; both may be empty."""
        self.usage = event.get("usage") or self.usage
        text, pcm = "", b""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            audio = (delta.get("audio") or {}).get("data")
            content = delta.get("content") or ""
            if event.get("modality") == "audio" and not audio:
                audio, content = content, ""
            text += content
            pcm += self._samples(base64.b64decode(audio)) if audio else b""
        return text, pcm

    def _samples(self, data: bytes) -> bytes:
        """Without the WAV header that a chunk may begin with; its sizes may be unset, as nobody knew them."""
        if data[:4] != b"RIFF":
            return data
        start = 12
        while start + 8 <= len(data) and data[start : start + 4] != b"data":
            if data[start : start + 4] == b"fmt ":
                self.sample_rate = struct.unpack_from("<I", data, start + 12)[0]
            start += 8 + struct.unpack_from("<I", data, start + 4)[0]
        return data[start + 8 :]


def underrun_s(packets: Sequence[tuple[float, float]]) -> float:
    """Seconds of silence heard by a listener who plays from the first packet on. packets: (arrival s, length s)."""
    silence = 0.0
    played_until = packets[0][0] if packets else 0.0
    for arrival, length in packets:
        silence += max(0.0, arrival - played_until)
        played_until = max(played_until, arrival) + length
    return silence
