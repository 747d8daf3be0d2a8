"""Turns of a user, told from the audio as it comes: when speech begins, when the turn is over, when nobody has said a word."""

from __future__ import annotations

import dataclasses

import numpy
from numpy.typing import NDArray

from omni_bus.api.voice.turn_config import TurnDetection
from omni_bus.api.voice.vad import Vad


@dataclasses.dataclass(frozen=True, slots=True)
class SpeechStarted:
    """audio_start_ms: where the turn's audio begins, prefix padding included."""

    audio_start_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class SpeechStopped:
    """audio_end_ms: where the turn's audio ends, the silence that ended it included."""

    audio_end_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class IdleTimeout:
    """Nobody has spoken between these times, since the last answer was played."""

    audio_start_ms: int
    audio_end_ms: int


TurnEvent = SpeechStarted | SpeechStopped | IdleTimeout


class TurnDetector:
    """One stream's turns. All times are milliseconds of the stream, whose first sample is `position`; no clock is read."""

    def __init__(self, config: TurnDetection, vad: Vad, *, position: int = 0) -> None:
        """position: samples of the stream before the first push, for a detector that takes over in its middle."""

    @property
    def speaking(self) -> bool:
        raise NotImplementedError

    @property
    def needed_from_ms(self) -> int:
        """Audio before this time can no longer be part of a turn: what a buffer need not keep."""
        raise NotImplementedError

    def push(self, samples: NDArray[numpy.float32], *, playing: bool = False) -> list[TurnEvent]:
        """samples: float32, mono, 16 kHz, any number. playing: an answer is being made or played while they are heard."""
        raise NotImplementedError

    def reset(self) -> None:
        """The buffer was committed or cleared by the client: a turn that had begun is forgotten; the time goes on."""
        raise NotImplementedError
