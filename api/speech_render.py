"""Speech on its way out: the bus's audio as the bytes of a file, or as OpenAI's speech.audio events."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import Executor
from typing import Any

from omni_bus.api.audio_encode import AudioEncoder
from omni_bus.api.bus import Item, RequestStream
from omni_bus.api.chat_usage import openai_usage
from omni_bus.api.speech_request import SpeechRequest
from omni_bus.api.sse import error_event, event
from omni_bus.api.timing import AnswerTiming
from omni_bus.errors import OmniBusError
from omni_bus.payloads import AudioDelta

CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm16": "audio/pcm",
}
_SILENT_RATE = 24_000  # of a file without a sample


class AudioBody:
    """The file itself, as it is made."""

    def __init__(self, speech: SpeechRequest, timing: AnswerTiming, threads: Executor) -> None:
        self._speech = speech
        self._timing = timing
        self._threads = threads
        self._encoder: AudioEncoder | None = None

    async def item(self, item: Item) -> bytes:
        if not isinstance(item.payload, AudioDelta) or "pcm" not in item.tensors:
            return b""  # the text is the client's own
        pcm, rate = item.tensors["pcm"].data, item.payload.sample_rate
        encoder = self._encoder_at(rate)
        data = await asyncio.get_running_loop().run_in_executor(self._threads, encoder.push, pcm)
        self._timing.audio(len(pcm) / 2 / rate / self._speech.speed)
        return data

    async def finish(self, stream: RequestStream) -> bytes:
        encoder = self._encoder_at(_SILENT_RATE)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encoder.close)

    def failure(self, error: OmniBusError) -> bytes | None:
        return None  # any byte would be taken for audio

    def _encoder_at(self, rate: int) -> AudioEncoder:
        if self._encoder is None:
            self._encoder = AudioEncoder(self._speech.audio_format, rate, speed=self._speech.speed)
        return self._encoder


class SpeechEvents:
    """The same file in base64, piece by piece, and at the end what it took."""

    def __init__(self, audio: AudioBody, text_stage: str) -> None:
        self._audio = audio
        self._text_stage = text_stage

    async def item(self, item: Item) -> bytes:
        return _delta(await self._audio.item(item))

    async def finish(self, stream: RequestStream) -> bytes:
        last = _delta(await self._audio.finish(stream))
        return last + event({"type": "speech.audio.done", "usage": speech_usage(stream, self._text_stage)})

    def failure(self, error: OmniBusError) -> bytes:
        return error_event(error)


def _delta(data: bytes) -> bytes:
    return event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode("ascii")}) if data else b""


def speech_usage(stream: RequestStream, text_stage: str) -> dict[str, Any]:
    """In: tokens of the text and of what stands before it. Out: codec frames; 0 for a synthesiser that has none."""
    counted = openai_usage(stream.usage, text_stage)
    read, made = counted["total_tokens"], counted["completion_tokens_details"]["audio_tokens"]
    return {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}
