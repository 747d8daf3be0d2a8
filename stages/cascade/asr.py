"""Speech recogniser: writes down every audio part of a conversation's messages with Whisper tiny.en."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Iterable, Iterator

import numpy
import torch

from omni_bus.errors import ModelRefused, ProtocolViolation, UndecodableMedia
from omni_bus.payloads import ChatInput, InputTranscript, MediaPart, Message, TextPart, TranscriptWish
from omni_bus.stages import failures
from omni_bus.stages.cascade.kept_transcripts import KeptTranscripts
from omni_bus.stages.cascade.payloads import Prompt, Turn
from omni_bus.stages.cascade.recogniser import LANGUAGE, SAMPLE_RATE, Heard, Recogniser, windows
from omni_bus.stages.cascade.spec import AsrOptions
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

MAX_AMPLITUDE = 1e6  # full scale is 1

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Hearing:
    """An audio that is being written down, window by window."""

    audio: numpy.ndarray
    key: bytes | None = None
    windows: Iterator[numpy.ndarray] | None = None  # not yet heard; None before the first look
    samples: int = 0  # of the windows heard


@dataclasses.dataclass(slots=True)
class _Part:
    """A part of a message: text as it came, or what has been heard so far."""

    heard: Heard
    hearing: _Hearing | None = None


@dataclasses.dataclass(slots=True)
class _Job:
    request: StageRequest
    messages: list[tuple[Message, list[_Part]]] = dataclasses.field(default_factory=list)
    tools: list[str] = dataclasses.field(default_factory=list)
    say: str | None = None
    wish: TranscriptWish | None = None
    unheard: collections.deque[_Part] = dataclasses.field(default_factory=collections.deque)
    chunks: int = 0  # of the entry edge, not yet reported as consumed
    samples: int = 0
    heard_samples: int = 0  # of those, the ones that the model had to listen to
    complete: bool = False
    paused: bool = False

    @property
    def ready(self) -> bool:
        return not self.paused and (bool(self.unheard) or self.complete)


class AsrStage(WokenByEvents):
    """`client->asr` ChatInput → `asr->client` InputTranscript for each audio, then `asr->llm` Prompt.

    A step hears one window of at most 30 s; requests take turns, and those without sound do not wait for them. A request for the
    modality "transcript" has its transcript piece by piece, window by window. One that only prepares hears nothing: it goes on with
    the messages whose audio is known already, up to the first that holds another.
    """

    def load(self, ctx: StageContext) -> None:
        options = ctx.options(AsrOptions)
        ctx.progress(0.1, "loading Whisper tiny.en")
        self._recogniser = Recogniser(compute_type=options.compute_type, threads=ctx.config.threads or torch.get_num_threads())
        ctx.progress(0.7, "warming up")
        self._recogniser.hear(numpy.zeros(SAMPLE_RATE, numpy.float32), TranscriptWish())
        self._kept = KeptTranscripts(options.kept_transcripts)
        self._jobs: dict[int, _Job] = {}
        self._turn: collections.deque[int] = collections.deque()

    def open(self, request: StageRequest) -> None:
        self._jobs[request.id] = _Job(request)
        self._turn.append(request.id)

    def feed(self, request_id: int, chunk: Chunk) -> None:
        job, said = self._jobs[request_id], chunk.payload
        if not isinstance(said, ChatInput):
            raise ProtocolViolation("the speech recogniser was sent something other than a conversation")
        if said.transcript is not None and said.transcript.language not in ("", *self._recogniser.languages):
            known = ", ".join(self._recogniser.languages)
            raise ModelRefused(f"language: this model's recogniser understands {known} only", param="language")
        job.tools += said.tools
        job.say = said.say if said.say is not None else job.say
        job.wish = said.transcript if said.transcript is not None else job.wish
        for message in said.messages:
            parts = [self._part(job, part, chunk) for part in message.parts]
            job.messages.append((message, parts))
        job.chunks += 1
        job.complete = job.complete or chunk.last

    def _part(self, job: _Job, part: TextPart | MediaPart, chunk: Chunk) -> _Part:
        if isinstance(part, TextPart):
            return _Part(Heard(part.text))
        if part.kind != "audio":
            raise ModelRefused(f"this model takes text and audio, not {part.kind}", param="messages")
        audio = chunk.tensors[f"media{part.index}"].numpy()
        # A float WAV may hold anything, and Whisper hears words in it; NaN fails the comparison too.
        if not numpy.abs(audio).max(initial=0.0) <= MAX_AMPLITUDE:
            raise UndecodableMedia("the audio holds samples that are no numbers, or far beyond full scale", param="messages")
        job.samples += len(audio)
        unheard = _Part(Heard(), _Hearing(audio))
        job.unheard.append(unheard)
        return unheard

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
        out: list[Emission] = []
        for job in [job for job in self._jobs.values() if job.ready and not job.unheard]:
            self._finish(job, out)
        if (turn := self._next()) is not None:
            job = turn
            self._turn.remove(job.request.id)
            self._turn.append(job.request.id)
            try:
                if job.request.options.prepare or job.say is not None:
                    self._recall(job, out)
                else:
                    self._hear_on(job, out)
            except Exception as error:
                failures.raise_if_device_is_lost(error)
                logger.exception("request %d: transcription failed", job.request.id)
                self.cancel(job.request.id)
                said = failures.for_client(error, "the speech recogniser failed on this audio")
                out.append(StageError(job.request.id, said.info()))
        return out

    def _next(self) -> _Job | None:
        """Whose turn it is; one that only prepares comes behind all others."""
        ready = [job for key in self._turn if (job := self._jobs[key]).ready]
        return next((job for job in ready if not job.request.options.prepare), next(iter(ready), None))

    def _hear_on(self, job: _Job, out: list[Emission]) -> None:
        """One window more of the job's first audio that is not written down; or all of it, if it has been heard before."""
        part, wish = job.unheard[0], job.wish or TranscriptWish()
        hearing = part.hearing
        assert hearing is not None
        if hearing.windows is None:
            hearing.key = self._kept.key(hearing.audio, wish)
            known = self._kept.find(hearing.key)
            if known is not None:
                part.heard = known
                self._written_down(job, out, known)
                return
            hearing.windows = windows(hearing.audio)
        window = next(hearing.windows, None)
        if window is None:
            self._kept.keep(hearing.key, part.heard)
            self._written_down(job, out, Heard() if job.wish is not None else part.heard)
            return
        heard = self._recogniser.hear(window, wish, hearing.samples / SAMPLE_RATE)
        hearing.samples += len(window)
        job.heard_samples += len(window)
        part.heard = part.heard.then(heard)
        if job.wish is not None:
            self._tell(job, out, heard)

    def _written_down(self, job: _Job, out: list[Emission], untold: Heard) -> None:
        """The job's first audio is done; `untold`: what the client has not had of it."""
        job.unheard.popleft().hearing = None
        if untold.text or job.wish is None:
            self._tell(job, out, untold)
        if job.complete and not job.unheard:
            self._finish(job, out)

    def _recall(self, job: _Job, out: list[Emission]) -> None:
        """What is known of the job's audio already; it goes on without the rest, and without the messages behind it."""
        wish = job.wish or TranscriptWish()
        for number, (_, parts) in enumerate(job.messages):
            for part in parts:
                if part.hearing is None:
                    continue
                known = self._kept.find(self._kept.key(part.hearing.audio, wish))
                if known is None:
                    del job.messages[number:]
                    break
                part.heard = known
            else:
                continue
            break
        job.unheard.clear()
        if job.complete:
            self._finish(job, out)

    def _tell(self, job: _Job, out: list[Emission], heard: Heard) -> None:
        self._emit(job, out, "asr->client", InputTranscript(heard.text, heard.segments, LANGUAGE))

    def _finish(self, job: _Job, out: list[Emission]) -> None:
        turns = tuple(
            Turn(message.role, " ".join(part.heard.text for part in parts if part.heard.text), message.tool_calls)
            for message, parts in job.messages
        )
        self._emit(job, out, "asr->client", InputTranscript(""), last=True)
        self._emit(job, out, "asr->llm", Prompt(turns, tuple(job.tools), job.say), last=True)
        out.append(Consumed(job.request.id, "client->asr", job.chunks))
        usage = {
            "audio_ms": job.samples * 1000 // SAMPLE_RATE,
            "heard_ms": job.heard_samples * 1000 // SAMPLE_RATE,
        }
        out.append(Finished(job.request.id, usage))
        self.cancel(job.request.id)

    def _emit(
        self, job: _Job, out: list[Emission], edge: str, payload: InputTranscript | Prompt, *, last: bool = False
    ) -> None:
        if edge in job.request.outputs:
            out.append(Output(job.request.id, edge, payload, last=last))

    def stats(self) -> StageStats:
        running = sum(bool(job.unheard) for job in self._jobs.values())
        return StageStats(waiting=len(self._jobs) - running, running=running, batch=int(running > 0))
