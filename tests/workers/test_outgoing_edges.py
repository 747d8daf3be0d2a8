"""Outgoing edges with a real pool of shared memory: order, credits and room, over all requests of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from omni_bus import events
from omni_bus.connectors.base import Frame
from omni_bus.connectors.select import Connectors
from omni_bus.errors import ProtocolViolation, StageFailed
from omni_bus.events import EdgeRoute
from omni_bus.segments import SHM
from omni_bus.stages.probe.spec import ProbeWord
from omni_bus.workers.outgoing import Outgoing

torch.set_num_threads(1)
MIB = 1 << 20
EDGE = "source->relay"


class Wire:
    """An Outgoing, and what it has sent."""

    def __init__(self) -> None:
        self.connectors = Connectors("wire", segment_bytes=MIB, limit=2 * MIB)
        self.sent: list[events.Chunk] = []
        self.outgoing = Outgoing(self.connectors, self._send)

    def _send(self, event: events.Event, frames: Sequence[Frame]) -> None:
        assert isinstance(event, events.Chunk)
        self.sent.append(event)

    def open(self, request: int, credits: int = 8) -> None:
        self.outgoing.open(request, [EdgeRoute(EDGE, "shm", credits)])

    def put(self, request: int, nbytes: int, last: bool = False) -> None:
        self.outgoing.put(request, EDGE, ProbeWord("w"), {"data": torch.zeros(nbytes, dtype=torch.uint8)}, last)

    def order(self) -> list[tuple[int, int]]:
        return [(chunk.request, chunk.seq) for chunk in self.sent]


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.connectors.close()
    assert not list(SHM.glob("omnibus-wire-*"))


def test_a_large_tensor_that_waits_for_room_is_not_overtaken_by_small_ones(wire: Wire) -> None:
    for request in (1, 2, 3):
        wire.open(request)
    for _ in range(4):
        wire.put(1, 400_000)
    wire.put(2, 1_500_000)  # waits for nearly the whole pool
    wire.put(3, 100_000)  # would find room now, and so would all that follow it
    assert wire.order() == [(1, 0), (1, 1), (1, 2), (1, 3)]
    wire.put(3, 100)  # behind its edge's first chunk
    wire.outgoing.credit(1, EDGE, 1)
    assert wire.outgoing.retry() == {}
    wire.outgoing.credit(1, EDGE, 3)
    assert list(wire.outgoing.retry()) == [(2, EDGE), (3, EDGE)]
    assert wire.order()[4:] == [(2, 0), (3, 0), (3, 1)]
    for request in (1, 2, 3):
        wire.outgoing.drop(request, [EDGE])
    assert (wire.outgoing.held, wire.connectors.used) == (0, 0)


def test_an_edge_that_is_dropped_while_it_waits_lets_the_next_one_through(wire: Wire) -> None:
    for request in (1, 2, 3):
        wire.open(request)
    for _ in range(4):
        wire.put(1, 400_000)
    wire.put(2, 1_500_000)
    wire.put(3, 500_000)
    wire.outgoing.drop(2, [EDGE])
    wire.outgoing.credit(1, EDGE, 2)
    wire.outgoing.retry()
    assert wire.order()[4:] == [(3, 0)]


def test_what_a_stage_may_not_emit_is_named(wire: Wire) -> None:
    wire.open(1)
    wire.put(1, 1, last=True)
    with pytest.raises(StageFailed):
        wire.put(1, 1)
    with pytest.raises(StageFailed):
        wire.put(2, 1)
    for count in (0, -1, 2):
        with pytest.raises(ProtocolViolation):
            wire.outgoing.credit(1, EDGE, count)


def test_random_traffic_keeps_order_and_credits_and_leaves_nothing(wire: Wire) -> None:
    dice = random.Random(11)
    credits = 5
    for _ in range(6):
        consumed = dict.fromkeys(range(6), 0)
        wire.sent.clear()
        for request in consumed:
            wire.open(request, credits)
        for _ in range(200):
            request = dice.randrange(6)
            sent = sum(chunk.request == request for chunk in wire.sent)
            if dice.random() < 0.6:
                wire.put(request, dice.choice([10, 100_000, 300_000, 900_000]))
            elif sent > consumed[request]:
                count = dice.randint(1, sent - consumed[request])
                consumed[request] += count
                wire.outgoing.credit(request, EDGE, count)
                wire.outgoing.retry()
        for request in consumed:
            seqs = [chunk.seq for chunk in wire.sent if chunk.request == request]
            assert seqs == list(range(len(seqs)))
            assert len(seqs) - consumed[request] <= credits
            wire.outgoing.drop(request, [EDGE])
        wire.outgoing.retry()
        assert (wire.outgoing.held, wire.connectors.used) == (0, 0)
