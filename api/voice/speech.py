"""An answer's audio on its way to the client: encoded, cut so that it fits into the lead, and sent no further ahead than that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from omni_bus.api.voice.formats import RATES, SAMPLE_BYTES, AudioFormat, OutputAudioEncoder, duration_ms

SLICE_MS = 100  # of audio: once the lead is used up, it is sent in slices of so much


class PacedSpeech:
    """One answer. lead_s: seconds of audio that are sent and not yet played, of all the session's answers.

    tell: whole samples, their milliseconds, and the characters said at their end where that is known. drained: until the client has
    taken what it was told. held_back: entered while nothing is sent although there is audio, because the lead is used up.
    """

    def __init__(
        self,
        audio_format: AudioFormat,
        speed: float,
        most_s: float,
        *,
        lead_s: Callable[[float], float],
        tell: Callable[[bytes, float, int | None], None],
        drained: Callable[[], Awaitable[None]],
        held_back: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._format: AudioFormat = audio_format
        self._speed = speed
        self._most_s = most_s
        self._lead_s = lead_s
        self._tell = tell
        self._drained = drained
        self._held_back = held_back
        self._encoder: OutputAudioEncoder | None = None
        self._source_rate = 0

    async def send(self, pcm: bytes | bytearray | memoryview, rate: int, spoken: int | None) -> None:
        """int16 mono at `rate`: returns when all of it has been sent."""
        if self._encoder is None or rate != self._source_rate:
            await self.flush()
            self._encoder, self._source_rate = OutputAudioEncoder(self._format, rate, self._speed), rate
        await self._send(self._encoder.push(pcm), spoken)

    async def flush(self) -> None:
        """The answer's audio is complete: what the encoder has held back."""
        if self._encoder is not None:
            await self._send(self._encoder.flush(), None)

    async def _send(self, data: bytes, spoken: int | None) -> None:
        """As much at once as fits, so that nothing waits that need not."""
        sample = SAMPLE_BYTES[self._format]
        a_second = RATES[self._format] * sample
        smallest = a_second * SLICE_MS // 1000
        start = 0
        while start < len(data):
            room = int((self._most_s - self._lead_s(time.monotonic())) * a_second)
            wanted = min(smallest, len(data) - start)
            if room < wanted:
                with self._held_back():
                    await asyncio.sleep((wanted - room) / a_second)
                continue
            end = min(len(data), start + room // sample * sample)
            self._tell(data[start:end], duration_ms(self._format, end - start), spoken if end == len(data) else None)
            start = end
            await self._drained()
