"""The user's audio that a conversation keeps, given back to its client."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from omni_bus.api.voice.formats import RATES, SAMPLE_BYTES, AudioFormat, OutputAudioEncoder
from omni_bus.api.voice.items import SAMPLE_RATE, InputAudio, Item

# Bytes of one item: two minutes of PCM16. Base64 of more would not fit into the 8 MiB that openai-agents reads as one event.
MAX_AUDIO_SHOWN = 6_000_000


def audio_of(item: Item, audio_format: AudioFormat) -> dict[int, bytes]:
    """Content index → the audio there, as far as each fits whole. Minutes of audio take tens of milliseconds: call it in a thread."""
    found: dict[int, bytes] = {}
    left = MAX_AUDIO_SHOWN
    for index, part in enumerate(item.content):
        if not isinstance(part, InputAudio) or not len(part.pcm16k):
            continue
        size = len(part.pcm16k) * RATES[audio_format] // SAMPLE_RATE * SAMPLE_BYTES[audio_format]
        if size <= left:
            left -= size
            found[index] = encoded(part.pcm16k, audio_format)
    return found


def encoded(samples: NDArray[numpy.float32], audio_format: AudioFormat) -> bytes:
    """samples: float32, mono, 16 kHz."""
    pcm = (numpy.clip(samples, -1.0, 32767 / 32768) * 32768).astype("<i2")
    encoder = OutputAudioEncoder(audio_format, SAMPLE_RATE)
    return encoder.push(pcm.tobytes()) + encoder.flush()
