"""Whether a deployment can be placed: devices that exist, stages that can share a process, connectors that can reach, MPS."""

from __future__ import annotations

import re
from collections.abc import Iterator

from omni_bus.config_text import KeyPath
from omni_bus.deployment import Deployment
from omni_bus.devices import missing_device
from omni_bus.events import CLIENT
from omni_bus.mps import missing, wanted
from omni_bus.spec import PipelineSpec

Problem = tuple[KeyPath, str]

_PROCESS = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_TAKEN = frozenset({"api", "broker", "supervisor", CLIENT})


def placement_problems(deployment: Deployment, pipeline: PipelineSpec, smaller: str) -> Iterator[Problem]:
    """Key and what is wrong with it. `smaller` begins the advice for a machine without the device: "use " or "use FILE or "."""
    yield from _device_problems(deployment, pipeline, smaller)
    yield from _process_problems(deployment)
    yield from _connector_problems(deployment, pipeline)
    if deployment.bus.mps == "on" and wanted(deployment) and (reason := missing()) is not None:
        yield ("bus", "mps"), f': {reason}; say "auto" to go on without it there'


def _device_problems(deployment: Deployment, pipeline: PipelineSpec, smaller: str) -> Iterator[Problem]:
    for name, stage in deployment.stages.items():
        path = ("stages", name, "devices")
        for device in dict.fromkeys(stage.devices):
            wrong = missing_device(device)
            if pipeline.stage(name).cpu_only and device.startswith("cuda"):
                yield path, f': stage {name} runs on the CPU only, not on {device}; leave it out or say ["cpu"]'
            elif wrong is not None and device.startswith("cuda:"):
                yield path, f": stage {name} {wrong}; {smaller}--set 'stages.{name}.devices=[\"cpu\"]'"
            elif wrong is not None:
                yield path, f": {wrong}"
        if not stage.replicas and not deployment.bus.listen:
            yield ("stages", name, "replicas"), ": 0 leaves the stage to other hosts, which need bus.listen to attach"
        if len(stage.devices) > max(1, stage.replicas):
            yield path, f": lists {len(stage.devices)} devices for {stage.replicas} replica(s); the rest would never be used"


def _process_problems(deployment: Deployment) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for name, stage in deployment.stages.items():
        if stage.process and (stage.process in _TAKEN or not _PROCESS.fullmatch(stage.process)):
            yield (
                ("stages", name, "process"),
                f' must be lower-case letters, digits, "_" or "-" and none of {", ".join(sorted(_TAKEN))}',
            )
        host = first.setdefault(stage.process or name, name)
        beside = deployment.stages[host]
        if stage.replicas != beside.replicas:
            path = ("stages", name, "replicas")
            yield (
                path,
                f": stages {host} and {name} share a process, so they need the same number (now {beside.replicas} and {stage.replicas})",
            )
        if stage.threads != beside.threads:
            path = ("stages", name, "threads")
            yield (
                path,
                f": stages {host} and {name} share a process, so they need the same number (now {beside.threads} and {stage.threads})",
            )
        if stage.loop != beside.loop:
            path = ("stages", name, "loop")
            yield (
                path,
                f': stages {host} and {name} share a process, so both take turns or neither does (now "{beside.loop}" and "{stage.loop}")',
            )
        other = deployment.stages.get(stage.process)
        if other is not None and other.loop == "own" and (other.process or stage.process) != stage.process:
            # Both would have a worker of that name.
            yield (
                ("stages", name, "process"),
                f': "{stage.process}" is a stage with a loop of its own elsewhere; name the process otherwise',
            )


def _connector_problems(deployment: Deployment, pipeline: PipelineSpec) -> Iterator[Problem]:
    for edge in pipeline.edges:
        connector = deployment.edges[edge.name].connector
        path = ("edges", edge.name, "connector")
        if CLIENT in (edge.source, edge.target):
            if connector not in ("auto", "inline"):
                yield path, f': an edge of the client has "auto" or "inline", not "{connector}"'
        elif connector == "tcp" and not deployment.bus.listen:
            yield path, ': "tcp" leads to other hosts, which need bus.listen to attach; say "auto"'
        elif connector == "local" and not deployment.take_turns(edge.source, edge.target):
            yield (
                path,
                f': "local" joins stages of one process that share its loop; give {edge.source} and {edge.target} the same `process` '
                'and loop = "shared", or say "shm"',
            )
        elif connector == "cuda_ipc":
            groups = {deployment.stages[end].process or end for end in (edge.source, edge.target)}
            if len(groups) == 1 and not deployment.take_turns(edge.source, edge.target):
                # CUDA opens no handle in the process that exported it.
                yield path, f': "cuda_ipc" joins processes, and {edge.source} and {edge.target} are threads of one; say "auto"'
            for end in (edge.source, edge.target):
                devices = deployment.stages[end].devices
                if not all(device.startswith("cuda:") for device in devices):
                    yield (
                        path,
                        f': "cuda_ipc" joins stages on GPUs, and stage {end} is on {", ".join(devices)}; say "auto", or give it a GPU',
                    )
