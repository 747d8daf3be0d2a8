"""The engine loop: blocks on its socket while no stage has work, and drains it between steps while one has."""

from __future__ import annotations

import time
from typing import Protocol

from omni_bus.workers.link import BrokerLink


class Driven(Protocol):
    """What the loop drives: the worker."""

    def message(self, frames: list[bytes]) -> None: ...
    def broker_lost(self) -> None: ...
    def has_work(self) -> bool: ...
    def wake_at(self) -> float | None:
        """When to look at `has_work` again though nothing came."""

    def step(self) -> None:
        """One step of each stage that has work."""

    def heartbeat(self) -> None: ...
    @property
    def leaving(self) -> bool: ...


class Stop(Protocol):
    """What ends the loop from outside: workers.stop_signal."""

    raised: bool

    def clear(self) -> None: ...


def run(worker: Driven, link: BrokerLink, stop: Stop, heartbeat_s: float) -> None:
    """Until the worker leaves or a signal asks for it."""
    due = time.monotonic()
    while not (worker.leaving or stop.raised):
        now = time.monotonic()
        if now >= due:
            worker.heartbeat()
            due = now + heartbeat_s
        if worker.has_work():
            link.wait(0.0)
        else:
            wake = worker.wake_at()
            link.wait((due if wake is None else min(due, wake)) - now)
        stop.clear()
        for frames in link.receive():
            worker.message(frames)
        if link.lost():
            worker.broker_lost()
        worker.step()
