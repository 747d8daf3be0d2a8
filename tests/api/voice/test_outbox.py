"""The way out of a session: in order, without waiting, and nobody goes on before the client has taken what there was."""

from __future__ import annotations

import asyncio

import pytest

from omni_bus.api.voice.events import ItemDeleted, SessionEvent
from omni_bus.api.voice.outbox import Outbox


async def test_events_leave_in_order_and_whoever_waits_goes_on_behind_the_last() -> None:
    gate, taken = asyncio.Semaphore(0), []

    async def sink(event: SessionEvent) -> None:
        await gate.acquire()
        taken.append(event)

    outbox = Outbox(sink)
    running = asyncio.create_task(outbox.run())
    events = [ItemDeleted(str(number)) for number in range(5)]
    for event in events:
        outbox.put(event)
    waiting = asyncio.create_task(outbox.drained())
    for _ in range(4):
        gate.release()
    for _ in range(20):
        await asyncio.sleep(0)
    assert taken == events[:4] and not waiting.done()
    gate.release()
    await asyncio.wait_for(waiting, 30)
    assert taken == events
    running.cancel()


async def test_a_sink_that_fails_ends_it_and_lets_everybody_go_on() -> None:
    async def sink(event: SessionEvent) -> None:
        raise ConnectionResetError

    outbox = Outbox(sink)
    outbox.put(ItemDeleted("a"))
    outbox.put(ItemDeleted("b"))
    waiting = asyncio.create_task(outbox.drained())
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(outbox.run(), 30)
    await asyncio.wait_for(waiting, 30)
    outbox.put(ItemDeleted("c"))
    await asyncio.wait_for(outbox.drained(), 30)


async def test_nothing_leaves_a_closed_one() -> None:
    taken = []

    async def sink(event: SessionEvent) -> None:
        taken.append(event)

    outbox = Outbox(sink)
    running = asyncio.create_task(outbox.run())
    outbox.put(ItemDeleted("a"))
    outbox.close()
    outbox.put(ItemDeleted("b"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not taken
    running.cancel()
