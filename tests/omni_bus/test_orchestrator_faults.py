"""Faults of the broker's own code and lack of memory: they end what they met, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from omni_bus import events
from omni_bus.errors import Overloaded
from tests.support.bus_script import Bus, error_of
from tests.support.bus_script import deployment as plan

OPEN = """
    > c submit 1 text
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0 last
"""
OTHER = """
    > c submit 2 text
    < source.0 open 2 source
    < source.0 chunk 2 client->source 0 last
    > source.0 chunk 2 source->client 0
    < c delta 2 source->client 0
    > c cancel 2
    < source.0 cancel 2 source
    > source.0 cancelled 2 source
    < c cancelled 2
"""


def once(error: Exception, then: Callable[..., Any]) -> Callable[..., Any]:
    """A method that raises the first time."""
    raised: list[Exception] = []

    def method(*args: Any) -> Any:
        if not raised:
            raised.append(error)
            raise error
        return then(*args)

    return method


@pytest.mark.parametrize(
    ("error", "code", "status"), [(KeyError("x"), "internal_error", 500), (MemoryError(), "out_of_memory", 503)]
)
def test_what_fails_on_a_chunk_ends_that_request_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, status: int
) -> None:
    bus = Bus()
    bus.run(OPEN, empty=False)
    flow = bus.orchestrator.lifecycle.flow
    monkeypatch.setattr(flow, "chunk", once(error, flow.chunk))
    told = bus.handle("source.0", events.Chunk(bus.request_id(1), "source->client", 0, False), (b"payload",))
    assert [peer for peer, _, _ in told] == [b"c", b"source.0"]
    assert (error_of(told[0]).code, error_of(told[0]).status) == (code, status)
    assert isinstance(told[1][1], events.Cancel)
    assert "KeyError" not in error_of(told[0]).message and type(error).__name__ in "".join(bus.log)
    bus.run("> source.0 cancelled 1 source", empty=True)
    bus.run(OTHER)


@pytest.mark.parametrize("method", ["input", "consumed_by_client"])
def test_what_fails_on_a_clients_event_ends_that_request(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    bus = Bus()
    flow = bus.orchestrator.lifecycle.flow
    monkeypatch.setattr(flow, method, once(RuntimeError("broken"), getattr(flow, method)))
    if method == "input":
        bus.run(
            "> c submit 1 text\n< source.0 open 1 source\n< c failed 1 internal_error\n< source.0 cancel 1 source", empty=False
        )
    else:
        bus.run(OPEN, empty=False)
        bus.run("> c credit 1 source->client 1\n< c failed 1 internal_error\n< source.0 cancel 1 source", empty=False)
    bus.run("> source.0 cancelled 1 source")
    bus.run(OTHER)


def test_a_request_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus()
    lifecycle = bus.orchestrator.lifecycle
    monkeypatch.setattr(lifecycle, "_turn", once(RuntimeError("broken"), lifecycle._turn))
    bus.run("> c submit 1 text\n< c failed 1 internal_error")
    bus.run("> c submit 2 text\n< source.0 open 1 source\n< source.0 chunk 1 client->source 0 last", empty=False)


def test_what_fails_on_a_workers_own_event_costs_that_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to go, and starts anew: what it had said would else be missing for ever."""
    bus = Bus(plan(replicas={"source": 2}))
    registry = bus.orchestrator.registry
    monkeypatch.setattr(registry, "heartbeat", once(RuntimeError("broken"), registry.heartbeat))
    bus.run("> source.0 heartbeat\n< source.0 shutdown")
    assert any("worker source.0 is lost: its Heartbeat could not be handled" in line for line in bus.log)
    bus.run("> c submit 1 text\n< source.1 open 1 source\n< source.1 chunk 1 client->source 0 last", empty=False)


def test_a_lease_that_cannot_be_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus()
    leases = bus.orchestrator._leases
    monkeypatch.setattr(leases, "take", once(RuntimeError("broken"), leases.take))
    [(peer, event, _)] = bus.handle("c", events.Lease(7, "request", "somebody"))
    assert peer == b"c" and isinstance(event, events.LeaseRefused) and event.lease == 7
    assert event.error.code == "internal_error" != Overloaded.code


def test_a_request_that_cannot_be_ended_ends_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus()
    bus.run(OPEN, empty=False)
    lifecycle = bus.orchestrator.lifecycle
    monkeypatch.setattr(lifecycle.flow, "chunk", once(RuntimeError("broken"), lifecycle.flow.chunk))
    monkeypatch.setattr(lifecycle, "_let_go", once(RuntimeError("broken, too"), lifecycle._let_go))
    with pytest.raises(RuntimeError, match="broken, too"):
        bus.handle("source.0", events.Chunk(bus.request_id(1), "source->client", 0, False), (b"payload",))
