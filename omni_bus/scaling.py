"""Which workers a deployment has once a running server is scaled, and why one more cannot be. Asks the memory plan; starts nothing."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable

import msgspec

from omni_bus.deployment import Deployment
from omni_bus.errors import ConfigError
from omni_bus.events import StageReplica
from omni_bus.memory import MemoryPlan, bytes_text, plan
from omni_bus.names import did_you_mean
from omni_bus.spec import PipelineSpec

MAX_REPLICAS = 256  # as `stages.NAME.replicas`


def group_of(deployment: Deployment, stage: str) -> str:
    """What the stage's processes are named by: its own name, or that of the process it shares. ConfigError for no stage."""
    if stage not in deployment.stages:
        raise ConfigError(f'there is no stage "{stage}"{did_you_mean(stage, deployment.stages)}')
    return deployment.stages[stage].process or stage


def groups(deployment: Deployment) -> list[str]:
    """In the pipeline's order."""
    return list(dict.fromkeys(stage.process or name for name, stage in deployment.stages.items()))


def stages_of(deployment: Deployment, group: str) -> tuple[str, ...]:
    return tuple(name for name, stage in deployment.stages.items() if (stage.process or name) == group)


def numbers_of(deployment: Deployment, group: str) -> tuple[int, ...]:
    """Of the group's processes."""
    return tuple(int(name.rpartition(".")[2]) for name in deployment.processes() if name.rpartition(".")[0] == group)


def with_numbers(deployment: Deployment, group: str, numbers: Iterable[int]) -> Deployment:
    """The same with these processes of the group, and no others."""
    said = tuple(sorted(set(numbers)))
    stages = {
        name: msgspec.structs.replace(stage, replicas=len(said)) if (stage.process or name) == group else stage
        for name, stage in deployment.stages.items()
    }
    there = msgspec.structs.replace(deployment, stages=stages, numbers={**deployment.numbers, group: said})
    workers = there.workers()
    return msgspec.structs.replace(there, held={worker: kept for worker, kept in deployment.held.items() if worker in workers})


def with_held(deployment: Deployment, pipeline: PipelineSpec, *, anew: str = "") -> Deployment:
    """The same, with what each worker takes of its GPU written down: a process that starts keeps to that, whatever came or went before.

    Workers that hold memory already keep it, and the others divide the rest; `anew`: a worker that has ended, and has let go of its.
    """
    before = {worker: kept for worker, kept in deployment.held.items() if worker != anew}
    held: dict[str, dict[str, int]] = {}
    for share in plan(msgspec.structs.replace(deployment, held=before), pipeline).shares:
        if share.device != "cpu":
            held.setdefault(share.worker, {})[share.stage] = share.state
    return msgspec.structs.replace(deployment, held=held)


def replicas_of(deployment: Deployment, process: str) -> dict[str, tuple[StageReplica, ...]]:
    """Each worker of that process: what it hosts, and where."""
    number = int(process.rpartition(".")[2])
    return {
        worker: tuple(
            StageReplica(name, stage.devices[number % len(stage.devices)], stage.max_batch)
            for name in stages
            if (stage := deployment.stages[name])
        )
        for worker, stages in deployment.processes()[process].items()
    }


def free_number(deployment: Deployment, group: str, *, like: int | None = None) -> int:
    """The lowest one that no process of the group has; `like`: one that is on the same devices as that process."""
    taken = set(numbers_of(deployment, group))
    lists = [deployment.stages[name].devices for name in stages_of(deployment, group)]

    def alike(number: int) -> bool:
        return like is None or all(devices[number % len(devices)] == devices[like % len(devices)] for devices in lists)

    return next(number for number in itertools.count() if number not in taken and alike(number))


def no_room(
    deployment: Deployment, pipeline: PipelineSpec, group: str, numbers: Iterable[int], *, like: int | None = None
) -> str | None:
    """Why processes of these numbers cannot be started beside those that run; None where they can.

    `like`: they are to have no less memory for requests than that process of the group.
    """
    deployment = with_held(deployment, pipeline)
    numbers, running = tuple(numbers), numbers_of(deployment, group)
    more = with_numbers(deployment, group, (*running, *numbers))
    processes = more.processes()
    new = {worker for number in numbers for worker in processes[f"{group}.{number}"]}
    old = processes.get(f"{group}.{like}", {})
    after = plan(more, pipeline)
    if after.problems:
        return _taken(more, pipeline, after, new) or after.problems[0]
    for share in after.shares:
        kept = next((one for worker in old if (one := after.share(worker, share.stage)) is not None), None)
        if share.worker in new and kept is not None and share.state < kept.state:
            return (
                f"{share.device} has {bytes_text(share.state)} left for the requests of one more, and {kept.worker} has "
                f"{bytes_text(kept.state)}"
            )
    known = {share.stage for share in after.shares}
    for stage in stages_of(deployment, group):
        devices = deployment.stages[stage].devices
        held = [devices[number % len(devices)] for number in (*running, *numbers)]
        doubled = next((device for device in held if device != "cpu" and held.count(device) > 1), None)
        if stage not in known and doubled is not None:
            return f"stage {stage} has a replica on {doubled} already, and what another needs is not known; list more devices"
    needed = sum(s.need.weights + s.need.workspace for s in after.shares if s.worker in new and s.device == "cpu")
    if needed and needed > (available := available_memory()):
        return f"it needs {bytes_text(needed)} of memory, and {bytes_text(available)} is available"
    return None


def _taken(deployment: Deployment, pipeline: PipelineSpec, after: MemoryPlan, new: set[str]) -> str | None:
    """Who has the memory that `new` workers lack, where it is another worker's share that could have been smaller."""
    shared = plan(msgspec.structs.replace(deployment, held={}), pipeline)
    devices = {share.device for share in after.shares if share.worker in new}
    more = {
        share: share.state - then.state
        for share in after.shares
        if share.device in devices and (then := shared.share(share.worker, share.stage)) is not None
    }
    most = max(more, key=lambda share: more[share], default=None)
    if shared.problems or most is None or more[most] <= 0:
        return None
    return (
        f"{most.worker} has taken the memory of {most.device} for its requests already; "
        f'bound it with stages.{most.stage}.memory (such as "40GiB"), or list more devices'
    )


def available_memory() -> int:
    """Bytes that new processes can have without swapping, as Linux sees it."""
    for line in pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
