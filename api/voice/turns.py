"""Turns of a user, told from the audio as it comes: when speech begins, when the turn is over, when nobody has said a word."""

from __future__ import annotations

import collections
import dataclasses

import numpy
from numpy.typing import NDArray

from omni_bus.api.voice.items import SAMPLE_RATE
from omni_bus.api.voice.turn_config import SemanticVad, ServerVad, TurnDetection
from omni_bus.api.voice.turn_end import HEARD_S, SETTLED_MS, silence_needed_ms
from omni_bus.api.voice.vad import FRAME, Vad, VadState

ONSET = 2  # frames of speech in a row that begin a turn: a click is one
HYSTERESIS = 0.15  # silence begins so far below the threshold: voices waver
_PER_MS = SAMPLE_RATE // 1000
_RECENT = (int(HEARD_S * 1000) + SETTLED_MS) * _PER_MS // FRAME + 2  # frames


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
    """One stream's turns. All times are milliseconds of the stream, whose first sample is `position`; no clock is read.

    What it keeps does not grow: less than a frame of audio, and the last two seconds of a turn for semantic_vad.
    """

    def __init__(self, config: TurnDetection, vad: Vad, *, position: int = 0) -> None:
        """position: samples of the stream before the first push, for a detector that takes over in its middle."""
        self._vad = vad
        self._state = VadState()
        self._semantic = config if isinstance(config, SemanticVad) else None
        fields = config if isinstance(config, ServerVad) else ServerVad()
        self._threshold = fields.threshold
        self._silent_below = max(fields.threshold - HYSTERESIS, 0.01)
        self._padding = fields.prefix_padding_ms * _PER_MS
        self._silence = fields.silence_duration_ms * _PER_MS
        self._idle = None if fields.idle_timeout_ms is None else fields.idle_timeout_ms * _PER_MS

        # All positions are samples of the stream.
        self._pending = numpy.empty(0, numpy.float32)  # less than a frame
        self._heard = position  # up to here the model has heard the stream
        self._floor = position  # what lies before belongs to an earlier turn
        self._start: int | None = None  # of the turn, padding included; None while nobody speaks
        self._onset: list[int] = []  # frames that may become the beginning of a turn
        self._speech_end = position
        self._silence_start: int | None = None
        self._needed: int | None = None  # of the silence that has begun; None while it cannot be told
        self._longest_pause = 0
        self._recent: collections.deque[NDArray[numpy.float32]] = collections.deque(maxlen=_RECENT)
        self._awaited = False  # an answer has been played, and nobody has spoken since
        self._idle_start: int | None = None

    @property
    def speaking(self) -> bool:
        return self._start is not None

    @property
    def position(self) -> int:
        """Samples of the stream so far."""
        return self._heard + len(self._pending)

    @property
    def needed_from_ms(self) -> int:
        """Audio before this time can no longer be part of a turn: what a buffer need not keep."""
        if self._start is not None:
            return self._start // _PER_MS
        earliest = max(self._floor, (self._onset[0] if self._onset else self._heard) - self._padding)
        return min(earliest, earliest if self._idle_start is None else self._idle_start) // _PER_MS

    def push(self, samples: NDArray[numpy.float32], *, playing: bool = False) -> list[TurnEvent]:
        """samples: float32, mono, 16 kHz, any number. playing: an answer is being made or played while they are heard.

        A second of audio takes some 10 ms of one core.
        """
        events: list[TurnEvent] = []
        waiting = numpy.concatenate([self._pending, samples]) if len(self._pending) else samples
        whole = len(waiting) - len(waiting) % FRAME
        for start in range(0, whole, FRAME):
            self._frame(waiting[start : start + FRAME], playing, events)
        self._pending = waiting[whole:].copy()
        return events

    def reset(self) -> None:
        """The buffer was committed or cleared by the client: a turn that had begun is forgotten; the time goes on."""
        self._end_turn(self.position)
        self._idle_start = None

    def _frame(self, frame: NDArray[numpy.float32], playing: bool, events: list[TurnEvent]) -> None:
        probability = self._vad.probability(frame, self._state)
        start, self._heard = self._heard, self._heard + FRAME
        if self._start is None:
            self._listen(start, probability, events)
            self._wait_for_speech(start, playing, events)
        else:
            self._follow(start, probability, events)
        if self._semantic is not None and (self._start is not None or self._onset):
            self._recent.append(frame.copy())

    def _listen(self, start: int, probability: float, events: list[TurnEvent]) -> None:
        """While nobody speaks."""
        if probability < self._threshold:
            self._onset.clear()
            self._recent.clear()
            return
        self._onset.append(start)
        if len(self._onset) < ONSET:
            return
        self._start = max(self._floor, self._onset[0] - self._padding)
        self._speech_end = start + FRAME
        self._onset.clear()
        self._awaited, self._idle_start = False, None
        events.append(SpeechStarted(self._start // _PER_MS))

    def _follow(self, start: int, probability: float, events: list[TurnEvent]) -> None:
        """While somebody speaks, or has paused."""
        if probability >= self._threshold:
            if self._silence_start is not None:
                self._longest_pause = max(self._longest_pause, start - self._silence_start)
                self._silence_start = None
            self._speech_end = start + FRAME
            return
        if self._silence_start is None:
            if probability >= self._silent_below:
                return
            # A frame or so between speech and silence is silence already; a voice that wavers for longer is not.
            self._silence_start = max(self._speech_end, start - FRAME)
            self._needed = self._silence if self._semantic is None else None
        if self._needed is None and self._semantic is not None and start - self._silence_start >= SETTLED_MS * _PER_MS:
            self._needed = self._silence_needed(start, self._semantic)
        end = self._silence_start + self._needed if self._needed is not None else None
        if end is not None and end <= start + FRAME:
            events.append(SpeechStopped(end // _PER_MS))
            self._end_turn(end)

    def _silence_needed(self, start: int, semantic: SemanticVad) -> int:
        """Samples of silence that end the turn, told once the silence, which lasts up to `start`, has settled."""
        assert self._silence_start is not None
        recent = numpy.concatenate(list(self._recent))
        silent = start - self._silence_start
        speech, silence = recent[:-silent], recent[-silent:]
        pause_ms = self._longest_pause / _PER_MS
        return int(silence_needed_ms(speech, silence, pause_ms, semantic.eagerness) * _PER_MS)

    def _end_turn(self, floor: int) -> None:
        self._start = self._silence_start = None
        self._floor = floor
        self._longest_pause = 0
        self._onset.clear()
        self._recent.clear()

    def _wait_for_speech(self, start: int, playing: bool, events: list[TurnEvent]) -> None:
        """The idle timeout, from the end of an answer on."""
        if self._idle is None or self._start is not None:
            return
        if playing:
            self._awaited, self._idle_start = True, None
            return
        if not self._awaited:
            return
        if self._idle_start is None:
            self._idle_start = start
        end = self._idle_start + self._idle
        if end <= start + FRAME:
            events.append(IdleTimeout(self._idle_start // _PER_MS, end // _PER_MS))
            self._awaited, self._idle_start = False, None
            self._floor = end
