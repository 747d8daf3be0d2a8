"""Check a deployment and print what would run where, without starting it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from omni_bus import memory
from omni_bus.commands import deployment_arguments
from omni_bus.deployment import Deployment
from omni_bus.devices import CudaDevice, cuda_devices
from omni_bus.events import CLIENT
from omni_bus.memory import MemoryPlan, bytes_text, capacity
from omni_bus.spec import PipelineSpec, load_pipeline

NAME = "check"
EPILOG = deployment_arguments.EPILOG

arguments = deployment_arguments.add


def run(arguments: argparse.Namespace) -> int:
    deployment = deployment_arguments.load(arguments)
    pipeline = load_pipeline(deployment.model.pipeline)
    shares = memory.plan(deployment, pipeline)
    weights = memory.stage_weights(deployment) | {share.stage: share.need.weights for share in shares.shares}
    print("\n".join([*plan(deployment, pipeline, weights), *memory_lines(shares)]))
    misfits = [*shares.problems] or list(too_large(deployment, weights))
    for line in misfits:
        print(f"omni-bus: {line}", file=sys.stderr)
    return 2 if misfits else 0


def plan(deployment: Deployment, pipeline: PipelineSpec, weights: dict[str, int]) -> Iterator[str]:
    """Lines for people."""
    api = deployment.api
    keys = "keys asked for" if api.api_keys_file else "open, loopback only"
    yield f"model     {deployment.model_name}  (pipeline {pipeline.name}, {deployment.model.path or 'brings its own models'})"
    yield f"api       http://{api.host}:{api.port}, {api.processes} process{'es' if api.processes > 1 else ''}, {keys}"
    yield from (
        f"gpu       cuda:{index}  {device.name}, {bytes_text(device.memory)}" for index, device in _named_gpus(deployment)
    )
    yield ""
    rows = [("stage", "worker", "device", "dtype", "threads", "batch", "weights")]
    hosted = [(process, *one) for process, workers in deployment.processes().items() for one in workers.items()]
    for process, worker, stages in hosted:
        index = int(worker.rpartition(".")[2])
        for name in stages:
            stage = deployment.stages[name]
            size = bytes_text(weights[name]) if name in weights else "-"
            device = stage.devices[index % len(stage.devices)]
            unused = pipeline.stage(name).unused
            dtype = "-" if "dtype" in unused else stage.dtype
            batch = "-" if "max_batch" in unused else str(stage.max_batch)
            where = worker if worker == process else f"{worker}, a thread of {process}"
            rows.append((name, where, device, dtype, str(stage.threads), batch, size))
    rows += [(name, "-", "on other hosts", "", "", "", "") for name, stage in deployment.stages.items() if not stage.replicas]
    yield from table(rows)
    yield ""
    edges = [("edge", "connector", "credits")]
    for edge in pipeline.edges:
        config = deployment.edges[edge.name]
        edges.append((edge.name, _connector(deployment, edge.source, edge.target, config.connector), str(config.credits)))
    yield from table(edges)


def memory_lines(shares: MemoryPlan) -> Iterator[str]:
    """What each replica is to have of its device."""
    rows = [("memory", "device", "weights", "workspace", "for requests", "that is", "said")]
    for share in shares.shares:
        need = share.need
        held = share.state // need.unit_bytes
        units = f"{held:,} of {need.units:,} {need.unit} of {_small(need.unit_bytes)}"
        said = "by its keys" if need.state is not None else need.memory
        rows.append(
            (
                share.worker if share.worker.partition(".")[0] == share.stage else f"{share.worker}:{share.stage}",
                share.device,
                bytes_text(need.weights),
                bytes_text(need.workspace),
                bytes_text(share.state),
                units,
                said,
            )
        )
    if shares.shares:
        yield ""
        yield from table(rows)


def _small(size: int) -> str:
    return bytes_text(size) if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def too_large(deployment: Deployment, weights: dict[str, int]) -> Iterator[str]:
    """What will not fit: weights alone against each device's memory."""
    needed: dict[str, int] = {}
    for name, size in weights.items():
        stage = deployment.stages[name]
        for replica in range(stage.replicas):
            device = stage.devices[replica % len(stage.devices)]
            needed[device] = needed.get(device, 0) + size
    for device, size in needed.items():
        if size > capacity(device):
            yield (
                f"will not fit: the weights on {device} take {bytes_text(size)}, and it has {bytes_text(capacity(device))}; "
                "spread the stages over more devices, or take a smaller dtype"
            )


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _connector(deployment: Deployment, source: str, target: str, said: str) -> str:
    if said != "auto":
        return said
    if CLIENT in (source, target):
        return "inline"
    between_hosts = ", or tcp between hosts" if deployment.bus.listen else ""
    return f"local{between_hosts}" if deployment.take_turns(source, target) else f"inline up to 64 KiB, else shm{between_hosts}"


def _named_gpus(deployment: Deployment) -> list[tuple[int, CudaDevice]]:
    used = {device for stage in deployment.stages.values() for device in stage.devices if device.startswith("cuda:")}
    return [(index, device) for index, device in enumerate(cuda_devices() if used else ()) if f"cuda:{index}" in used]
