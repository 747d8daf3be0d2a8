"""What the broker's one thread spends on an event, and on a request by the number of replicas that it is routed over.

A request's cost is measured here, with the real orchestrator, registry, routing and codec, without sockets. That of an event is read from
a result file of `python -m bench.scale`, which floods the real broker process through its real sockets.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import time

import msgspec

from bench.simulation.step_times import HERE, ROOT
from omni_bus import events, wire
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, EdgeConfig, ModelConfig, StageConfig
from omni_bus.orchestrator import Orchestrator
from omni_bus.spec import PipelineSpec, load_pipeline

REPLICAS = (1, 16, 64, 256)
SUBMITS = 60  # fewer than one replica's capacity: none of them waits


class BrokerCost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of CPU."""

    event_us: float  # an event in, and what it sends out, with the broker at its limit; at low load a wake-up comes to it
    submit_us: float  # a request with one replica a stage, beyond `event_us`
    submit_replica_us: float  # and for each further replica in the registry
    about: str = ""

    @property
    def event_s(self) -> float:
        return self.event_us / 1e6

    def submit_s(self, replicas: int) -> float:
        """Of a request that is routed over so many replicas, of all stages together."""
        return (self.event_us + self.submit_us + replicas * self.submit_replica_us) / 1e6

    def transit_s(self, hop_s: float) -> float:
        """Of a hop, what is not the broker's work: sockets, wake-ups."""
        return max(0.0, hop_s - self.event_s)


def read(path: pathlib.Path = HERE / "broker.json") -> BrokerCost:
    return msgspec.json.decode(path.read_bytes(), type=BrokerCost)


def measured(scale: pathlib.Path) -> BrokerCost:
    """scale: the result file with the broker's flood. Takes half a minute."""
    runs = json.loads((ROOT / scale).read_text())["broker"]["runs"]
    event_us = statistics.median(run["flood"]["broker_us_per_event"] for run in runs)
    pipeline = load_pipeline("qwen3_omni")
    points = [(replicas * len(pipeline.stages), submit_us(pipeline, replicas)) for replicas in REPLICAS]
    slope = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    told = ", ".join(f"{took:.0f} us over {replicas} replicas" for replicas, took in points)
    return BrokerCost(
        event_us=event_us,
        submit_us=round(points[0][1] - slope * points[0][0], 1),
        submit_replica_us=round(slope, 2),
        about=f"event: {scale}; a request in the orchestrator and codec: {told}",
    )


def submit_us(pipeline: PipelineSpec, replicas: int) -> float:
    """CPU microseconds from a Submit's bytes to those of all that follows at once: the median of SUBMITS."""
    deployment = Deployment(
        model=ModelConfig(pipeline=pipeline.name),
        api=ApiConfig(),
        bus=BusConfig(max_requests=10 * SUBMITS),
        stages={stage.name: StageConfig(devices=("cuda:0",), replicas=replicas) for stage in pipeline.stages},
        edges={edge.name: EdgeConfig(credits=edge.credits) for edge in pipeline.edges},
    )
    orchestrator = Orchestrator(pipeline, deployment, log=lambda line: None, now=0.0)
    orchestrator.handle(b"api", events.Hello("client"), (), 0.0)
    for name, (stage,) in deployment.workers().items():
        peer, replica = name.encode(), events.StageReplica(stage, "cuda:0", 64)
        orchestrator.handle(peer, events.Register(worker=name, pid=1, host="h", boot="b", replicas=(replica,)), (), 0.0)
        orchestrator.handle(peer, events.Ready(stage, 64), (), 0.0)
    options = events.RequestOptions(modalities=("text", "audio"))
    took = []
    for ticket in range(1, SUBMITS + 1):
        header = wire.encode(events.Submit(ticket, "", options, 300.0))
        start = time.thread_time_ns()
        for _, event, _ in orchestrator.handle(b"api", wire.at_broker(header), (b"",), 0.0):
            wire.encode(event)
        took.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(took)


def with_event_us(cost: BrokerCost, event_us: float) -> BrokerCost:
    return msgspec.structs.replace(cost, event_us=event_us, about=f"event: {event_us:g} us as asked; {cost.about}")
