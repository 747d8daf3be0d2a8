"""A simulated run beside a measured one: the same load, the same arithmetic of figures."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import msgspec

from bench.simulation.broker_cost import BrokerCost
from bench.simulation.listeners import Load
from bench.simulation.run import Scenario, simulate
from bench.simulation.step_times import Curve, StepTimes
from omni_bus.bench_load import Measured
from omni_bus.bench_report import row, summarise

LONG_S = 600.0  # until when a closed loop of so many requests has surely ended
SHOWN = ("ttfp_p50_ms", "ttfp_p95_ms", "e2el_p50_ms", "audio_s_per_s", "underrun_p95_ms")


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    label: str
    predicted: dict[str, Any]
    measured: dict[str, Any]  # may lack some of the figures


def closed_loop(
    times: StepTimes, cost: BrokerCost, streams: int, count: int, replicas: int | dict[str, int] = 1
) -> dict[str, Any]:
    """What `omni-bus bench` would print of it: the row of a pass."""
    load = Load(streams=streams, hear=False, varied=False, count=count)
    _, answers, _ = simulate(Scenario(load=load, replicas=replicas, seconds=LONG_S, warm_s=0.0), times, cost)
    heard = [
        Measured(
            error=None if answer.outcome == "done" else answer.outcome,
            packets=answer.packets,
            end_s=answer.ended - answer.asked,
        )
        for answer in answers
    ]
    return row(summarise(streams, heard, max(answer.ended for answer in answers)))


def card(times: StepTimes, cost: BrokerCost) -> list[Pair]:
    """Each row of the profile's result file. Step times are taken from it; waiting, batches, first packets and rates are predicted."""
    pairs = []
    for measured in times.measured:
        streams = measured["concurrency"]
        pairs.append(Pair(f"{streams} streams", closed_loop(times, cost, streams, max(3 * streams, 6)), measured))
    return pairs


def shared(times: StepTimes, cost: BrokerCost, scale: pathlib.Path) -> list[Pair]:
    """Each row of the tiny model in such a file: stages that compute on the machine's cores, which all replicas share. What a step costs a
    core, and what broker, API and the load's own process take, was measured with one replica of each; none of a file without that."""
    said = json.loads(scale.read_text())["replicas"]["tiny"]
    if "work_ms" not in said:
        return []
    cores, left = said["cores"], said["cores"] - said["others"]
    profile = msgspec.structs.replace(
        times.profile,
        cores=cores,
        text_tokens=said["text_tokens"],
        speech_frames=said["frames"] - 1,
        max_batch=said["max_batch"],
    )
    curves = {
        stage: Curve.through((rows, ms * cores / left / 1e3) for rows, ms in points)
        for stage, points in said["work_ms"].items()
    }
    pairs = []
    for measured in said["rows"]:
        replicas = {measured["stage"]: measured["replicas"]}
        predicted = closed_loop(StepTimes(profile, curves, ()), cost, said["streams"], said["requests"], replicas)
        pairs.append(Pair(f"{measured['stage']} x {measured['replicas']}", predicted, measured))
    return pairs


def scaled(times: StepTimes, cost: BrokerCost, scale: pathlib.Path) -> list[Pair]:
    """Each row of the probe in a result file of `python -m bench.scale`: one stage of 40 ms a step in 1, 2 and 4 replicas."""
    said = json.loads(scale.read_text())["replicas"]["probe"]
    pairs = []
    for measured in said["rows"]:
        stage = measured["stage"]
        profile = msgspec.structs.replace(times.profile, batches={stage: said["max_batch"]})
        slow = {**times.curves, stage: Curve((1.0,), (said["step_ms"] / 1e3,))}
        predicted = closed_loop(
            StepTimes(profile, slow, ()), cost, said["streams"], said["requests"], {stage: measured["replicas"]}
        )
        pairs.append(Pair(f"{stage} x {measured['replicas']}", predicted, measured))
    return pairs
