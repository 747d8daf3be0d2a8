"""The user's audio from the client's bytes to turns: decoded, watched for speech, and kept only as long as it may become an item."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
import numpy
from numpy.typing import NDArray

from omni_bus.api.voice.formats import AudioFormat, InputAudioDecoder, duration_ms
from omni_bus.api.voice.input_buffer import InputBuffer, to_ms, to_samples
from omni_bus.api.voice.items import SAMPLE_RATE, new_item_id
from omni_bus.api.voice.outbox import Outbox
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.turn_config import TurnDetection
from omni_bus.api.voice.turns import IdleTimeout, SpeechStarted, SpeechStopped, TurnDetector, TurnEvent
from omni_bus.api.voice.vad import Vad
from omni_bus.errors import InvalidRequest, ModelRefused

MIN_COMMIT = SAMPLE_RATE // 10  # samples: less than 0.1 s is not worth an item
DETECT = SAMPLE_RATE // 10  # samples looked at before others get their turn, and
DECODE = 64 * 1024  # bytes decoded

Samples = NDArray[numpy.float32]


class AudioOwner(Protocol):
    """Told of turns, each with the id of the item that it becomes."""

    @property
    def playing(self) -> bool:
        """An answer is being made, or heard by the user."""

    def on_speech_started(self, item_id: str, start_ms: int) -> None: ...
    def on_speech(self, samples: int) -> None:
        """So much of what will be an item has come in."""

    def on_speech_stopped(self, item_id: str, end_ms: int, samples: Samples) -> None: ...
    def on_idle(self, item_id: str, start_ms: int, end_ms: int, samples: Samples) -> None: ...


class UserAudio:
    def __init__(
        self,
        services: VoiceServices,
        outbox: Outbox,
        owner: AudioOwner,
        audio_format: AudioFormat,
        detection: TurnDetection | None,
    ) -> None:
        self._services = services
        self._outbox = outbox
        self._owner = owner
        self._format = audio_format
        self._detection = detection
        self._decoder = InputAudioDecoder(audio_format)
        self._buffer = InputBuffer()
        self._detector: TurnDetector | None = None
        self._turn: tuple[str, int] | None = None  # item id and first sample of speech that has not ended
        self._most = to_samples(services.config.session_buffer_s * 1000)
        self._closed = False

    @property
    def _heard(self) -> bool:
        return "audio" in self._services.model.pipeline.input_kinds

    async def configure(self, audio_format: AudioFormat, detection: TurnDetection | None) -> None:
        """From now on. Raises ModelRefused, and changes nothing, where turns cannot be told."""
        if detection is not None and detection != self._detection:
            if not self._heard:
                raise ModelRefused(
                    "this model takes no audio: set turn_detection to null", param="session.audio.input.turn_detection"
                )
            await self._load_vad()
        if audio_format != self._format:
            self._format, self._decoder = audio_format, InputAudioDecoder(audio_format)
        if _what_is_told(detection) != _what_is_told(self._detection):
            self._detector = None
            if detection is None and self._turn is not None:
                self._buffer.drop_before(self._turn[1])
            self._turn = None
        self._detection = detection

    async def append(self, data: bytes | bytearray | memoryview) -> None:
        """Raises InvalidRequest for more than the buffer takes, ModelRefused for a model without ears; nothing is kept then."""
        if not self._heard:
            raise ModelRefused("this model takes no audio", param="audio")
        if self._detection is None:
            self._check_room(len(data))
            async for samples in self._decoded(data):
                self._keep(samples)
            return
        if self._detector is None:
            self._detector = TurnDetector(self._detection, await self._load_vad(), position=self._buffer.position)
        async for samples in self._decoded(data):
            for start in range(0, len(samples), DETECT):
                if start:
                    await asyncio.sleep(0)
                if self._closed or self._detector is None:
                    return
                self._detect(self._detector, samples[start : start + DETECT].copy())  # a view would keep the whole
                await self._outbox.drained()

    async def _decoded(self, data: bytes | bytearray | memoryview) -> AsyncIterator[Samples]:
        """Piece by piece: much audio at once must not hold up other sessions."""
        for start in range(0, len(data), DECODE):
            if start:
                await asyncio.sleep(0)
            if self._closed:
                return
            yield self._decoder.push(data[start : start + DECODE])

    def commit(self) -> tuple[str, Samples]:
        """What is in the buffer, and the id of the item it becomes. Raises InvalidRequest where there is less than 0.1 s."""
        if self._detection is None:
            self._keep(self._decoder.flush())
        samples = self._buffer.read(None if self._turn is None else self._turn[1])
        if len(samples) < MIN_COMMIT:
            raise InvalidRequest(
                f"the audio buffer holds {to_ms(len(samples))} ms; at least {to_ms(MIN_COMMIT)} ms can be committed",
                code="input_audio_buffer_commit_empty",
            )
        item_id = new_item_id() if self._turn is None else self._turn[0]
        self.clear()
        return item_id, samples

    def clear(self) -> None:
        """Forget what is in the buffer, half a sample included, and a turn that had begun."""
        self._turn = None
        self._decoder.flush()
        self._buffer.clear()
        if self._detector is not None:
            self._detector.reset()

    def read(self, samples: int) -> Samples:
        """The first so many samples of what will be the next item."""
        return self._buffer.read(None if self._turn is None else self._turn[1])[:samples]

    def close(self) -> None:
        self._closed = True
        self.clear()

    async def _load_vad(self) -> Vad:
        return await asyncio.get_running_loop().run_in_executor(self._services.threads, Vad.load)

    def _check_room(self, size: int) -> None:
        """Without turn detection: before so many bytes are decoded, since a decoder does not forget. Raises InvalidRequest."""
        if len(self._buffer) + to_samples(duration_ms(self._format, size)) > self._most:
            raise InvalidRequest(
                f"audio: the buffer holds up to {self._services.config.session_buffer_s:g} s; commit or clear it",
                param="audio",
                code="input_audio_buffer_full",
            )

    def _keep(self, samples: Samples) -> None:
        """Without turn detection: until the client commits it."""
        self._buffer.push(samples)
        self._owner.on_speech(len(self._buffer))

    def _detect(self, detector: TurnDetector, samples: Samples) -> None:
        self._buffer.push(samples)
        for event in detector.push(samples, playing=self._owner.playing):
            self._turned(event)
        if self._turn is not None and self._buffer.position - self._turn[1] >= self._most:
            self._stop(self._buffer.position)
            detector.reset()
        if self._turn is None:
            self._buffer.drop_before(max(to_samples(detector.needed_from_ms), self._buffer.position - self._most))
        else:
            self._buffer.drop_before(self._turn[1])
            self._owner.on_speech(self._buffer.position - self._turn[1])

    def _turned(self, event: TurnEvent) -> None:
        match event:
            case SpeechStarted(start_ms):
                self._turn = new_item_id(), to_samples(start_ms)
                self._owner.on_speech_started(self._turn[0], start_ms)
            case SpeechStopped(end_ms):
                self._stop(to_samples(end_ms))
            case IdleTimeout(start_ms, end_ms):
                samples = self._buffer.read(to_samples(start_ms), to_samples(end_ms))
                self._owner.on_idle(new_item_id(), start_ms, end_ms, samples)

    def _stop(self, end: int) -> None:
        if self._turn is not None:
            (item_id, start), self._turn = self._turn, None
            self._owner.on_speech_stopped(item_id, to_ms(end), self._buffer.read(start, end))


def _what_is_told(detection: TurnDetection | None) -> TurnDetection | None:
    """What a detector is made for: what is done when a turn begins or ends is no part of it."""
    return detection and msgspec.structs.replace(detection, create_response=True, interrupt_response=True)
