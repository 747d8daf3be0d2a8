"""The three stages of the probe pipeline."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Literal

import torch

from omni_bus.errors import ModelRefused, StageFailed
from omni_bus.events import CLIENT
from omni_bus.payloads import AudioDelta, ChatInput, TextDelta, TextPart
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
from omni_bus.stages.probe.faults import StagePanic, Verdict, act, repeats
from omni_bus.stages.probe.spec import SAMPLE_RATE, SAMPLES_PER_WORD, ProbeOptions, ProbeWord

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Row:
    """One open request: chunks that wait, and for source the words of the chunk in hand."""

    request: StageRequest
    chunks: collections.deque[Chunk] = dataclasses.field(default_factory=collections.deque)
    words: collections.deque[str] = dataclasses.field(default_factory=collections.deque)
    closed: bool = False  # the last chunk is in hand
    paused: bool = False
    hung: bool = False
    prompt_words: int = 0
    emitted: int = 0

    @property
    def ready(self) -> bool:
        return not self.paused and not self.hung and bool(self.chunks or self.words)


class ProbeStage(WokenByEvents):
    """Batching, pausing and isolation of rows; what a row does in its turn is `advance`."""

    def load(self, ctx: StageContext) -> None:
        self.name = ctx.stage
        self.options = ctx.options(ProbeOptions)
        self.max_batch = ctx.config.max_batch
        self.rows: dict[int, Row] = {}
        self.last_batch = 0
        ctx.progress(1.0, "nothing to load")

    def open(self, request: StageRequest) -> None:
        self.rows[request.id] = Row(request)

    def feed(self, request_id: int, chunk: Chunk) -> None:
        self.rows[request_id].chunks.append(chunk)

    def cancel(self, request_id: int) -> None:
        self.rows.pop(request_id, None)

    def pause(self, request_id: int) -> None:
        if request_id in self.rows:
            self.rows[request_id].paused = True

    def resume(self, request_id: int) -> None:
        if request_id in self.rows:
            self.rows[request_id].paused = False

    def has_work(self) -> bool:
        return any(row.ready for row in self.rows.values())

    def step(self) -> Iterable[Emission]:
        batch = [row for row in self.rows.values() if row.ready][: self.max_batch]
        self.last_batch = len(batch)
        if batch and self.options.step_ms:
            time.sleep(self.options.step_ms / 1000)
        emissions: list[Emission] = []
        for row in batch:
            request_id = row.request.id
            try:
                turn = list(self.advance(row))
            except (StagePanic, MemoryError, torch.AcceleratorError):
                raise
            except Exception:
                _log.exception("%s: request %d failed", self.name, request_id)
                error = StageFailed(f"stage {self.name} failed")
                turn = [StageError(request_id, error.info())]
            emissions += turn
            del self.rows[request_id]
            if not isinstance(turn[-1] if turn else None, Finished | StageError):
                self.rows[request_id] = row  # behind the others: every row gets its turn
        return emissions

    def stats(self) -> StageStats:
        running = sum(row.ready for row in self.rows.values())
        return StageStats(waiting=len(self.rows) - running, running=running, batch=self.last_batch, slots_used=len(self.rows))

    def advance(self, row: Row) -> Iterator[Emission]:
        """One word of one row."""
        raise NotImplementedError

    def hangs(self, row: Row, word: str) -> bool:
        """Let a fault word act; True: the row stops here for good."""
        row.hung = self.options.faults and act(word, self.name) is Verdict.HANG
        return row.hung


class Source(ProbeStage):
    """The words of each input's last user message, or of the text that it is to say, one a step."""

    def feed(self, request_id: int, chunk: Chunk) -> None:
        _text(chunk)  # refuses here, where a refusal fails this request only
        super().feed(request_id, chunk)

    def advance(self, row: Row) -> Iterator[Emission]:
        request = row.request
        if not row.words:
            chunk = row.chunks.popleft()
            row.closed = chunk.last
            for word in _text(chunk).split():
                row.prompt_words += 1
                count = repeats(word) if self.options.faults else None
                row.words.extend((word,) if count is None else map(str, range(count)))
            yield Consumed(request.id, chunk.edge)
            if not row.words and not row.closed:
                return
        word = row.words.popleft() if row.words else ""
        if self.hangs(row, word):
            return
        row.emitted += bool(word)
        cut = request.sampling.max_tokens is not None and row.emitted >= request.sampling.max_tokens
        last = cut or (row.closed and not row.words)
        ended_early = cut and not (row.closed and not row.words)
        if f"{self.name}->{CLIENT}" in request.outputs:
            reason: Literal["stop", "length"] | None = None if not last else "length" if ended_early else "stop"
            usage = {"prompt_tokens": row.prompt_words, "completion_tokens": row.emitted} if last or row.emitted == 1 else {}
            text = TextDelta(f"{word} " if word else "", finish_reason=reason, usage=usage)
            yield Output(request.id, f"{self.name}->{CLIENT}", text, last=last)
        if f"{self.name}->relay" in request.outputs:
            size = self.options.tensor_bytes // 4
            tensors = {"data": torch.full((size,), float(row.emitted))} if size and word else {}
            yield Output(request.id, f"{self.name}->relay", ProbeWord(word), tensors, last)
        if last:
            yield Finished(request.id, {"prompt_tokens": row.prompt_words, "completion_tokens": row.emitted})


class Relay(ProbeStage):
    """Hands each word and its tensor on."""

    def advance(self, row: Row) -> Iterator[Emission]:
        chunk, word = _next_word(row)
        if self.hangs(row, word):
            return
        row.emitted += bool(word)
        yield Output(row.request.id, f"{self.name}->sink", chunk.payload, chunk.tensors, chunk.last)
        yield Consumed(row.request.id, chunk.edge)
        if chunk.last:
            yield Finished(row.request.id, {"words": row.emitted})


class Sink(ProbeStage):
    """One packet of sound a word; every sample has the word's number, counted from 1, as its value."""

    def advance(self, row: Row) -> Iterator[Emission]:
        chunk, word = _next_word(row)
        if self.hangs(row, word):
            return
        row.emitted += bool(word)
        pcm = torch.full((SAMPLES_PER_WORD,), row.emitted % 2**15, dtype=torch.int16)
        tensors = {"pcm": pcm} if word else {}
        audio = AudioDelta(SAMPLE_RATE, frames=int(bool(word)))
        yield Output(row.request.id, f"{self.name}->{CLIENT}", audio, tensors, chunk.last)
        yield Consumed(row.request.id, chunk.edge)
        if chunk.last:
            yield Finished(row.request.id, {"frames": row.emitted})


def _next_word(row: Row) -> tuple[Chunk, str]:
    chunk = row.chunks.popleft()
    assert isinstance(chunk.payload, ProbeWord)
    return chunk, chunk.payload.word


def _text(chunk: Chunk) -> str:
    """Raises ModelRefused where no user has spoken."""
    assert isinstance(chunk.payload, ChatInput)
    if chunk.payload.say is not None:
        return chunk.payload.say
    for message in reversed(chunk.payload.messages):
        if message.role == "user":
            return " ".join(part.text for part in message.parts if isinstance(part, TextPart))
    raise ModelRefused("the conversation has no message of a user", param="messages")
