"""Who may be started: the rule of admission, on replicas that exist as figures only. No worker, no socket, no clock."""

from __future__ import annotations

import dataclasses

import pytest

from omni_bus.admission import DRAIN_S, STARTING, Admission
from omni_bus.events import RequestOptions, StageLoad
from omni_bus.registry import Replica, Worker

SPEECH = RequestOptions(modalities=("text", "audio"))
TEXT = RequestOptions(modalities=("text",))
PREPARE = RequestOptions(modalities=("text", "audio"), prepare=True)
LIMIT = 0.9


def one(stage: str, *, capacity: int = 4, worker: Worker | None = None) -> Replica:
    worker = worker or Worker(f"{stage}.0")
    replica = worker.replicas[stage] = Replica(stage, worker, "cpu", capacity)
    return replica


@dataclasses.dataclass
class Stage:
    """A replica whose step takes `base` + `row` seconds a row and makes `frame` seconds of audio in each of them."""

    replica: Replica
    base: float = 0.0
    row: float = 0.0
    frame: float = 0.08
    speaks: bool = True
    busy_s: float = 0.0
    audio_s: float = 0.0
    lead_s: float | None = None

    def work(self, streams: int, frames: int) -> float:
        """Seconds that so many steps with a row for each stream take."""
        took = frames * (self.base + self.row * streams)
        self.busy_s += took
        self.audio_s += self.speaks * frames * streams * self.frame
        return took

    def load(self) -> StageLoad:
        return StageLoad(stage=self.replica.stage, busy_s=self.busy_s, audio_s=self.audio_s, lead_s=self.lead_s)


class House:
    """An admission with one stage or more that work on the same requests, one after the other in time as on one loop."""

    def __init__(self, *stages: Stage, limit: float = LIMIT) -> None:
        self.now = 100.0
        self.admission = Admission(limit, self.now)
        self.stages = stages
        self.open: list[int] = []
        self.requests = 0
        self.push()

    def push(self) -> None:
        for stage in self.stages:
            self.admission.observe(stage.replica, stage.load(), self.now)

    def start(self, count: int = 1, options: RequestOptions = SPEECH, *, spoke: bool = True) -> None:
        for _ in range(count):
            self.requests += 1
            self.admission.started(self.requests, [stage.replica for stage in self.stages], options, self.now)
            if spoke:
                self.admission.spoke(self.requests)
            self.open.append(self.requests)

    def end(self, count: int = 1) -> None:
        for _ in range(count):
            self.admission.ended(self.open.pop(0), self.now)

    def run(self, frames: int, pushes: int = 1) -> None:
        """So many frames for each open stream, as fast as the slowest stage goes, and the pushes of that time."""
        for _ in range(pushes):
            self.now += max(stage.work(len(self.open), frames) for stage in self.stages)
            self.push()

    def room(self, options: RequestOptions = SPEECH) -> bool:
        return all(self.admission.has_room(stage.replica, options) for stage in self.stages)


def carried(house: House, most: int = 100) -> int:
    """How many streams are let in, one after the other, when each is seen at work before the next one comes."""
    while house.room() and len(house.open) < most:
        house.start()
        house.run(100, pushes=3)
    return len(house.open)


def test_before_anything_was_measured_a_replica_takes_its_capacity() -> None:
    house = House(Stage(one("sink", capacity=4)))
    house.start(3, spoke=False)
    assert house.room()
    house.start(spoke=False)
    assert not house.room()
    assert house.room(TEXT), "what nobody listens to is not held back by what was not measured"


@pytest.mark.parametrize(
    ("base", "row", "most"),
    [
        (0.0, 0.008, 9),  # rtf = n · 0.1
        (0.02, 0.005, 10),  # (20 ms + 5 ms · n) / 80 ms
        (0.04, 0.001, 32),
    ],
)
def test_as_many_are_let_in_as_can_be_carried_in_real_time(base: float, row: float, most: int) -> None:
    house = House(Stage(one("sink", capacity=64), base, row))
    assert most - 2 <= carried(house) <= most + 1, "one more than can be, once, is how it was learned"
    house.end(len(house.open) - most + 3)
    house.run(100, pushes=9)
    while house.room():
        house.start()
        house.run(100, pushes=3)
    assert most - 2 <= len(house.open) <= most


def test_what_may_be_a_step_s_own_cost_is_tried_once_and_only_with_audio_in_front_of_every_listener() -> None:
    sink = Stage(one("sink", capacity=64), row=0.05, lead_s=0.1)
    house = House(sink)
    house.start()
    house.run(50, pushes=2)
    assert not house.room(), "0.63 alone may be 1.25 with another"
    sink.lead_s = 1.0
    house.push()
    assert house.room()
    house.start(spoke=False)
    assert not house.room(), "one at a time"
    house.admission.spoke(house.open[-1])
    house.run(50, pushes=2)
    house.end()
    house.run(50, pushes=9)
    assert not house.room(), "it was 1.25"


def test_one_stream_is_served_however_slow_the_machine_is() -> None:
    house = House(Stage(one("sink"), row=0.4, lead_s=-3.0))
    assert house.room()
    house.start()
    house.run(100)
    assert not house.room()
    house.end()
    assert house.room()


def test_a_stage_that_makes_no_audio_is_measured_by_what_is_made_for_its_requests() -> None:
    thinker = Stage(one("thinker", capacity=64), row=0.02, speaks=False)
    house = House(thinker, Stage(one("sink", capacity=64), row=0.001))
    assert 3 <= carried(house) <= 4  # rtf = n · 20 ms / 80 ms
    assert not house.admission.has_room(thinker.replica, SPEECH)
    assert house.admission.has_room(house.stages[1].replica, SPEECH)


