"""What the simulated replicas of all stages share: one step after the other, rows that wait for a place, and what is pushed of their load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.simulation.answers import Answer
from bench.simulation.ports import Bus
from bench.simulation.step_times import Curve, Profile
from bench.simulation.timeline import Cores, Timeline
from omni_bus import events
from omni_bus.events import StageLoad
from omni_bus.workers.playback import Playback


class Replica:
    """What all kinds share: one step after the other, and its figures."""

    def __init__(self, name: str, worker: str, curve: Curve, profile: Profile, bus: Bus, clock: Timeline) -> None:
        self.name, self.worker = name, worker
        self.profile, self.bus, self.clock = profile, bus, clock
        self.cores = Cores(clock)
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
            self.cores.run(seconds, self._end, batch, seconds)
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


def begin(answer: Answer, stage: str) -> None:
    """The answer's input has come to that stage."""
    replica = answer.bound[stage]
    replica.take(answer)
    replica.look()
