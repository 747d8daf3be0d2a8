"""Replicas of the four kinds of stages: they wait, make up a batch, and hand on what it made when its time is over.

Batches are made up by the rules of the real stages (oldest first, `max_batch` rows, prompts in pieces of a step's budget; Code2Wav's by
the smallest lead, its chunk sizes by the real ChunkRule); what a step would compute is only counted.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Sequence
from typing import Any

from bench.simulation.answers import Answer, FrameCount
from bench.simulation.ports import Bus
from bench.simulation.step_times import Curve, Profile
from bench.simulation.timeline import Timeline
from omni_bus import events
from omni_bus.events import CLIENT, StageLoad
from omni_bus.stages.qwen3_omni.code2wav_shapes import Shapes
from omni_bus.stages.qwen3_omni.code2wav_streams import ChunkRule
from omni_bus.stages.qwen3_omni.spec import SAMPLE_RATE
from omni_bus.workers.playback import Playback

# Events that the broker takes in. A stage says of each chunk, or of those of one step together, that it is used up; a client of every
# so many: a quarter of the edge's credits (omni_bus/client.py).
ONCE_EVENTS = 6  # of a request in the processor: its chunks to two stages, each consumed, its own input's, Done
TOKEN_EVENTS = 3 + 1 / 16  # chunks to the Talker and the client, consumed by each
FRAME_EVENTS = 1  # the chunk; Code2Wav says with its own chunk what it has used up
CHUNK_EVENTS = 2 + 1 / 4  # chunk, the frames in it, consumed by the client
TICK_S = 1e-6  # at least from one look at a stream to the next: rounding may put the moment when it is due before the one it was asked in


class Replica:
    """What all kinds share: one step after the other, and its figures."""

    def __init__(self, name: str, worker: str, curve: Curve, profile: Profile, bus: Bus, clock: Timeline) -> None:
        self.name, self.worker = name, worker
        self.profile, self.bus, self.clock = profile, bus, clock
        self.curve = curve
        self.max_batch = profile.batches.get(name, profile.max_batch)
        self.playback = Playback()
        self.busy = False
        self.steps, self.busy_s, self.batch = 0, 0.0, 0
        self.changed: Callable[[], None] = lambda: None  # something happened: the worker may have news for the broker

    def open(self, answer: Answer, options: events.RequestOptions) -> None:
        self.playback.open(answer.index, options)

    def take(self, answer: Answer) -> None:
        """There is something new for that answer; `look` follows."""
        raise NotImplementedError

    def drop(self, answer: Answer) -> None:
        """It has ended here."""
        raise NotImplementedError

    def look(self) -> None:
        """Begin a step if there is work and none is under way."""
        if self.busy:
            return
        batch, seconds = self._begin()
        if batch:
            self.busy = True
            self.batch = len(batch)
            self.clock.at(self.clock.now + seconds, self._end, batch, seconds)
        self.changed()

    def _end(self, batch: Sequence[Answer], seconds: float) -> None:
        self.busy = False
        self.steps += 1
        self.busy_s += seconds
        self._finish([answer for answer in batch if not answer.gone])
        self.look()

    def edge(self, target: str) -> str:
        return f"{self.name}->{target}"

    def chunk(self, answer: Answer, target: str, seq: int, last: bool) -> events.Chunk:
        return events.Chunk(answer.request, self.edge(target), seq, last)

    def done(self, answer: Answer) -> events.Done:
        return events.Done(answer.request, self.name)

    def load(self) -> StageLoad:
        return StageLoad(
            stage=self.name,
            batch=self.batch,
            steps=self.steps,
            busy_s=self.busy_s,
            streams=len(self.playback),
            lead_s=self.playback.smallest_lead(self.clock.now),
            audio_s=self.playback.audio_s,
            **self._own_load(),
        )

    def _own_load(self) -> dict[str, Any]:
        """What this kind of stage says of itself."""
        raise NotImplementedError

    def _begin(self) -> tuple[Sequence[Answer], float]:
        """The next step's rows and seconds; no rows where nothing can run."""
        raise NotImplementedError

    def _finish(self, batch: Sequence[Answer]) -> None:
        raise NotImplementedError


class Rows(Replica):
    """Rows that wait until one of `max_batch` is free, or, where the profile says that rows take turns, all run and each step has some."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.waiting: dict[int, Answer] = {}
        self.running: dict[int, Answer] = {}

    def take(self, answer: Answer) -> None:
        self.waiting[answer.index] = answer

    def drop(self, answer: Answer) -> None:
        self.playback.close(answer.index)
        self.waiting.pop(answer.index, None)
        self.running.pop(answer.index, None)

    def _let_in(self) -> None:
        while self.waiting and (self.profile.turns or len(self.running) < self.max_batch):
            index = next(iter(self.waiting))
            self.running[index] = self.waiting.pop(index)

    def _turns(self, ready: list[Answer]) -> list[Answer]:
        if not self.profile.turns:
            return ready
        for answer in ready[: self.max_batch]:
            self.running[answer.index] = self.running.pop(answer.index)
        return ready[: self.max_batch]


class Once(Replica):
    """The processor: one request a step."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.rows: collections.deque[Answer] = collections.deque()

    def take(self, answer: Answer) -> None:
        self.rows.append(answer)

    def drop(self, answer: Answer) -> None:
        self.playback.close(answer.index)
        if answer in self.rows:
            self.rows.remove(answer)

    def _own_load(self) -> dict[str, Any]:
        return {"waiting": len(self.rows), "running": int(self.busy)}

    def _begin(self) -> tuple[Sequence[Answer], float]:
        return ([self.rows.popleft()], self.curve(1)) if self.rows else ([], 0.0)

    def _finish(self, batch: Sequence[Answer]) -> None:
        for answer in batch:
            self.playback.close(answer.index)
            self.bus.hand_over(ONCE_EVENTS, self._prepared, answer)

    def _prepared(self, answer: Answer) -> None:
        if answer.gone:
            return
        targets = (self.profile.tokens, self.profile.frames)
        self.bus.send(self.worker, [*(self.chunk(answer, target, 0, True) for target in targets), self.done(answer)])
        begin(answer, self.profile.tokens)


