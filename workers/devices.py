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
    """Torch's intra-op threads for the process that hosts `stages`: the most that one of them asks for."""
    asked = max(deployment.stages[stage].threads for stage in stages)
    return asked or max(1, usable_cores() // len(deployment.workers()))
