"""What stages will need and devices have, from file headers, configurations and the system: no tensor is read, no library asked.

A card is divided before anything is loaded: weights and workspace first, then what a stage's own keys fix, and the rest among the
other stages' KV blocks in proportion to what each could use. `omni-bus check` prints the plan, and each worker keeps to its share.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from omni_bus.deployment import Deployment
from omni_bus.devices import cuda_devices

if TYPE_CHECKING:
    from omni_bus.spec import PipelineSpec

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FILE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[KMGT]i?B)", re.IGNORECASE)
AUTO = "auto"
CONTEXT_BYTES = 768 << 20  # of a process on a card: CUDA's context, loaded kernels, cuBLAS
USABLE = 0.98  # of a card's memory: the driver's own part and fragmentation
CPU_STATE_BYTES = 4 << 30  # of KV on a CPU where nothing is said


class StageNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one replica of a stage takes, as its configuration and its keys say."""

    weights: int
    workspace: int  # activations, graphs, what is held for a while at load
    unit: str  # what requests hold: "positions" (of KV) or "slots"
    unit_bytes: int
    units: int  # as many as max_batch requests can use
    least: int  # units without which it is not worth starting
    memory: str = AUTO  # the stage's key: bytes for all of it, or "auto"
    state: int | None = None  # bytes for the units where a key of the stage fixes them


class StageShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica may use of its device."""

    stage: str
    worker: str
    device: str
    need: StageNeed
    state: int  # bytes for KV or slots


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    shares: tuple[StageShare, ...]
    problems: tuple[str, ...]  # what will not fit, with the figure that is short

    def share(self, worker: str, stage: str) -> StageShare | None:
        return next((share for share in self.shares if (share.worker, share.stage) == (worker, stage)), None)


def check_memory(said: str) -> None:
    """ValueError where a `memory` key is neither "auto" nor a size."""
    if said != AUTO and (not _SIZE.fullmatch(said) or not parse_size(said)):
        raise ValueError('memory must be "auto" or a size such as "40GiB"')


def parse_size(said: str) -> int:
    """ "40GiB" → bytes. KB, MB, GB and TB are powers of 1,000."""
    match = _SIZE.fullmatch(said)
    assert match is not None, said
    unit = match["unit"].upper()
    return int(float(match["number"]) * (1024 if "I" in unit else 1000) ** ("KMGT".index(unit[0]) + 1))


def plan(deployment: Deployment, pipeline: PipelineSpec) -> MemoryPlan:
    """Every replica's share; one that holds memory already keeps that. Stages of which nothing is known are left out."""
    needs = {} if pipeline.needs is None else pipeline.needs(deployment)
    placed: dict[str, list[tuple[str, str]]] = {}  # device → (worker, stage)
    for worker, stages in deployment.workers().items():
        replica = int(worker.rpartition(".")[2])
        for stage in stages:
            devices = deployment.stages[stage].devices
            if stage in needs:
                placed.setdefault(devices[replica % len(devices)], []).append((worker, stage))
    shares: list[StageShare] = []
    problems: list[str] = []
    process = {worker: name for name, workers in deployment.processes().items() for worker in workers}
    for device, replicas in placed.items():
        taken = CONTEXT_BYTES * len({process[worker] for worker, _ in replicas})
        buffers = _buffers(deployment, pipeline, {worker for worker, _ in replicas})
        held = [deployment.held.get(worker, {}).get(stage) for worker, stage in replicas]
        for (worker, stage), state in zip(
            replicas, _states(device, replicas, needs, held, taken + buffers, problems), strict=True
        ):
            shares.append(StageShare(stage=stage, worker=worker, device=device, need=needs[stage], state=state))
    return MemoryPlan(shares=tuple(shares), problems=tuple(problems))


def _buffers(deployment: Deployment, pipeline: PipelineSpec, workers: set[str]) -> int:
    """Bytes of a device that those workers take for what they send on cuda_ipc edges."""
    sources = {edge.source for edge in pipeline.edges if deployment.edges[edge.name].connector == "cuda_ipc"}
    senders = [worker for worker, stages in deployment.workers().items() if worker in workers and sources & {*stages}]
    return len(senders) * (deployment.bus.gpu_buffer_mb << 20)


def _states(
    device: str,
    replicas: list[tuple[str, str]],
    needs: dict[str, StageNeed],
    held: list[int | None],
    taken: int,
    problems: list[str],
) -> list[int]:
    """Bytes of KV or slots for each replica on the device. `taken`: by CUDA's contexts and by buffers."""
    rows = [needs[stage] for _, stage in replicas]
    wanted = [need.units * need.unit_bytes for need in rows]
    states = [
        has if has is not None or need.state is None else min(need.state, most)
        for has, need, most in zip(held, rows, wanted, strict=True)
    ]
    for index, need in enumerate(rows):
        if need.memory != AUTO and states[index] is None:
            room = parse_size(need.memory) - need.weights - need.workspace
            states[index] = max(0, min(wanted[index], room))
            short = need.least * need.unit_bytes - room
            if short > 0:
                problems.append(
                    f"will not fit: memory = {need.memory} of stage {replicas[index][1]} is short by {bytes_text(short)} "
                    f"(weights {bytes_text(need.weights)}, workspace {bytes_text(need.workspace)})"
                )
    if device == "cpu":
        return [min(most, CPU_STATE_BYTES) if state is None else state for state, most in zip(states, wanted, strict=True)]
    has = int(USABLE * capacity(device)) - taken
    room = has - sum(need.weights + need.workspace for need in rows) - sum(state or 0 for state in states)
    least = [0 if state is not None else need.least * need.unit_bytes for need, state in zip(rows, states, strict=True)]
    if room < sum(least):
        problems.append(
            f"will not fit: {device} has {bytes_text(max(0, has))} to use and is short by {bytes_text(sum(least) - room)}: "
            + ", ".join(
                f"{stage} wants {bytes_text(need.weights + need.workspace + (least[index] or states[index] or 0))}"
                for index, ((_, stage), need) in enumerate(zip(replicas, rows, strict=True))
            )
            + "; spread the stages over more devices, or take a smaller dtype or max_batch"
        )
    spare = max(0, room - sum(least))
    more = [0 if states[index] is not None else wanted[index] - least[index] for index in range(len(rows))]
    fraction = min(1.0, spare / max(1, sum(more)))
    return [
        least[index] + int(fraction * more[index]) if (state := states[index]) is None else state for index in range(len(rows))
    ]


def bytes_text(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def stage_weights(deployment: Deployment) -> dict[str, int]:
    """Stage → bytes of its weights in the dtype it is to have, for stages whose name begins their tensors' names in the checkpoint.

    A stage that brings its own model, or a checkpoint that is laid out otherwise, is left out: nothing is known of it.
    """
    found: dict[str, int] = {}
    for name, kind, elements in _tensors(pathlib.Path(deployment.model.path)) if deployment.model.path else ():
        stage = name.partition(".")[0]
        if stage in deployment.stages:
            size = DTYPE_BYTES[deployment.stages[stage].dtype] if kind in _FLOATS else _FILE_BYTES.get(kind, 1)
            found[stage] = found.get(stage, 0) + elements * size
    return found


def capacity(device: str) -> int:
    """Bytes of memory of "cpu" or "cuda:N"."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return cuda_devices()[int(device.removeprefix("cuda:"))].memory


def _tensors(directory: pathlib.Path) -> Iterator[tuple[str, str, int]]:
    """(name, dtype, elements) of each tensor in a directory's safetensors files: an 8-byte length, then JSON."""
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield name, tensor["dtype"], math.prod(tensor["shape"])
