"""One simulated run, and its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.simulation.answers import Answer
from bench.simulation.broker_cost import BrokerCost
from bench.simulation.listeners import Listeners, Load
from bench.simulation.policies import OURS, in_place
from bench.simulation.server import Server
from bench.simulation.step_times import StepTimes
from bench.simulation.timeline import Timeline
from omni_bus.bench_report import percentile
from omni_bus.deployment import BusConfig
from omni_bus.speech_stream import underrun_s

WARM_S = 10.0  # what was asked before is not counted
MAX_REQUESTS = 1_000_000  # the simulation asks what stages and broker carry, not where `bus.max_requests` cuts off


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    load: Load
    replicas: int | dict[str, int] = 1
    policy: str = OURS
    bus: BusConfig = dataclasses.field(default_factory=lambda: BusConfig(max_requests=MAX_REQUESTS))
    seconds: float = 40.0
    warm_s: float = WARM_S
    seed: int = 0
    kept_positions: int = 0  # that a Thinker keeps for sessions
    sets_a_host: int = 8
    slow_first: float = 1.0  # so many times longer take the steps of each stage's first replica


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Milliseconds, over the answers asked for after the warm-up; rates over the time after it."""

    requests: int  # that were asked for
    refused: int
    ttfp_p50: float
    ttfp_p95: float
    ttfp_p99: float
    underrun_p50: float
    underrun_p95: float
    underrun_p99: float
    silent: float  # share of the answers with a gap that can be heard
    e2el_p50: float
    audio_s_per_s: float
    requests_per_s: float
    cached: float  # share of the prompt positions that were there already
    broker_events_per_s: int
    broker_utilisation: float  # of its one core; above 1 it only falls behind
    broker_wait_ms: float  # the longest
    busy: dict[str, float]  # stage → share of the whole time in which its replicas are in a step


HEARD_MS = 20.0  # of silence in an answer


def simulate(scenario: Scenario, times: StepTimes, cost: BrokerCost) -> tuple[Figures, Sequence[Answer], Server]:
    """Runs to its end; whoever has asked by then is answered, in the simulation's time."""
    clock = Timeline()
    listeners = Listeners(scenario.load, times.profile, scenario.seed, scenario.seconds)
    with in_place(scenario.policy, scenario.seed):
        server = Server(
            times,
            cost,
            clock,
            listeners.ended,
            replicas=scenario.replicas,
            bus=scenario.bus,
            kept_positions=scenario.kept_positions,
            sets_a_host=scenario.sets_a_host,
            slow_first=scenario.slow_first,
        )
        listeners.begin(server)
        clock.run(scenario.warm_s)
        before = server.events, server.busy_s
        clock.run(scenario.seconds)
    return _figures(scenario, listeners, server, *before), listeners.answers, server


def _figures(scenario: Scenario, listeners: Listeners, server: Server, events: float, busy_s: float) -> Figures:
    """events, busy_s: the broker's at the end of the warm-up."""
    warm, seconds = scenario.warm_s, scenario.seconds - scenario.warm_s
    asked = [answer for answer in listeners.answers if answer.asked >= warm]
    heard = [answer for answer in asked if answer.packets]
    done = [answer for answer in listeners.answers if answer.outcome == "done" and warm <= answer.ended < scenario.seconds]
    waits = [1e3 * answer.packets[0][0] for answer in heard]
    waits += [1e3 * (scenario.seconds - answer.asked) for answer in asked if not answer.packets and not answer.outcome]
    gaps = [1e3 * underrun_s(answer.packets) for answer in heard]
    audio = sum(
        length
        for answer in listeners.answers
        for arrival, length in answer.packets
        if warm <= answer.asked + arrival < scenario.seconds
    )
    loads = {
        name: [worker.replica for worker in server.workers.values() if worker.replica.name == name] for name in server.replicas
    }
    tokens = loads[server.times.profile.tokens]
    prompts = sum(one.load().prompt_computed + one.load().prompt_cached for one in tokens)

    def at(values: Sequence[float], percent: float) -> float:
        return round(percentile(values, percent), 1) if values else 0.0

    return Figures(
        requests=len(asked),
        refused=sum(answer.outcome not in ("", "done", "cancelled") for answer in asked),
        ttfp_p50=at(waits, 50),
        ttfp_p95=at(waits, 95),
        ttfp_p99=at(waits, 99),
        underrun_p50=at(gaps, 50),
        underrun_p95=at(gaps, 95),
        underrun_p99=at(gaps, 99),
        silent=round(sum(gap > HEARD_MS for gap in gaps) / len(gaps), 4) if gaps else 0.0,
        e2el_p50=at([1e3 * (answer.ended - answer.asked) for answer in done], 50),
        audio_s_per_s=round(audio / seconds, 1),
        requests_per_s=round(len(done) / seconds, 2),
        cached=round(sum(one.load().prompt_cached for one in tokens) / prompts, 3) if prompts else 0.0,
        broker_events_per_s=round((server.events - events) / seconds),
        broker_utilisation=round((server.busy_s - busy_s) / seconds, 3),
        broker_wait_ms=round(1e3 * server.longest_wait_s, 1),
        busy={name: round(sum(one.busy_s for one in of) / len(of) / scenario.seconds, 3) for name, of in loads.items()},
    )
