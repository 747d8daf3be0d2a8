"""The engine loop: blocks on its socket while no stage has work, and drains it between steps while one has."""

from __future__ import annotations

import math
import time
from typing import Protocol

from omni_bus.workers.link import BrokerLink
from omni_bus.workers.load_news import LOOK_S
from omni_bus.workers.watchdog import Watchdog


class Driven(Protocol):
    """What the loop drives: the worker."""

    def message(self, frames: list[bytes]) -> None: ...
    def broker_lost(self) -> None: ...
    def has_work(self) -> bool: ...
    def wake_at(self) -> float | None:
        """When to look at `has_work` again though nothing came."""

    def step(self) -> None:
        """One step of each stage that has work."""

    def send(self) -> None:
        """Send what the step gave. Stages may begin their next one before."""

    def heartbeat(self) -> None: ...
    def tell_load(self) -> None:
        """A heartbeat ahead of its time, if the load is news."""

    def leave(self) -> None:
        """Ask to go; may be called again and again."""

    @property
    def leaving(self) -> bool: ...


class Stop(Protocol):
    """What ends the loop from outside: workers.stop_signal."""

    raised: bool
    leave: bool  # the end is wanted once all that runs has finished

    def clear(self) -> None: ...


def run(worker: Driven, link: BrokerLink, stop: Stop, heartbeat_s: float, step_s: float = 0.0) -> None:
    """Until the worker leaves or a signal asks for it. A step of more than `step_s` seconds hangs and ends the process; 0: none does."""
    # Set with each heartbeat, which may be that long before the step begins. It stays set behind the loop: an end may hang as well.
    watchdog = Watchdog(step_s + heartbeat_s if step_s else 0.0)
    due = time.monotonic()
    look = math.inf  # when the load is to be looked at: soon after something happened
    while not (worker.leaving or stop.raised):
        now = time.monotonic()
        if now >= due:
            watchdog.looked()
            worker.heartbeat()
            due, look = now + heartbeat_s, math.inf
        elif now >= look:
            worker.tell_load()
            look = math.inf
        happened = worker.has_work()
        if happened:
            link.wait(0.0)
        else:
            wake = worker.wake_at()
            link.wait(min(due, look, math.inf if wake is None else wake) - now)
        stop.clear()
        if stop.leave:
            worker.leave()
        for frames in link.receive():
            worker.message(frames)
            happened = True
        if link.lost():
            worker.broker_lost()
        worker.step()
        for frames in link.receive():  # what came meanwhile has a say in what is begun next
            worker.message(frames)
            happened = True
        worker.send()
        if happened:
            look = min(look, time.monotonic() + LOOK_S)
