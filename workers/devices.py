"""Which device and how many threads a stage gets."""

from __future__ import annotations

from omni_bus.deployment import Deployment
from omni_bus.devices import missing_device, usable_cores
from omni_bus.errors import DeviceUnavailable


def device_of(deployment: Deployment, stage: str, replica: int) -> str:
    """`cpu` or `cuda:N`: replicas go round the stage's `devices`. Raises DeviceUnavailable for one that is not here."""
    devices = deployment.stages[stage].devices
    device = devices[replica % len(devices)]
    problem = missing_device(device)
    if problem is not None:
        raise DeviceUnavailable(f"[stages.{stage}] devices: {problem}")
    return device


def threads_of(deployment: Deployment, stages: tuple[str, ...]) -> int:
    """Torch's intra-op threads for the process that hosts `stages`: the most that one of them asks for, else its part of the cores.
    One where all run on GPUs: all that their host does is copying, and a copy that is split waits for the slowest thread's next turn
    on a core."""
    asked = max(deployment.stages[stage].threads for stage in stages)
    if asked:
        return asked
    if all(device != "cpu" for stage in stages for device in deployment.stages[stage].devices):
        return 1
    return max(1, usable_cores() // len(deployment.workers()))
