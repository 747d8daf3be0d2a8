"""Chunks that wait for their tensors: in order, not for ever, and not beyond the end of their request."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from omni_bus.connectors.base import Frame
from omni_bus.connectors.select import Connectors
from omni_bus.errors import StaleTensor
from omni_bus.events import Chunk, EdgeRoute, TensorRef
from omni_bus.keys import KeyPair
from omni_bus.workers.arrivals import Arrivals
from tests.support.data_sockets import arrive, tcp_connector

LARGE = 100_000  # bytes: not inline


class Pair:
    """A sender, a receiver, and what was delivered there: each chunk's number with its tensor's value, or the error."""

    def __init__(self) -> None:
        keys = KeyPair.new()
        self.sender = Connectors("arrive", tcp=tcp_connector(keys))
        self.receiver = Connectors("arrive", tcp=tcp_connector(keys))
        self.delivered: list[tuple[int, int | str]] = []
        self.route = EdgeRoute("a->b", "tcp", 8, self.receiver.tcp.endpoint)

    def put(self, value: int, size: int = LARGE) -> tuple[TensorRef, ...]:
        parcel = self.sender.put(self.route, b"", {"x": torch.full((size,), value, dtype=torch.uint8)})
        assert parcel is not None
        self.frames = parcel.frames
        return parcel.refs

    def deliver(self, event: Chunk, frames: object) -> None:
        try:
            said: int | str = int(self.receiver.get(event.refs, self.frames)["x"][0]) if event.refs else "nothing"
        except StaleTensor:
            said = "stale"
        self.delivered.append((event.seq, said))


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.sender.close()
    pair.receiver.close()


FRAMES: list[Frame] = [b""]


def chunk(seq: int, refs: tuple[TensorRef, ...] = (), request: int = 1) -> Chunk:
    return Chunk(request, "a->b", seq, False, refs)


def test_a_chunk_waits_for_its_tensor_and_those_behind_it_wait_with_it(pair: Pair) -> None:
    arrivals = Arrivals(pair.receiver, pair.deliver)
    refs = pair.put(7)
    arrivals.chunk(chunk(0, refs), FRAMES)
    arrivals.chunk(chunk(1), FRAMES)
    arrivals.chunk(chunk(0, request=2), FRAMES)  # another request's does not
    assert pair.delivered == [(0, "nothing")] and arrivals.held == 2
    arrivals.advance()
    assert arrivals.held == 2 and arrivals.wake_at() is not None
    arrive(pair.receiver, refs)
    arrivals.advance()
    assert pair.delivered[1:] == [(0, 7), (1, "nothing")]
    assert arrivals.held == 0 and arrivals.wake_at() is None


def test_a_tensor_that_came_first_is_not_waited_for(pair: Pair) -> None:
    arrivals = Arrivals(pair.receiver, pair.deliver)
    refs = pair.put(3)
    arrive(pair.receiver, refs)
    arrivals.chunk(chunk(0, refs), FRAMES)
    assert pair.delivered == [(0, 3)]


def test_an_overdue_chunk_is_delivered_without_its_tensor(pair: Pair) -> None:
    arrivals = Arrivals(pair.receiver, pair.deliver, wait_s=0.0)
    arrivals.chunk(chunk(0, pair.put(3)), FRAMES)
    arrivals.chunk(chunk(1), FRAMES)
    arrivals.advance()
    assert pair.delivered == [(0, "stale"), (1, "nothing")]


def test_a_sender_that_still_sends_is_waited_for(pair: Pair) -> None:
    arrivals = Arrivals(pair.receiver, pair.deliver, wait_s=1000.0)
    lost = tuple(msgspec.structs.replace(ref, generation=ref.generation + 1000) for ref in pair.put(1))
    arrivals.chunk(chunk(0, lost), FRAMES)
    first = arrivals.wake_at()
    arrive(pair.receiver, pair.put(2))
    second = arrivals.wake_at()
    assert first is not None and second is not None and second > first
    arrivals.advance()
    assert pair.delivered == []


def test_the_end_of_a_request_forgets_its_chunks(pair: Pair) -> None:
    arrivals = Arrivals(pair.receiver, pair.deliver)
    kept = pair.put(5)
    arrivals.chunk(chunk(0, pair.put(3)), FRAMES)
    arrivals.chunk(chunk(0, kept, request=2), FRAMES)
    arrivals.forget(1, ["a->b", "c->b"])
    assert arrivals.held == 1
    arrive(pair.receiver, kept)
    arrivals.advance()
    assert pair.delivered == [(0, 5)]
