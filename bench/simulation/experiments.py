"""The questions that `python -m bench.simulate` asks, one function each; every one gives rows of a label and figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from bench.simulation import policies
from bench.simulation.broker_cost import BrokerCost
from bench.simulation.listeners import Load
from bench.simulation.run import MAX_REQUESTS, Figures, Scenario, simulate
from bench.simulation.step_times import StepTimes
from omni_bus.deployment import BusConfig

FREE = BrokerCost(event_us=0.01, submit_us=0.0, submit_replica_us=0.0, about="a broker that costs nothing")
PEAK = (
    39.0  # requests a second that one set of the H200 profile ends at twice its load (`overload`): what the shares below are of
)
HEARD = 250  # listeners a set, with their pauses: four fifths of them listen at any time, two thirds of what it carries
NO_ADMISSION, ADMISSION = 0.0, 0.9  # `bus.admit_rtf`

Row = tuple[str, Figures]


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What all experiments share. scale: of the simulated time after the warm-up."""

    times: StepTimes
    cost: BrokerCost
    seed: int = 0
    scale: float = 1.0
    told: Callable[[str], None] = lambda line: None

    def row(self, label: str, scenario: Scenario, cost: BrokerCost | None = None) -> Row:
        counted = (scenario.seconds - scenario.warm_s) * self.scale
        scenario = dataclasses.replace(scenario, seed=self.seed, seconds=scenario.warm_s + counted)
        figures, _, _ = simulate(scenario, self.times, cost or self.cost)
        self.told(f"{label}: {figures}")
        return label, figures


def bus(admit_rtf: float = ADMISSION, **keys: Any) -> BusConfig:
    return msgspec.structs.replace(BusConfig(max_requests=MAX_REQUESTS, max_waiting=MAX_REQUESTS), admit_rtf=admit_rtf, **keys)


def one_set(bench: Bench) -> Iterator[Row]:
    """Listeners on one set of stages: how many before first packets are late or answers have gaps."""
    for streams in (50, 100, 200, 300, 400, 500):
        yield bench.row(f"{streams} listeners", Scenario(load=Load(streams=streams), bus=bus(), seconds=45, warm_s=20))


def broker_limit(bench: Bench) -> Iterator[Row]:
    """The same load a set on more and more sets behind one broker."""
    for sets in (1, 2, 4, 5, 6, 7, 8):
        load = Load(streams=HEARD * sets)
        yield bench.row(
            f"{sets} sets, {HEARD * sets} listeners", Scenario(load=load, replicas=sets, bus=bus(), seconds=30, warm_s=20)
        )


def replicas(bench: Bench) -> Iterator[Row]:
    """Beyond one broker's limit: what routing, admission and stages would do behind a broker that costs nothing."""
    for sets, streams in ((1, 250), (4, 1000), (16, 4000), (40, 10_000), (256, 10_000)):
        scenario = Scenario(load=Load(streams=streams), replicas=sets, bus=bus(), seconds=25, warm_s=18)
        yield bench.row(f"{sets} sets, {streams} listeners", scenario, FREE)


def by_policy(bench: Bench) -> Iterator[Row]:
    """Poisson arrivals at 0.93 of what four sets carry, by who chooses the replica; then at 0.75 with one set at half the speed."""
    for what, share, slow in (("alike", 0.93, 1.0), ("one is slow", 0.75, 2.0)):
        for name in policies.NAMES:
            load = Load(rate=4 * PEAK * share)
            scenario = Scenario(
                load=load, replicas=4, policy=name, bus=bus(NO_ADMISSION), seconds=25, warm_s=8, slow_first=slow
            )
            yield bench.row(f"{what}: {name}", scenario, FREE)


def affinity(bench: Bench) -> Iterator[Row]:
    """Conversations of eight turns with and without the session's name at the broker, four sets."""
    for on in (True, False):
        load = Load(streams=600, sessions=True, affinity=on)
        scenario = Scenario(load=load, replicas=4, bus=bus(NO_ADMISSION), seconds=60, warm_s=20, kept_positions=200_000)
        yield bench.row("affinity" if on else "none", scenario, FREE)


def overload(bench: Bench) -> Iterator[Row]:
    """One set at half, once and twice what it carries, with admission and without; no more than 64 wait."""
    for share in (0.5, 1.0, 2.0):
        for rtf in (ADMISSION, NO_ADMISSION):
            load = Load(rate=PEAK * share)
            label = f"{share:g} x, {'admission' if rtf else 'none'}"
            yield bench.row(label, Scenario(load=load, bus=bus(rtf, max_waiting=64), seconds=40, warm_s=15))


def slow_overload(bench: Bench) -> Iterator[Row]:
    """The same where rows share a slow machine, so that one more stream makes the others late: the tiny model on two cores."""
    profile = bench.times.profile
    longest = bench.times.curves[profile.frames](profile.max_batch)
    rate = 0.9 * profile.max_batch / (longest * profile.speech_frames)
    for share in (0.5, 1.0, 2.0):
        for rtf in (ADMISSION, NO_ADMISSION):
            label = f"{share:g} x, {'admission' if rtf else 'none'}"
            load = Load(rate=rate * share)
            yield bench.row(label, Scenario(load=load, bus=bus(rtf, max_waiting=64), seconds=120, warm_s=40))


def pod_run() -> Scenario:
    """One set with HEARD listeners, for what their audio costs a broker."""
    return Scenario(load=Load(streams=HEARD), bus=bus(), seconds=40, warm_s=20)
