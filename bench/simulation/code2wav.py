"""A simulated replica of Code2Wav: chunk sizes by the real ChunkRule, batches of the real shapes, the stream with the smallest lead first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from bench.simulation.answers import Answer, FrameCount
from bench.simulation.replica import Replica
from omni_bus import events
from omni_bus.events import CLIENT
from omni_bus.stages.qwen3_omni.code2wav_shapes import Shapes
from omni_bus.stages.qwen3_omni.code2wav_streams import ChunkRule
from omni_bus.stages.qwen3_omni.spec import SAMPLE_RATE

# Events that the broker takes in (stages.py): the chunk, its frames used up, and for one in four the client's word.
CHUNK_EVENTS = 2 + 1 / 4
TICK_S = 1e-6  # at least from one look at a stream to the next: rounding may put the moment when it is due before the one it was asked in


class Chunks(Replica):
    """Code2Wav: chunks of frames to audio, the stream with the smallest lead first."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        sizes = self.profile.chunk_frames
        self.rule = ChunkRule(sizes[0], sizes, 32, self.profile.frame_s)
        self.shapes = Shapes.captured(max_batch=self.max_batch, first_frames=sizes[0], max_frames=sizes[-1])
        self.streams: dict[int, Answer] = {}
        self.ready: dict[int, Answer] = {}  # those with a chunk to decode
        self.slots = 0  # held by streams from their first chunk on
        self._dues: list[tuple[float, int]] = []  # when those that wait for more frames go on without them
        self._wake: float | None = None
        self._count = 0  # frames a row of the step under way

    def open(self, answer: Answer, options: events.RequestOptions) -> None:
        super().open(answer, options)
        answer.stream = FrameCount(self.clock.now, emits=True)
        self.streams[answer.index] = answer

    def take(self, answer: Answer) -> None:
        """More frames have come. Whether they go on now or wait for more is asked once, and again when they are due."""
        stream = answer.stream
        assert stream is not None
        if answer.index in self.ready or not stream.buffered:
            return
        if self.rule.next(stream, self.clock.now):
            self.ready[answer.index] = answer
        elif (due := self.rule.due(stream)) is not None:
            heapq.heappush(self._dues, (max(due, self.clock.now + TICK_S), answer.index))  # later, or it would be due for ever

    def drop(self, answer: Answer) -> None:
        self.playback.close(answer.index)
        if self.streams.pop(answer.index, None) is not None:
            self.slots -= answer.has_slot
        self.ready.pop(answer.index, None)

    def _own_load(self) -> dict[str, Any]:
        return {
            "waiting": len(self.streams) - self.slots,
            "running": self.slots,
            "queued": sum(answer.stream.buffered for answer in self.streams.values() if answer.stream is not None),
            "per_step": self.max_batch * self.rule.sizes[-1],
            "slots_used": self.slots,
            "slots_total": self.max_batch,
        }

    def _begin(self) -> tuple[Sequence[Answer], float]:
        now = self.clock.now
        while self._dues and self._dues[0][0] <= now:
            answer = self.streams.get(heapq.heappop(self._dues)[1])
            if answer is not None:
                self.take(answer)
        ready = []
        for index, answer in list(self.ready.items()):
            stream = answer.stream
            assert stream is not None
            if frames := self.rule.next(stream, now):
                ready.append((stream.lead(now), index, frames))
            else:  # its lead has grown meanwhile
                del self.ready[index]
                self.take(answer)
        if ready:
            return self._batch(sorted(ready))
        if self._dues and (self._wake is None or self._wake <= now or self._dues[0][0] < self._wake):
            self._wake = self._dues[0][0]
            self.clock.at(self._wake, self.look)
        return [], 0.0

    def _batch(self, ready: Sequence[tuple[float, int, int]]) -> tuple[Sequence[Answer], float]:
        free = len(self.streams) if self.profile.turns else self.max_batch - self.slots
        batch: list[Answer] = []
        fresh, count, most = False, 0, 1
        for _, index, frames in ready:
            answer = self.streams[index]
            assert answer.stream is not None
            new = not answer.stream.frames
            if (new and free <= 0) or len(batch) == most:
                continue
            if not batch:
                fresh, count, most = new, frames, self.shapes.max_rows(frames)
            elif fresh != new or not count <= frames <= 2 * count:
                continue
            batch.append(answer)
            free -= new
        self.slots += fresh * len(batch)
        for answer in batch:
            assert answer.stream is not None
            answer.stream.taken(count)
            answer.has_slot = True
            del self.ready[answer.index]
        self._count = count
        return batch, self.curve(len(batch)) if batch else 0.0

    def _finish(self, batch: Sequence[Answer]) -> None:
        made, count = [], self._count
        for answer in batch:
            stream = answer.stream
            assert stream is not None
            seconds = count * self.profile.frame_s
            first = not stream.frames
            stream.emitted(count, round(seconds * SAMPLE_RATE), self.clock.now)
            self.playback.sent(answer.index, seconds, self.clock.now)
            last = stream.closed and not stream.buffered
            if last:
                self.drop(answer)
            else:
                self.take(answer)
            made.append((answer, seconds, first, last))
        if made:
            self.bus.hand_over(CHUNK_EVENTS * len(made), self._told, made)

    def _told(self, made: Sequence[tuple[Answer, float, bool, bool]]) -> None:
        for answer, seconds, first, last in made:
            if answer.gone:
                continue
            answer.packets.append((self.clock.now + self.profile.way_out_ms / 1e3 - answer.asked, seconds))
            if first or last:
                chunk = self.chunk(answer, CLIENT, 0 if first else 1, last)
                self.bus.send(self.worker, [chunk, *([self.done(answer)] if last else [])])
