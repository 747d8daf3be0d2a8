"""How many requests and sessions a client may have: counted in one place, given back in every way, and known to the next broker."""

from __future__ import annotations

import asyncio

import pytest

from omni_bus import events
from omni_bus.client_leases import ClientLeases
from omni_bus.deployment import ApiConfig
from omni_bus.errors import BrokerLost, Overloaded, ProtocolViolation, RateLimited
from omni_bus.events import REQUEST, SESSION, Lease
from omni_bus.leases import Leases
from omni_bus.orchestrator import Orchestrator
from tests.support.bus_script import PIPELINE, deployment

ONE, OTHER = b"api.0", b"api.1"


def test_sessions_of_the_server_and_of_one_client_over_all_processes() -> None:
    leases = Leases(ApiConfig(max_sessions=3, max_sessions_per_client=2))
    leases.take(ONE, Lease(1, SESSION, "ada"))
    leases.take(OTHER, Lease(1, SESSION, "ada"))
    with pytest.raises(RateLimited, match="may have 2 sessions open") as refused:
        leases.take(OTHER, Lease(2, SESSION, "ada"))
    assert (refused.value.code, refused.value.status) == ("too_many_sessions", 429)
    leases.take(OTHER, Lease(3, SESSION, "bob"))
    with pytest.raises(Overloaded):
        leases.take(ONE, Lease(4, SESSION, "eve"))
    leases.take(ONE, Lease(5, REQUEST, "eve"))
    assert len(leases) == 4
    leases.release_all(OTHER)
    assert len(leases) == 2
    leases.take(ONE, Lease(6, SESSION, "ada"))


def test_requests_of_one_client() -> None:
    leases = Leases(ApiConfig(max_requests_per_client=1))
    leases.take(ONE, Lease(1, REQUEST, "ada"))
    with pytest.raises(RateLimited, match="may have 1 request in flight") as refused:
        leases.take(ONE, Lease(2, REQUEST, "ada"))
    assert (refused.value.code, refused.value.status) == ("rate_limit_exceeded", 429)
    leases.take(ONE, Lease(2, REQUEST, "bob"))
    leases.release(ONE, 1)
    leases.take(ONE, Lease(3, REQUEST, "ada"))


def test_no_limit_is_none() -> None:
    leases = Leases(ApiConfig(max_sessions=0, max_sessions_per_client=0, max_requests_per_client=0))
    for number in range(100):
        leases.take(ONE, Lease(2 * number, SESSION, "a"))
        leases.take(ONE, Lease(2 * number + 1, REQUEST, "a"))


def test_what_another_broker_had_granted_is_not_refused_by_the_next() -> None:
    leases = Leases(ApiConfig(max_sessions_per_client=1))
    for number in range(3):
        leases.take(ONE, Lease(number, SESSION, "ada", renewed=True))
    with pytest.raises(RateLimited):
        leases.take(ONE, Lease(9, SESSION, "ada"))


def test_nothing_is_kept_of_leases_that_have_ended() -> None:
    leases = Leases(ApiConfig(max_sessions=1))
    leases.take(ONE, Lease(1, SESSION, "ada"))
    with pytest.raises(Overloaded):
        leases.take(OTHER, Lease(1, SESSION, "bob"))
    leases.release(OTHER, 1)
    leases.release(ONE, 99)
    leases.release(ONE, 1)
    leases.release(ONE, 1)
    assert (leases._held, leases._in_all, leases._of_client) == ({}, {}, {})


def test_a_process_that_breaks_the_rules_is_told() -> None:
    leases = Leases(ApiConfig())
    leases.take(ONE, Lease(1, SESSION, "ada"))
    for wrong in (Lease(1, SESSION, "ada"), Lease(2, "house", "ada")):
        with pytest.raises(ProtocolViolation):
            leases.take(ONE, wrong)


def test_the_broker_grants_refuses_and_forgets_with_the_connection() -> None:
    plan = deployment()
    orchestrator = Orchestrator(
        PIPELINE, type(plan)(**{**_fields(plan), "api": ApiConfig(max_sessions=1)}), log=lambda _: None, now=0.0
    )
    for peer in (ONE, OTHER):
        orchestrator.handle(peer, events.Hello("client"), (), 0.0)
    assert orchestrator.handle(ONE, Lease(7, SESSION, "ada"), (), 0.0) == [(ONE, events.Leased(7), ())]
    [(peer, refused, _)] = orchestrator.handle(OTHER, Lease(7, SESSION, "bob"), (), 0.0)
    assert peer == OTHER and isinstance(refused, events.LeaseRefused)
    assert (refused.lease, refused.error.code) == (7, "overloaded")
    orchestrator.unreachable(ONE, 0.0)
    assert orchestrator.handle(OTHER, Lease(8, SESSION, "bob"), (), 0.0) == [(OTHER, events.Leased(8), ())]
    assert orchestrator.handle(OTHER, events.Release(8), (), 0.0) == []
    assert orchestrator.handle(OTHER, Lease(9, SESSION, "bob", renewed=True), (), 0.0) == []


def _fields(plan: object) -> dict[str, object]:
    return {name: getattr(plan, name) for name in type(plan).__struct_fields__}  # type: ignore[attr-defined]


# ---- in the process that asks


async def test_a_lease_is_asked_for_held_renewed_and_given_back() -> None:
    sent: list[events.Event] = []
    leases = ClientLeases(sent.append)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def session() -> None:
        async with leases.one(SESSION, "ada"):
            entered.set()
            await leave.wait()

    async with asyncio.timeout(20):
        running = asyncio.create_task(session())
        await asyncio.sleep(0)
        leases.renew()
        assert sent == [Lease(1, SESSION, "ada")], "what was not granted is not renewed"
        leases.answered(events.Leased(1))
        await entered.wait()
        leases.broker_lost(BrokerLost("gone"))
        leases.renew()
        assert sent[1:] == [Lease(1, SESSION, "ada", renewed=True)]
        leave.set()
        await running
    assert sent[2:] == [events.Release(1)]
    leases.renew()
    assert len(sent) == 3


@pytest.mark.parametrize("how", ["refused", "broker lost", "cancelled"])
async def test_a_lease_that_is_not_granted_leaves_nothing(how: str) -> None:
    sent: list[events.Event] = []
    leases = ClientLeases(sent.append)

    async def session() -> None:
        async with leases.one(SESSION, "ada"):
            raise AssertionError("it was not granted")

    async with asyncio.timeout(20):
        running = asyncio.create_task(session())
        await asyncio.sleep(0)
        error = {"refused": Overloaded, "broker lost": BrokerLost, "cancelled": asyncio.CancelledError}[how]
        match how:
            case "refused":
                leases.answered(events.LeaseRefused(1, Overloaded("full").info()))
            case "broker lost":
                leases.broker_lost(BrokerLost("gone"))
            case "cancelled":
                running.cancel()
        with pytest.raises(error):
            await running
    assert sent == [Lease(1, SESSION, "ada"), events.Release(1)]
    leases.answered(events.Leased(1))  # too late for the one that was cancelled
    leases.renew()
    assert len(sent) == 2
