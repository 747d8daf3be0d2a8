"""How many events a second one broker process on one core carries before a chunk takes more than a millisecond through it.

The broker is the real process with its real sockets, bound to one core. Its peers are this process on another one: a worker for each
stage of the probe pipeline and a client, which send what spoken streams send: for each packet of sound a chunk on each of the four
edges, the stages' acknowledgements at once, and the client's for every sixteenth. Chunks are sent at times fixed beforehand
(Poisson), whether or not the broker keeps up, and each is timed from the moment at which it was due to the moment at which its
receiver has it. The rate rises until the 99th percentile passes a millisecond.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.scale.broker_peers import EDGES, PIPELINE, STAGES, STREAMS, Peers
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, EdgeConfig, ModelConfig, RunDir, StageConfig

CREDITS = 1_000_000  # past the knee more is under way than any stage would be let to
LIMIT_MS = 1.0
RUNG_S = 1.5
FIRST_RATE, STEP = 1000, 1.25  # chunks a second, and how it rises
AGAIN = 1000  # added to the seed: the same rate at other times
FAILS = 2  # rungs in a row above the limit, and the ladder ends
WINDOW = 256  # chunks under way while it is flooded


@dataclasses.dataclass(slots=True)
class Rung:
    """One rate, held for a while."""

    offered: float  # chunks a second
    events_in: float  # events a second that the broker took in: chunks and acknowledgements
    p50_ms: float
    p99_ms: float
    late_p99_ms: float  # by which the load itself sent a chunk after it was due
    broker_us: float  # of the broker's CPU for an event

    @property
    def good(self) -> bool:
        return self.p99_ms <= LIMIT_MS


def percentile(values: list[int], share: float) -> float:
    """Nanoseconds in milliseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e6


def knee(rungs: list[Rung]) -> Rung | None:
    """The highest rate below which, and at which, the limit was kept; None where the first passed it. One rung that failed between
    two that did not is an accident of the machine."""
    best = None
    for index, rung in enumerate(rungs):
        if rung.good:
            best = rung
        elif index + 1 >= len(rungs) or not rungs[index + 1].good:
            break
    return best


def cpu_s(pid: int) -> float:
    """Of all threads of a process, to the nanosecond where the kernel accounts for that."""
    return sum(int(task.read_text().split()[0]) for task in pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def hold(peers: Peers, broker: int, rate: float, seconds: float, seed: int) -> Rung:
    """Offer `rate` chunks a second for so long, and wait for the last of them."""
    draw = random.Random(f"{seed} {rate}")
    plan: list[tuple[int, int, int]] = []
    at = 0.0
    while at < seconds:
        plan.append((int(at * 1e9), draw.randrange(len(EDGES)), draw.randrange(STREAMS)))
        at += draw.expovariate(rate)
    late: list[int] = []
    peers.latency.clear()
    peers.arrived, before, used = 0, peers.events_in, cpu_s(broker)
    start = time.monotonic_ns()
    index = 0
    while peers.arrived < len(plan):
        now = time.monotonic_ns() - start
        if index < len(plan) and plan[index][0] <= now:
            due, edge, stream = plan[index]
            peers.send(edge, stream, start + due)
            late.append(time.monotonic_ns() - start - due)
            index += 1
        elif not peers.read():
            until = plan[index][0] if index < len(plan) else now + 10**9
            peers.wait((until - now) / 1e9)
    took = (time.monotonic_ns() - start) / 1e9
    count = peers.events_in - before
    return Rung(
        offered=round(rate),
        events_in=round(count / took),
        p50_ms=round(percentile(peers.latency, 0.5), 3),
        p99_ms=round(percentile(peers.latency, 0.99), 3),
        late_p99_ms=round(percentile(late, 0.99), 3),
        broker_us=round((cpu_s(broker) - used) / count * 1e6, 1),
    )


def flood(peers: Peers, broker: int, seconds: float) -> dict[str, float]:
    """As much as goes through, with WINDOW chunks under way at any time."""
    draw = random.Random(0)
    peers.arrived, before, used = 0, peers.events_in, cpu_s(broker)
    start = time.monotonic()
    sent = 0
    while time.monotonic() < start + seconds or peers.arrived < sent:
        while sent - peers.arrived < WINDOW and time.monotonic() < start + seconds:
            peers.send(draw.randrange(len(EDGES)), draw.randrange(STREAMS), time.monotonic_ns())
            sent += 1
            if sent % 8 == 0:
                peers.read()
        if not peers.read():
            peers.wait(1.0)
    took, count, cpu = time.monotonic() - start, peers.events_in - before, cpu_s(broker) - used
    return {
        "events_per_s": round(count / took),
        "broker_us_per_event": round(cpu / count * 1e6, 1),
        "broker_core_busy": round(cpu / took, 2),
    }


@contextlib.contextmanager
def broker_on_a_core() -> Iterator[tuple[Peers, int]]:
    """A broker alone on the last core, and its peers on the others. On a machine of one core they share it."""
    cores = sorted(os.sched_getaffinity(0))
    run_dir = RunDir.create()
    run_dir.write(
        Deployment(
            model=ModelConfig(pipeline="probe"),
            api=ApiConfig(),
            bus=BusConfig(lost_after_s=3600.0, step_s=0.0, max_requests=2 * STREAMS),
            stages={name: StageConfig(devices=("cpu",), max_batch=STREAMS) for name in STAGES},
            edges={edge.name: EdgeConfig(credits=CREDITS) for edge in PIPELINE.edges},
        )
    )
    with run_dir.log("broker").open("wb") as log:
        broker = subprocess.Popen(
            [sys.executable, "-m", "omni_bus.broker_main", str(run_dir.path)],
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, {cores[-1]}),
        )
    peers = None
    try:
        os.sched_setaffinity(0, set(cores[:-1]) or set(cores))
        gc.freeze()
        gc.disable()
        peers = Peers(run_dir)
        yield peers, broker.pid
    finally:
        gc.enable()
        gc.unfreeze()
        os.sched_setaffinity(0, set(cores))
        if peers is not None:
            peers.close()
        broker.kill()
        broker.wait()
        shutil.rmtree(run_dir.path)


def ladder(peers: Peers, broker: int, seconds: float, seed: int) -> list[Rung]:
    """Rates from FIRST_RATE on, until FAILS in a row were above the limit. One that is has a second chance: other processes, and a
    machine's other guests, now and then take the core for milliseconds."""
    rungs: list[Rung] = []
    rate = float(FIRST_RATE)
    while len(rungs) < FAILS or any(rung.good for rung in rungs[-FAILS:]):
        rung = hold(peers, broker, rate, seconds, seed)
        if not rung.good:
            rung = min(rung, hold(peers, broker, rate, seconds, seed + AGAIN), key=lambda one: one.p99_ms)
        rungs.append(rung)
        rate *= STEP
    return rungs


def measure(runs: int, end: float, seconds: float = RUNG_S) -> dict[str, Any]:
    """`runs` ladders, each rung held for `seconds`; none is begun after `end`, by time.monotonic()."""
    results: list[dict[str, Any]] = []
    for seed in range(runs):
        if results and time.monotonic() > end:
            break
        with broker_on_a_core() as (peers, broker):
            flooded = flood(peers, broker, seconds)
            rungs = ladder(peers, broker, seconds, seed)
        best = knee(rungs)
        results.append(
            {
                "knee": None if best is None else dataclasses.asdict(best),
                "flood": flooded,
                "rungs": [dataclasses.asdict(rung) for rung in rungs],
            }
        )
    return {"streams": STREAMS, "rung_s": seconds, "limit_ms": LIMIT_MS, "runs": results}