class Tokens(Rows):
    """The Thinker: a prompt, then a token a step. It keeps the prompts of sessions, as the prefix cache does."""

    def __init__(self, *arguments: object, kept_positions: int = 0) -> None:
        super().__init__(*arguments)
        self.kept: collections.OrderedDict[str, int] = collections.OrderedDict()  # session → positions
        self.kept_positions, self.kept_now = kept_positions, 0
        self.computed, self.cached = 0, 0

    def take(self, answer: Answer) -> None:
        kept = min(self.kept.get(answer.session, 0), answer.prompt - 1) if answer.session else 0
        answer.to_compute = answer.prompt - kept
        self.cached += kept
        self.computed += answer.to_compute
        self.waiting[answer.index] = answer

    def _own_load(self) -> dict[str, Any]:
        rows = (answer for table in (self.waiting, self.running) for answer in table.values())
        return {
            "waiting": len(self.waiting),
            "running": len(self.running),
            "queued": sum(answer.to_compute for answer in rows),
            "per_step": self.profile.prompt_budget,
            "prompt_computed": self.computed,
            "prompt_cached": self.cached,
        }

    def _begin(self) -> tuple[Sequence[Answer], float]:
        self._let_in()
        batch, budget = [], self.profile.prompt_budget
        for answer in self.running.values():
            if not answer.to_compute:
                batch.append(answer)
            elif budget >= min(answer.to_compute, self.profile.prompt_budget):
                budget -= min(answer.to_compute, budget)
                batch.append(answer)
        batch = self._turns(batch)
        with_prompt = budget < self.profile.prompt_budget
        return batch, max(self.curve(len(batch)), self.profile.prompt_ms / 1e3 * with_prompt)

    def _finish(self, batch: Sequence[Answer]) -> None:
        spoke = []
        for answer in batch:
            answer.to_compute -= min(answer.to_compute, self.profile.prompt_budget)
            if answer.to_compute:
                continue
            answer.made += 1
            spoke.append((answer, answer.made))
            if answer.made == answer.tokens:
                self.drop(answer)
                self._keep(answer)
        if spoke:
            self.bus.hand_over(TOKEN_EVENTS * len(spoke), self._told, spoke)

    def _told(self, spoke: Sequence[tuple[Answer, int]]) -> None:
        touched = set()
        for answer, made in spoke:
            if answer.gone:
                continue
            last = made == answer.tokens
            if made == 1 or last:
                seq = 0 if made == 1 else 1
                chunks = [self.chunk(answer, target, seq, last) for target in (self.profile.frames, CLIENT)]
                self.bus.send(self.worker, [*chunks, *([self.done(answer)] if last else [])])
            answer.known, answer.all_known = made, last
            if made == 1:
                answer.bound[self.profile.frames].take(answer)
            touched.add(answer.bound[self.profile.frames])
        for stage in sorted(touched, key=lambda stage: stage.worker):
            stage.look()

    def _keep(self, answer: Answer) -> None:
        if not answer.session or not self.kept_positions:
            return
        self.kept_now += answer.prompt + answer.tokens - self.kept.pop(answer.session, 0)
        self.kept[answer.session] = answer.prompt + answer.tokens
        while self.kept_now > self.kept_positions:
            self.kept_now -= self.kept.popitem(last=False)[1]


class Frames(Rows):
    """The Talker: a frame a step, no further than the tokens that it knows."""

    def _own_load(self) -> dict[str, Any]:
        return {"waiting": len(self.waiting), "running": len(self.running)}

    def _begin(self) -> tuple[Sequence[Answer], float]:
        self._let_in()
        ahead = self.profile.ahead
        batch = [answer for answer in self.running.values() if answer.all_known or answer.known >= answer.spoken + ahead]
        batch = self._turns(batch)
        return batch, self.curve(len(batch))

    def _finish(self, batch: Sequence[Answer]) -> None:
        spoke = []
        for answer in batch:
            answer.spoken += 1
            spoke.append((answer, answer.spoken))
            if answer.spoken == answer.frames:
                self.drop(answer)
        if spoke:
            self.bus.hand_over(FRAME_EVENTS * len(spoke), self._told, spoke)

    def _told(self, spoke: Sequence[tuple[Answer, int]]) -> None:
        touched = set()
        for answer, made in spoke:
            if answer.gone:
                continue
            last = made == answer.frames
            if made == 1 or last:
                chunk = self.chunk(answer, self.profile.chunks, 0 if made == 1 else 1, last)
                self.bus.send(self.worker, [chunk, *([self.done(answer)] if last else [])])
            stage = answer.bound[self.profile.chunks]
            assert answer.stream is not None
            answer.stream.arrived(1)
            answer.stream.closed = last
            stage.take(answer)
            touched.add(stage)
        for stage in sorted(touched, key=lambda stage: stage.worker):
            stage.look()


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


def begin(answer: Answer, stage: str) -> None:
    """The answer's input has come to that stage."""
    replica = answer.bound[stage]
    replica.take(answer)
    replica.look()
