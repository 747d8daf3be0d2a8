"""Speech synthesiser: speaks clause by clause with hibari (ONNX Runtime), while the answer is still being written."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Iterable

import numpy
import torch
from hibari import SAMPLE_RATE, Hibari

from omni_bus.errors import ModelRefused, ProtocolViolation
from omni_bus.payloads import AudioDelta
from omni_bus.stages import failures
from omni_bus.stages.cascade.payloads import Clause
from omni_bus.stages.cascade.spec import VOICE, TtsOptions
from omni_bus.stages.contract import (
    Chunk,
    Consumed,
    Emission,
    Finished,
    Output,
    StageContext,
    StageError,
    StageRequest,
    StageStats,
    WokenByEvents,
)

DELTA = SAMPLE_RATE // 2  # samples of one chunk at most: 24 kB, small enough to travel inside its event
QUIET = 0.001  # amplitude below which the ends of a clause count as silence; the model's own silence is at 0.00001
LEAD_IN = SAMPLE_RATE // 50
PAUSE = {",": 0.12, ";": 0.2, ":": 0.2, ".": 0.35, "!": 0.35, "?": 0.35, "…": 0.4}  # seconds behind a clause that ends so
NO_PAUSE = 0.03

logger = logging.getLogger(__name__)


def trimmed(audio: numpy.ndarray, text: str) -> numpy.ndarray:
    """float32 [samples] with the silence at both ends brought to what the clause's last mark asks for.

    The model pads whatever it is given as if it were a whole utterance (about 0.3 s in front), which between clauses is a stumble
    and before the first one is time that nobody hears.
    """
    loud = numpy.flatnonzero(numpy.abs(audio) > QUIET)
    if not len(loud):
        return audio[:0]
    pause = int(PAUSE.get(text.rstrip("\"'”’)]*_ \n")[-1:], NO_PAUSE) * SAMPLE_RATE)
    start, end = max(0, int(loud[0]) - LEAD_IN), int(loud[-1]) + 1
    return numpy.pad(audio[start : end + pause], (0, max(0, end + pause - len(audio))))


@dataclasses.dataclass(slots=True)
class _Job:
    request: StageRequest
    noise: numpy.random.Generator
    clauses: collections.deque[Chunk] = dataclasses.field(default_factory=collections.deque)
    samples: int = 0
    spoken: int = 0  # characters of the clauses that have been turned into sound
    paused: bool = False

    @property
    def ready(self) -> bool:
        return not self.paused and bool(self.clauses)


class TtsStage(WokenByEvents):
    """`llm->tts` Clause → `tts->client` AudioDelta, 24 kHz. A step speaks one clause of one request; requests take turns.

    What the model has no sounds for (emoji, other scripts) is left out.
    """

    def load(self, ctx: StageContext) -> None:
        options = ctx.options(TtsOptions)
        ctx.progress(0.1, "loading hibari")
        self._speed, self._seed = options.speed, options.seed
        self._model = Hibari(VOICE, threads=ctx.config.threads or torch.get_num_threads())
        ctx.progress(0.5, "warming up")
        self._speak("All set, ready to go.", numpy.random.default_rng(0))
        self._jobs: dict[int, _Job] = {}
        self._turn: collections.deque[int] = collections.deque()
        self._batch = 0

    def open(self, request: StageRequest) -> None:
        voice = request.options.voice
        if voice not in (None, VOICE):
            raise ModelRefused(f'unknown voice; this model has one, "{VOICE}"', param="audio.voice")
        seed = self._seed if request.options.seed is None else request.options.seed
        self._jobs[request.id] = _Job(request, numpy.random.default_rng(seed % 2**64))
        self._turn.append(request.id)

    def feed(self, request_id: int, chunk: Chunk) -> None:
        if not isinstance(chunk.payload, Clause):
            raise ProtocolViolation("the speech synthesiser was sent something other than a clause")
        self._jobs[request_id].clauses.append(chunk)

    def cancel(self, request_id: int) -> None:
        if self._jobs.pop(request_id, None) is not None:
            self._turn.remove(request_id)

    def pause(self, request_id: int) -> None:
        if request_id in self._jobs:
            self._jobs[request_id].paused = True

    def resume(self, request_id: int) -> None:
        if request_id in self._jobs:
            self._jobs[request_id].paused = False

    def has_work(self) -> bool:
        return any(job.ready for job in self._jobs.values())

    def step(self) -> Iterable[Emission]:
        job = next((self._jobs[key] for key in self._turn if self._jobs[key].ready), None)
        self._batch = int(job is not None)
        if job is None:
            return []
        request_id = job.request.id
        self._turn.remove(request_id)
        self._turn.append(request_id)
        chunk = job.clauses.popleft()
        assert isinstance(chunk.payload, Clause)
        try:
            pcm = self._speak(chunk.payload.text, job.noise)
        except Exception as error:
            failures.raise_if_device_is_lost(error)
            logger.exception("request %d: a clause could not be spoken", request_id)
            self.cancel(request_id)
            return [StageError(request_id, failures.for_client(error, "the speech synthesiser failed on this answer").info())]
        out = self._deltas(job, pcm, len(chunk.payload.text))
        out.append(Consumed(request_id, chunk.edge))
        if chunk.last:
            out.append(Output(request_id, "tts->client", AudioDelta(SAMPLE_RATE, job.spoken), last=True))
            out.append(Finished(request_id, {"audio_ms": job.samples * 1000 // SAMPLE_RATE}))
            self.cancel(request_id)
        return out

    def _deltas(self, job: _Job, pcm: torch.Tensor, characters: int) -> list[Emission]:
        """A clause's samples in pieces. Where its characters fall is known at its ends; between them they pass evenly."""
        out: list[Emission] = []
        played = 0
        for piece in torch.split(pcm, DELTA):
            if not len(piece):
                continue
            played += len(piece)
            delta = AudioDelta(SAMPLE_RATE, job.spoken + characters * played // len(pcm))
            out.append(Output(job.request.id, "tts->client", delta, {"pcm": piece}))
        job.samples += played
        job.spoken += characters
        return out

    def _speak(self, text: str, noise: numpy.random.Generator) -> torch.Tensor:
        """A clause → int16 [samples], 24 kHz, maybe empty."""
        spoken = [
            self._model.from_ids(self._model.ids(phonemes), self._speed, noise)
            for phonemes in self._model.phonemize(text)
            if any(character.isalpha() for character in phonemes)
        ]
        if not spoken:
            return torch.empty(0, dtype=torch.int16)
        audio = trimmed(numpy.concatenate(spoken), text)
        return torch.from_numpy((numpy.clip(audio, -1.0, 1.0) * 32767.0).astype(numpy.int16))

    def stats(self) -> StageStats:
        ready = sum(job.ready for job in self._jobs.values())
        return StageStats(waiting=len(self._jobs) - ready, running=ready, batch=self._batch)
