"""Whom the supervisor ends by force: a broker that does not answer, is stopped, or never begins to; an API process that never is ready."""

from __future__ import annotations

import asyncio
import pathlib
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from omni_bus.child import Child
from omni_bus.deployment import BusConfig
from omni_bus.liveness import Liveness

PATIENCE_S = 60.0
BUS = BusConfig(heartbeat_s=0.1, lost_after_s=3600.0, broker_lost_after_s=0.8, load_s=0.5)


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.fixture
async def child(tmp_path: pathlib.Path) -> AsyncIterator[Child]:
    """Sleeps, and is reaped once it is killed."""
    child = Child("api.0", tmp_path / "log", lambda child, code: None)
    child.start([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield child
    child.send_signal(signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await child.gone()


@pytest.mark.parametrize("answers", [0, 3])
async def test_a_broker_that_is_silent_is_killed(child: Child, answers: int) -> None:
    said: list[str] = []
    asked = again = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        if asked > answers:
            await for_ever()

    def anew() -> None:
        nonlocal again
        again += 1

    async with asyncio.timeout(PATIENCE_S):
        await Liveness(BUS, said.append).broker(child, ask, anew)
        await child.gone()
    assert said == ["api.0 does not answer; ending it by force"]
    assert (asked, again) == ((1, 0) if not answers else (answers + 2, 1)), (
        "half of the time later it is asked by a new connection"
    )


async def test_a_broker_that_is_stopped_is_not_waited_for(child: Child) -> None:
    """It is not even asked anew, which is done in the middle of the time that it has to answer."""
    bus = BusConfig(heartbeat_s=0.1, broker_lost_after_s=4.0)
    again = 0

    async def ask() -> None:
        if not stopped.is_set():
            child.send_signal(signal.SIGSTOP)
            stopped.set()
        else:
            await for_ever()

    def anew() -> None:
        nonlocal again
        again += 1

    stopped = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S):
        await Liveness(bus, lambda text: None).broker(child, ask, anew)
        await child.gone()
    assert again == 0


async def test_a_broker_that_answers_is_left_alone(child: Child) -> None:
    asked = 0
    often = asyncio.Event()

    async def ask() -> None:
        nonlocal asked
        asked += 1
        if asked == 5:
            often.set()
        await asyncio.sleep(0.3)  # within the limit, over several looks

    watch = asyncio.ensure_future(Liveness(BUS, lambda text: None).broker(child, ask, lambda: None))
    async with asyncio.timeout(PATIENCE_S):
        await often.wait()
    assert not watch.done() and child.alive
    watch.cancel()


async def test_a_child_that_never_is_ready_is_killed(child: Child) -> None:
    said: list[str] = []
    watch = asyncio.ensure_future(Liveness(BUS, said.append).standing_still(lambda: [child], [child]))
    async with asyncio.timeout(PATIENCE_S):
        await child.gone()
    watch.cancel()
    assert said == ["api.0 does not answer; ending it by force"]