def test_stages_of_one_process_share_its_loop() -> None:
    worker = Worker("both.0")
    first = Stage(one("relay", capacity=64, worker=worker), row=0.004, speaks=False)
    second = Stage(one("sink", capacity=64, worker=worker), row=0.004)
    assert 8 <= carried(House(first, second)) <= 10  # rtf = n · (4 + 4) ms / 80 ms


def test_nobody_is_let_in_while_a_listener_waits() -> None:
    sink = Stage(one("sink", capacity=64), row=0.001)
    house = House(sink)
    house.start()
    house.run(100)
    sink.lead_s = 0.0
    house.push()
    assert not house.room()
    assert house.room(TEXT)
    sink.lead_s = 0.5
    house.push()
    assert house.room()


def test_a_line_that_was_fitted_far_away_is_not_believed_at_once() -> None:
    house = House(Stage(one("sink", capacity=4), base=0.0001, row=0.0001))
    house.start(4)
    house.run(100, pushes=4)
    while house.room():
        house.start()
    assert len(house.open) == 8, "twice as many as were ever measured"
    house.run(100, pushes=4)
    while house.room():
        house.start()
    assert len(house.open) > 12


def test_rows_beyond_a_full_batch_take_turns() -> None:
    house = House(Stage(one("sink", capacity=2), base=0.05, row=0.001))
    house.start()
    house.run(100, pushes=4)
    house.start()
    house.run(100, pushes=4)
    assert house.admission.predicted_rtf(house.stages[0].replica) == pytest.approx(1.5 * 0.65, rel=0.05)


def test_beyond_what_was_measured_they_come_a_few_at_a_time() -> None:
    house = House(Stage(one("sink", capacity=64), row=0.0001))
    house.start()
    house.run(100)
    while house.room():
        house.start(spoke=False)
    assert len(house.open) == 1 + STARTING
    house.admission.spoke(house.open[1])
    assert house.room()


def test_a_request_s_prompt_is_not_taken_for_what_its_audio_costs() -> None:
    ear = Stage(one("ear", capacity=64), speaks=False)
    house = House(ear, Stage(one("sink", capacity=64), row=0.001))
    house.start()
    ear.busy_s += 0.5  # what was said is heard, once
    house.now += 0.5
    house.push()
    house.run(5)
    assert house.admission.predicted_rtf(ear.replica) is None, "0.4 s of audio tell nothing of what half a second was spent for"
    house.run(60, pushes=2)
    predicted = house.admission.predicted_rtf(ear.replica)
    assert predicted is not None
    assert predicted == pytest.approx(2 * 0.5 / 5.2, rel=0.15)


def test_work_done_while_nobody_listened_counts_against_nobody() -> None:
    sink = Stage(one("sink", capacity=64), row=0.008)
    house = House(sink)
    sink.busy_s += 50.0
    house.now += 60.0
    house.start()
    house.run(100)
    assert house.admission.predicted_rtf(sink.replica) == pytest.approx(0.2)


def test_text_waits_only_for_a_replica_that_is_late_and_never_alone() -> None:
    thinker = Stage(one("thinker", capacity=64), row=0.1, speaks=False)
    house = House(thinker, Stage(one("sink", capacity=64), row=0.001))
    house.start()
    house.run(100, pushes=2)
    assert not house.room(SPEECH)
    assert house.room(TEXT), "the first one goes on"
    house.start(options=TEXT)
    assert not house.room(TEXT)
    assert not house.room(PREPARE), "nobody hears what is only prepared"
    house.end()
    assert house.room(TEXT), "nobody is spoken to"


def test_a_replica_that_was_lost_is_unknown_again() -> None:
    sink = Stage(one("sink", capacity=4), row=0.4)
    house = House(sink)
    house.start()
    house.run(100)
    assert not house.room()
    house.admission.forget(sink.replica)
    assert house.room()
    house.end()
    assert house.admission.streams(sink.replica) == 0


def test_nothing_is_foretold_where_the_limit_is_zero() -> None:
    house = House(Stage(one("sink", capacity=1), row=9.0, lead_s=-1.0), limit=0.0)
    house.start(50)
    house.run(3)
    assert house.room()


def test_when_to_come_back_is_told_by_how_fast_requests_end() -> None:
    house = House(Stage(one("sink", capacity=64)))
    assert house.admission.retry_after_s(0, house.now) == 1.0
    house.start(40)
    house.now += 10.0
    house.end(20)
    assert house.admission.retry_after_s(10, house.now) == pytest.approx(5.0), "two a second"
    assert house.admission.retry_after_s(1, house.now) == 1.0
    assert house.admission.retry_after_s(1000, house.now) == 60.0
    house.now += 5.0
    assert house.admission.retry_after_s(10, house.now) == pytest.approx(7.5), "20 in 15 s"
    house.now += DRAIN_S
    assert house.admission.retry_after_s(1, house.now) == pytest.approx(DRAIN_S), "none in half a minute"


def test_a_request_that_is_run_again_makes_the_queue_no_shorter() -> None:
    house = House(Stage(one("sink")))
    house.start(2)
    house.now += 10.0
    house.admission.ended(house.open[0], house.now, drained=False)
    assert house.admission.streams(house.stages[0].replica) == 1
    assert house.admission.retry_after_s(1, house.now) == pytest.approx(10.0)
