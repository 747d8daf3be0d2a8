"""Which workers a deployment has once a running server is scaled, and why one more cannot be. Asks the memory plan; starts nothing."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable

import msgspec

from omni_bus.deployment import Deployment
from omni_bus.errors import ConfigError
from omni_bus.events import StageReplica
from omni_bus.memory import bytes_text, plan
from omni_bus.names import did_you_mean
from omni_bus.spec import PipelineSpec

MAX_REPLICAS = 256  # as `stages.NAME.replicas`


def group_of(deployment: Deployment, stage: str) -> str:
    """What the stage's workers are named by: its own name, or that of the process it shares. ConfigError for no stage."""
    if stage not in deployment.stages:
        raise ConfigError(f'there is no stage "{stage}"{did_you_mean(stage, deployment.stages)}')
    return deployment.stages[stage].process or stage


def groups(deployment: Deployment) -> list[str]:
    """In the pipeline's order."""
    return list(dict.fromkeys(stage.process or name for name, stage in deployment.stages.items()))


def stages_of(deployment: Deployment, group: str) -> tuple[str, ...]:
    return tuple(name for name, stage in deployment.stages.items() if (stage.process or name) == group)


def numbers_of(deployment: Deployment, group: str) -> tuple[int, ...]:
    """Of the group's workers."""
    return tuple(int(name.rpartition(".")[2]) for name in deployment.workers() if name.rpartition(".")[0] == group)


def with_numbers(deployment: Deployment, group: str, numbers: Iterable[int]) -> Deployment:
    """The same with these workers of the group, and no others."""
    said = tuple(sorted(set(numbers)))
    stages = {
        name: msgspec.structs.replace(stage, replicas=len(said)) if (stage.process or name) == group else stage
        for name, stage in deployment.stages.items()
    }
    return msgspec.structs.replace(deployment, stages=stages, numbers={**deployment.numbers, group: said})


def replicas_of(deployment: Deployment, group: str, number: int) -> tuple[StageReplica, ...]:
    """What that worker hosts, and where."""
    return tuple(
        StageReplica(name, stage.devices[number % len(stage.devices)], stage.max_batch)
        for name in stages_of(deployment, group)
        if (stage := deployment.stages[name])
    )


def free_number(deployment: Deployment, group: str, *, like: int | None = None) -> int:
    """The lowest one that no worker of the group has; `like`: one that is on the same devices as that worker."""
    taken = set(numbers_of(deployment, group))
    lists = [deployment.stages[name].devices for name in stages_of(deployment, group)]

    def alike(number: int) -> bool:
        return like is None or all(devices[number % len(devices)] == devices[like % len(devices)] for devices in lists)

    return next(number for number in itertools.count() if number not in taken and alike(number))


def no_room(deployment: Deployment, pipeline: PipelineSpec, group: str, numbers: Iterable[int]) -> str | None:
    """Why workers of these numbers cannot be started beside those that run; None where they can."""
    running = numbers_of(deployment, group)
    more = with_numbers(deployment, group, (*running, *numbers))
    before, after = plan(deployment, pipeline), plan(more, pipeline)
    if after.problems:
        return after.problems[0]
    for share in before.shares:
        then = after.share(share.worker, share.stage)
        if share.device != "cpu" and then is not None and then.state < share.state:
            return (
                f"{share.worker} has taken the memory of {share.device} for its requests already; "
                f'bound it with stages.{share.stage}.memory (such as "40GiB"), or list more devices'
            )
    known = {share.stage for share in after.shares}
    for stage in stages_of(deployment, group):
        devices = deployment.stages[stage].devices
        held = [devices[number % len(devices)] for number in (*running, *numbers)]
        doubled = next((device for device in held if device != "cpu" and held.count(device) > 1), None)
        if stage not in known and doubled is not None:
            return f"stage {stage} has a replica on {doubled} already, and what another needs is not known; list more devices"
    new = {f"{group}.{number}" for number in numbers}
    needed = sum(s.need.weights + s.need.workspace for s in after.shares if s.worker in new and s.device == "cpu")
    if needed and needed > (available := available_memory()):
        return f"it needs {bytes_text(needed)} of memory, and {bytes_text(available)} is available"
    return None


def available_memory() -> int:
    """Bytes that new processes can have without swapping, as Linux sees it."""
    for line in pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
