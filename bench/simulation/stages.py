"""Simulated replicas of processor, Thinker and Talker: they wait, make up a batch, and hand on what it made when its time is over.

Batches are made up by the rules of the real stages (oldest first, `max_batch` rows, prompts in pieces of a step's budget); what a step
would compute is only counted.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from bench.simulation.answers import Answer
from bench.simulation.replica import Replica, Rows, begin
from omni_bus.events import CLIENT

# Events that the broker takes in. A stage says of each chunk, or of those of one step together, that it is used up; a client of every
# so many: a quarter of the edge's credits (omni_bus/client.py).
ONCE_EVENTS = 6  # of a request in the processor: its chunks to two stages, each consumed, its own input's, Done
TOKEN_EVENTS = 3 + 1 / 16  # chunks to the Talker and the client, consumed by each
FRAME_EVENTS = 1  # the chunk; Code2Wav says with its own chunk what it has used up


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
