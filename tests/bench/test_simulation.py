"""The simulation: the same for the same seed, nothing lost in it, and decided by the broker's own code."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

import msgspec
import pytest

from bench.simulation import beside, broker_cost, report, step_times
from bench.simulation.answers import Answer
from bench.simulation.broker_cost import BrokerCost
from bench.simulation.code2wav import Chunks
from bench.simulation.experiments import FREE, bus
from bench.simulation.listeners import Load
from bench.simulation.pods import pods
from bench.simulation.run import Scenario, simulate
from bench.simulation.step_times import Curve, StepTimes
from bench.simulation.timeline import Cores, Timeline
from omni_bus import routing
from omni_bus.events import RequestOptions
from omni_bus.lifecycle import Lifecycle

NO_ADMISSION = bus(0.0)


@pytest.fixture(scope="module")
def times() -> StepTimes:
    """The measured step times, with answers of a quarter of the length, so that a few seconds hold many."""
    measured = step_times.read(step_times.profiles()["h200"])
    return dataclasses.replace(
        measured, profile=msgspec.structs.replace(measured.profile, text_tokens=16, speech_frames=32, max_batch=8)
    )


def scenario(**changes: object) -> Scenario:
    said = {"load": Load(streams=48, pause_s=0.5), "replicas": 2, "bus": NO_ADMISSION, "seconds": 8.0, "warm_s": 2.0}
    return Scenario(**{**said, **changes})  # type: ignore[arg-type]


def story(answers: object) -> list[tuple[object, ...]]:
    assert isinstance(answers, list)
    return [(one.index, one.asked, one.outcome, one.ended, tuple(one.packets)) for one in answers]


def test_the_same_seed_tells_the_same_story_and_another_seed_another_one(times: StepTimes) -> None:
    runs = [simulate(scenario(seed=seed), times, FREE) for seed in (1, 1, 2)]
    assert runs[0][0] == runs[1][0]
    assert story(runs[0][1]) == story(runs[1][1])
    assert story(runs[0][1]) != story(runs[2][1])


def test_every_request_ends_once_with_all_of_its_audio_and_leaves_nothing_behind(times: StepTimes) -> None:
    load = Load(rate=40.0, count=120)
    _, answers, server = simulate(scenario(load=load, seconds=60.0), times, FREE)
    assert len(answers) == 120
    assert {answer.ends for answer in answers} == {1}
    assert {answer.outcome for answer in answers} == {"done"}
    assert all(answer.audio_s == pytest.approx(answer.frames * times.profile.frame_s) for answer in answers)
    assert all(arrival > 0 and length > 0 for answer in answers for arrival, length in answer.packets)
    assert len(server.orchestrator.lifecycle.table) == 0
    assert all(replica.outstanding == 0 for worker in server.orchestrator.registry for replica in worker.replicas.values())
    assert all(worker.replica.load().streams == 0 for worker in server.workers.values())


def test_a_refused_request_ends_once_too_and_its_listener_comes_back(times: StepTimes) -> None:
    crowded = bus(0.0, max_waiting=0)
    crowded = msgspec.structs.replace(crowded, max_requests=1)
    figures, answers, _ = simulate(scenario(bus=crowded, seconds=20.0, load=Load(streams=12, pause_s=0.5)), times, FREE)
    assert figures.refused > 0 and figures.requests_per_s > 0
    over = [answer for answer in answers if answer.outcome]
    assert {answer.ends for answer in over} == {1}
    assert {answer.outcome for answer in over} == {"done", "overloaded"}


def test_more_replicas_never_lower_the_throughput(times: StepTimes) -> None:
    load = Load(streams=64, hear=False)
    rates = [simulate(scenario(replicas=count, load=load), times, FREE)[0].audio_s_per_s for count in (1, 2, 4)]
    assert rates[1] > 1.5 * rates[0]
    assert rates[2] > 1.5 * rates[1]


def test_the_brokers_own_choice_is_ahead_of_chance_at_the_99th_percentile(times: StepTimes) -> None:
    busy = scenario(load=Load(rate=130.0), replicas=4, seconds=10.0)
    ours, chance = (simulate(dataclasses.replace(busy, policy=name), times, FREE)[0] for name in ("ours", "random"))
    assert ours.ttfp_p99 < 0.8 * chance.ttfp_p99
    assert ours.requests == chance.requests


def test_routing_is_the_brokers_own(times: StepTimes, monkeypatch: pytest.MonkeyPatch) -> None:
    real = routing.choose
    asked = []

    def one_for_all(registry: object, affinity: object, stages: object, key: str, fits: object) -> object:
        asked.append(key)
        return {stage: min(registry.ready_replicas(stage), key=lambda one: one.worker.name) for stage in stages}  # type: ignore[attr-defined]

    before, _, _ = simulate(scenario(), times, FREE)
    monkeypatch.setattr(routing, "choose", one_for_all)
    after, _, server = simulate(scenario(), times, FREE)
    assert asked
    assert after.ttfp_p50 > before.ttfp_p50
    steps = {worker.replica.worker: worker.replica.steps for worker in server.workers.values()}
    assert steps["talker.0"] > 0 and steps["talker.1"] == 0
    assert routing.choose is one_for_all and real is not one_for_all


def test_admission_is_the_brokers_own(times: StepTimes, monkeypatch: pytest.MonkeyPatch) -> None:
    open_door, _, _ = simulate(scenario(bus=bus()), times, FREE)
    monkeypatch.setattr("omni_bus.admission.Admission.has_room", lambda self, replica, options: not self.streams(replica))
    one_by_one, answers, _ = simulate(scenario(bus=bus()), times, FREE)
    assert one_by_one.ttfp_p95 > 3 * open_door.ttfp_p95
    assert max(_at_once(answers, "talker.0"), _at_once(answers, "talker.1")) == 1


def _at_once(answers: object, worker: str) -> int:
    """The most answers that one worker had to speak at the same time."""
    assert isinstance(answers, list)
    spans = [
        (one.asked + one.packets[0][0], one.asked + one.packets[-1][0])
        for one in answers
        if one.packets and one.bound["talker"].worker == worker
    ]
    return max(sum(begin <= other < end for begin, end in spans) for other, _ in spans)


def test_every_event_of_a_requests_life_is_handled_by_the_orchestrator(
    times: StepTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dict.fromkeys(("submit", "chunk", "done"), 0)
    for name in seen:
        real = getattr(Lifecycle, name)

        def counted(self: Lifecycle, *arguments: object, _real: object = real, _name: str = name) -> None:
            seen[_name] += 1
            _real(self, *arguments)  # type: ignore[operator]

        monkeypatch.setattr(Lifecycle, name, counted)
    _, answers, _ = simulate(scenario(load=Load(rate=20.0, count=10), seconds=30.0), times, FREE)
    assert len(answers) == 10
    assert seen == {"submit": 10, "chunk": 10 * 10, "done": 10 * 4}  # two chunks on four edges, one on two


def test_a_broker_at_its_limit_is_what_listeners_wait_for(times: StepTimes) -> None:
    load = Load(rate=20.0)
    free, _, _ = simulate(scenario(load=load), times, FREE)
    slow, _, _ = simulate(scenario(load=load), times, BrokerCost(event_us=600.0, submit_us=0.0, submit_replica_us=0.0))
    assert free.broker_utilisation < 0.01 < 0.9 < slow.broker_utilisation
    assert slow.ttfp_p50 > 2 * free.ttfp_p50


def test_sessions_find_their_prompts_again_where_the_broker_knows_them(times: StepTimes) -> None:
    def cached(affinity: bool) -> float:
        load = Load(streams=12, sessions=True, affinity=affinity, pause_s=0.2)
        return simulate(scenario(load=load, replicas=4, seconds=20.0, kept_positions=100_000), times, FREE)[0].cached

    assert cached(True) > cached(False) + 0.1


def test_gaps_are_heard_where_frames_take_longer_than_they_play(times: StepTimes) -> None:
    slow = dataclasses.replace(times, curves={**times.curves, "talker": Curve((1.0,), (0.12,))})
    figures, _, _ = simulate(scenario(load=Load(streams=2, pause_s=0.1), replicas=1, seconds=20.0), slow, FREE)
    assert figures.underrun_p50 > 500
    assert figures.silent == 1.0


def test_a_curve_goes_through_its_points_never_falls_and_goes_on_as_a_line() -> None:
    curve = Curve.through([(1, 0.01), (4, 0.02), (4, 0.04), (2, 0.005), (0.3, 0.03)])
    assert curve.rows == (1.0, 2.0, 4.0)
    assert [curve(rows) for rows in (1, 2, 3, 4, 6)] == pytest.approx([0.02, 0.02, 0.025, 0.03, 0.04])
    assert Curve.through([(1, 0.04)])(64) == 0.04


def test_the_rows_of_a_measured_step_follow_from_littles_law() -> None:
    profile = step_times.Profile(about="", once="processor", text_tokens=50, speech_frames=99)
    stages = {"processor": 1.0, "thinker": 10.0, "talker": 8.0, "code2wav": 4.0}
    one = {
        "concurrency": 32,
        "requests_per_s": 20.0,
        "stages": {name: {"ms_per_step": ms} for name, ms in stages.items()},
        "worst": {"packets": [[0.1, 0.08]] * 25},
    }
    found = step_times.from_result(profile, {"passes": [one], "rows": []})
    rows = {name: curve.rows[0] for name, curve in found.curves.items()}
    assert rows == pytest.approx({"processor": 1.0, "thinker": 10.0, "talker": 16.0, "code2wav": 2.0})
    assert found.curves["talker"].seconds == (0.008,)


def test_what_happens_at_the_same_time_happens_in_the_order_in_which_it_was_said() -> None:
    clock, seen = Timeline(), []
    for name, when in (("late", 2.0), ("a", 1.0), ("b", 1.0), ("past", -1.0)):
        clock.at(when, seen.append, name)
    clock.run(1.5)
    assert seen == ["past", "a", "b"] and clock.now == 1.5
    clock.run()
    assert seen[-1] == "late" and clock.now == 2.0


def test_a_request_costs_the_broker_more_the_more_replicas_there_are() -> None:
    cost = broker_cost.read()
    assert cost.submit_s(1024) > cost.submit_s(4) > cost.event_s > 0
    assert cost.transit_s(0.0) == 0.0


def test_nobody_asks_after_the_end(times: StepTimes) -> None:
    _, answers, _ = simulate(scenario(seconds=4.0), times, FREE)
    assert answers and all(isinstance(answer, Answer) and answer.asked < 4.0 for answer in answers)


def test_a_million_listeners_need_as_many_pods_as_the_scarcer_of_broker_and_sets_says() -> None:
    found = pods(1_000_000, events_per_audio_s=40.0, event_us=25.0, set_audio_s_per_s=300.0)
    assert (found.by_broker, found.by_set, found.sets) == (700, 210, 3)
    assert (found.a_pod, found.pods, found.all_sets) == (630, 1588, 4764)
    crowded = pods(1000, events_per_audio_s=400.0, event_us=25.0, set_audio_s_per_s=300.0)
    assert (crowded.sets, crowded.a_pod, crowded.pods) == (1, 70, 15)
    with pytest.raises(ValueError, match="no listener at all"):
        pods(1, events_per_audio_s=1e9, event_us=25.0, set_audio_s_per_s=300.0)


def test_replicas_of_the_probe_are_predicted_beside_what_was_measured(tmp_path: pathlib.Path) -> None:
    rows = [{"stage": "relay", "replicas": count, "audio_s_per_s": 7.5 * count} for count in (1, 2)]
    said = {"step_ms": 40, "max_batch": 4, "streams": 24, "words": 24, "requests": 24, "rows": rows}
    path = tmp_path / "scale.json"
    path.write_text(json.dumps({"replicas": {"probe": said}}))
    probe = step_times.read(step_times.profiles()["probe"])
    pairs = beside.scaled(probe, broker_cost.read(), path)
    assert [pair.label for pair in pairs] == ["relay x 1", "relay x 2"]
    # Four rows every 40 ms, 80 ms of sound each: 8 s of audio a second from each replica, at most.
    assert [7.0 < pair.predicted["audio_s_per_s"] / count <= 8.01 for pair, count in zip(pairs, (1, 2), strict=True)] == [
        True,
        True,
    ]
    assert abs(report.error(pairs[0])) < 0.1
    assert len(list(report.pairs(pairs))) == 4


def test_what_was_measured_on_one_card_is_predicted_within_a_fifth() -> None:
    """Throughput only: the tails of first packets come from jitter that is not simulated."""
    measured = step_times.read(step_times.profiles()["h200"])
    for pair in beside.card(measured, broker_cost.read()):
        assert abs(report.error(pair)) < 0.2, pair.label


def test_the_command_writes_what_it_found(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "bench.simulate", "--only", "pods", "--scale", "0.2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=step_times.ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    (written,) = tmp_path.glob("*-simulation.json")
    found = json.loads(written.read_text())
    assert len(found["pods"]) == 3 and "1,000,000 who listen" in found["pods"][0]
    assert done.stdout.strip() == written.with_suffix(".md").read_text().strip()


class _NeverReady:
    """Of a stream that rounding makes due at the moment at which it still waits."""

    sizes = (1, 2)

    def __init__(self, clock: Timeline) -> None:
        self.clock = clock
        self.asked = 0

    def next(self, stream: object, now: float) -> int:
        self.asked += 1
        return 0

    def due(self, stream: object) -> float:
        return self.clock.now


def test_a_stream_that_is_due_and_not_ready_lets_time_go_on(times: StepTimes) -> None:
    clock = Timeline()
    stage = Chunks("code2wav", "code2wav.0", times.curves["code2wav"], times.profile, None, clock)
    stage.rule = rule = _NeverReady(clock)  # type: ignore[assignment]
    answer = Answer(index=0, session="", prompt=1, tokens=2, frames=2, asked=0.0)
    stage.open(answer, RequestOptions(modalities=("audio",)))
    assert answer.stream is not None
    answer.stream.arrived(1)
    stage.take(answer)
    stage.look()
    clock.run(1e-3)
    assert clock.now == 1e-3
    assert 100 < rule.asked < 10_000


@pytest.mark.parametrize("machine", ["h200", "tiny"])
def test_twice_the_load_leaves_admitted_speech_whole_and_nine_tenths_of_the_throughput(times: StepTimes, machine: str) -> None:
    """On a card whose batch is full before anybody is late, and on a machine on which one stream more makes the others late. The peak is
    the most that is made at any load with every answer whole."""
    if machine == "tiny":
        times = step_times.read(step_times.profiles()["tiny"])
        peak = 0.9 * times.profile.max_batch / (times.curves["talker"](times.profile.max_batch) * times.profile.speech_frames)
        seconds, warm_s = 90.0, 30.0
    else:
        peak, seconds, warm_s = 36.0, 20.0, 6.0
    made = {}
    for share in (0.75, 1.0, 1.5, 2.0):
        load = Load(rate=share * peak)
        ours = scenario(load=load, replicas=1, bus=bus(max_waiting=16), seconds=seconds, warm_s=warm_s)
        figures, _, _ = simulate(ours, times, FREE)
        assert figures.underrun_p99 == 0.0 and figures.silent == 0.0, share
        made[share] = figures.audio_s_per_s
        if share == 2.0:
            assert figures.refused > 0.2 * figures.requests, "it is more than it can carry"
    assert made[2.0] >= 0.9 * max(made.values()), made


def test_replicas_that_share_cores_wait_for_one() -> None:
    clock, ended = Timeline(), []
    cores = Cores(clock, 2)
    for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 1.0), ("d", 5.0)):
        cores.run(seconds, lambda name=name: ended.append((name, clock.now)))
    clock.run()
    assert ended == [("b", 1.0), ("c", 2.0), ("a", 3.0), ("d", 7.0)]


def test_the_prediction_for_replicas_on_shared_cores_stands_beside_what_was_measured(tmp_path: pathlib.Path) -> None:
    """Two cores that one Talker and one Thinker fill: what a second Talker brings is less than half of what it does with cores of its own."""
    rows = [{"stage": "talker", "replicas": count, "audio_s_per_s": 10.0, "ttfp_p50_ms": 100.0} for count in (1, 2)]
    work = {"processor": [[1, 1]], "thinker": [[1, 4], [8, 8]], "talker": [[1, 12], [8, 20]], "code2wav": [[1, 8], [8, 16]]}
    said = {
        "streams": 8,
        "requests": 16,
        "text_tokens": 24,
        "frames": 48,
        "max_batch": 16,
        "others": 0.3,
        "work_ms": work,
        "rows": rows,
    }
    file = tmp_path / "scale.json"
    gained = {}
    for cores in (2, 64):
        file.write_text(json.dumps({"replicas": {"tiny": {**said, "cores": cores}}}))
        one, two = beside.shared(step_times.read(step_times.profiles()["tiny"]), FREE, file)
        assert (one.label, two.label, one.measured) == ("talker x 1", "talker x 2", rows[0])
        gained[cores] = two.predicted["audio_s_per_s"] / one.predicted["audio_s_per_s"] - 1
    assert gained[2] < 0.5 * gained[64], gained
