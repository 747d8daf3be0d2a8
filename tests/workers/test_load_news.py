"""When a load is worth an event of its own, and that the engine loop asks soon after something happened, once, and not before."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator

import pytest
import zmq

from omni_bus import wire
from omni_bus.events import Drain, StageLoad
from omni_bus.workers import engine_loop
from omni_bus.workers.link import BrokerLink
from omni_bus.workers.load_news import LoadNews


def load(**figures: float | None) -> StageLoad:
    return StageLoad(stage="s", **{"per_step": 512, "kv_blocks_total": 160, **figures})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "now", "news"),
    [
        ({}, {}, False),
        ({}, {"steps": 9, "running": 3, "batch": 3}, False),
        ({}, {"waiting": 1}, True),
        ({"waiting": 1}, {"waiting": 5}, False),
        ({"waiting": 5}, {"waiting": 0}, True),
        ({}, {"queued": 1}, True),
        ({"queued": 100}, {"queued": 355}, False),
        ({"queued": 100}, {"queued": 356}, True),
        ({"queued": 356}, {"queued": 100}, True),
        ({"queued": 100}, {"queued": 0}, True),
        ({"kv_blocks_used": 20}, {"kv_blocks_used": 29}, False),
        ({"kv_blocks_used": 20}, {"kv_blocks_used": 30}, True),
        ({"kv_blocks_used": 30}, {"kv_blocks_used": 20}, True),
        ({}, {"busy_s": 9.0}, False),
        ({"streams": 1}, {"streams": 1, "busy_s": 0.24, "audio_s": 3.0}, False),
        ({"streams": 1}, {"streams": 1, "busy_s": 0.25}, True),
        ({}, {"lead_s": 0.1}, True),
        ({"lead_s": 0.1}, {"lead_s": 9.0}, False),
        ({"lead_s": 0.1}, {"lead_s": -0.1}, True),
        ({"lead_s": -0.1}, {"lead_s": -0.2}, False),
        ({"lead_s": -0.1}, {}, True),
        ({"kv_blocks_total": 0, "per_step": 0}, {"kv_blocks_total": 0, "per_step": 0}, False),
    ],
)
def test_what_is_news(before: dict[str, float | None], now: dict[str, float | None], news: bool) -> None:
    told = LoadNews()
    assert told.is_news((load(**before),)), "nothing was told yet"
    told.told((load(**before),))
    assert told.is_news((load(**now),)) is news
    told.told((load(**now),))
    assert not told.is_news((load(**now),))


SENT = 20


class NeverStopped:
    raised = False
    leave = False

    def clear(self) -> None: ...


class Driven:
    """A worker that has no work of its own; it leaves a while after it looked at its load behind the last message, or at `end`."""

    def __init__(self) -> None:
        self.messages = 0
        self.rounds = 0
        self.heartbeats = 0
        self.looks: list[tuple[float, int]] = []  # when, and after how many messages
        self.end = time.monotonic() + 60

    def message(self, frames: list[bytes]) -> None:
        self.messages += 1

    def broker_lost(self) -> None: ...
    def heartbeat(self) -> None:
        self.heartbeats += 1

    def leave(self) -> None: ...
    def tell_load(self) -> None:
        self.looks.append((time.monotonic(), self.messages))
        if self.messages == SENT:
            self.end = time.monotonic() + 0.3

    def has_work(self) -> bool:
        return False

    def wake_at(self) -> float | None:
        return self.end

    def step(self) -> None:
        self.rounds += 1

    def send(self) -> None: ...

    @property
    def leaving(self) -> bool:
        return time.monotonic() >= self.end


@pytest.fixture
def router(tmp_path: pathlib.Path) -> Iterator[tuple[str, zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as broker:
        broker.setsockopt(zmq.LINGER, 0)
        broker.bind(f"ipc://{tmp_path}/b")
        yield f"ipc://{tmp_path}/b", broker


def test_the_loop_looks_once_after_a_burst_and_then_sleeps(router: tuple[str, zmq.Socket[bytes]]) -> None:
    endpoint, broker = router
    read_fd, write_fd = os.pipe()
    link = BrokerLink(endpoint, "s.0", read_fd)
    worker = Driven()
    try:
        link.send(Drain())  # anything: the router knows its peer from then on
        peer, _ = broker.recv_multipart()
        for _ in range(SENT):
            broker.send_multipart([peer, wire.encode(Drain())])
        engine_loop.run(worker, link, NeverStopped(), heartbeat_s=3600.0)
    finally:
        link.close()
        os.close(read_fd)
        os.close(write_fd)
    assert worker.messages == SENT
    assert worker.looks and worker.looks[-1][1] == SENT, "the last look is behind the last message"
    assert worker.heartbeats == 1 and worker.rounds <= 2 * SENT + 5, "it blocked in between"
