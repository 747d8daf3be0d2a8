"""The engine loop on a real socket: a stage that only time wakes gets its step without any message."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator

import pytest
import zmq

from omni_bus.workers import engine_loop
from omni_bus.workers.link import BrokerLink


class NeverStopped:
    """In place of StopSignal, which would take over the test process's signals."""

    raised = False
    leave = False

    def clear(self) -> None: ...


class WokenByTime:
    """Has work from `due` on, and leaves after its step."""

    def __init__(self) -> None:
        self.due = time.monotonic() + 0.2
        self.stepped_at = 0.0
        self.idle_looks = 0
        self.leaving = False

    def message(self, frames: list[bytes]) -> None: ...
    def broker_lost(self) -> None: ...
    def heartbeat(self) -> None: ...
    def tell_load(self) -> None: ...
    def leave(self) -> None: ...

    def has_work(self) -> bool:
        return time.monotonic() >= self.due

    def wake_at(self) -> float | None:
        return self.due

    def step(self) -> None:
        if self.has_work():
            self.stepped_at = time.monotonic()
            self.leaving = True
        else:
            self.idle_looks += 1

    def send(self) -> None: ...


@pytest.fixture
def endpoint(tmp_path: pathlib.Path) -> Iterator[str]:
    """Where a ROUTER listens; it hears nothing."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as broker:
        broker.setsockopt(zmq.LINGER, 0)
        broker.bind(f"ipc://{tmp_path}/b")
        yield f"ipc://{tmp_path}/b"


@pytest.fixture
def wake_fd() -> Iterator[int]:
    wake_fd, write_fd = os.pipe()
    yield wake_fd
    os.close(wake_fd)
    os.close(write_fd)


def test_the_loop_wakes_when_a_stage_asked_for_it_and_not_before(endpoint: str, wake_fd: int) -> None:
    link = BrokerLink(endpoint, "stage.0", wake_fd)
    worker = WokenByTime()
    try:
        engine_loop.run(worker, link, NeverStopped(), heartbeat_s=3600.0)
    finally:
        link.close()
    assert worker.stepped_at >= worker.due
    assert worker.idle_looks <= 5, "it blocked in between"


def test_a_link_closes_whatever_other_sockets_its_process_holds(endpoint: str, wake_fd: int) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as other:
        other.connect(endpoint)
        BrokerLink(endpoint, "stage.0", wake_fd).close()
        other.send(b"still open")
