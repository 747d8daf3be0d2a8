"""How many events, how idle, how long: each limit refuses what is beyond it and nothing else."""

from __future__ import annotations

import asyncio
import time

import pytest

from omni_bus.api.voice.limits import BURST_S, EventRate, SessionTimer
from omni_bus.deployment import ApiConfig
from omni_bus.errors import RateLimited


def never_busy(now: float) -> float:
    return 0.0


def test_a_rate_lets_a_burst_pass_and_then_only_so_many() -> None:
    rate = EventRate(10, 0.0)
    for _ in range(int(10 * BURST_S)):
        rate.count(0.0)
    with pytest.raises(RateLimited) as refused:
        rate.count(0.0)
    assert refused.value.code == "too_many_events"
    steady = EventRate(10, 0.0)
    for number in range(1000):
        steady.count(number / 10)


def test_a_rate_of_none_lets_all_pass() -> None:
    rate = EventRate(0, 0.0)
    for _ in range(10_000):
        rate.count(0.0)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (ApiConfig(session_idle_s=0.05, session_s=60.0), "session_idle"),
        (ApiConfig(session_idle_s=60.0, session_s=0.05), "session_expired"),
    ],
    ids=["idle", "over"],
)
async def test_a_session_ends_once(config: ApiConfig, code: str) -> None:
    ended: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    timer = SessionTimer(config, never_busy, lambda code, text: ended.put_nowait((code, text)))
    said, _ = await asyncio.wait_for(ended.get(), 30)
    assert said == code
    timer.stop()
    await asyncio.sleep(0.1)
    assert ended.empty()


async def test_a_client_that_speaks_is_not_idle() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    began = loop.time()
    timer = SessionTimer(ApiConfig(session_idle_s=0.2, session_s=60.0), never_busy, lambda code, text: ended.set())
    for _ in range(10):
        timer.heard()
        last = loop.time()
        await asyncio.sleep(0.05)
        if ended.is_set():  # only on a machine that stood still for so long
            break
    await asyncio.wait_for(ended.wait(), 30)
    assert loop.time() - last >= 0.19
    assert loop.time() - began > 0.2


async def test_a_session_that_has_something_to_do_is_not_idle_until_it_has_done_it() -> None:
    """Asked four times it is busy: each time the timer waits on; then what is said of the past counts."""
    ended = asyncio.Event()
    asked: list[float] = []

    def busy_until(now: float) -> float:
        asked.append(now)
        return now if len(asked) < 5 else asked[3] + 0.1

    timer = SessionTimer(ApiConfig(session_idle_s=0.2, session_s=60.0), busy_until, lambda code, text: ended.set())
    await asyncio.wait_for(ended.wait(), 30)
    assert len(asked) >= 5 and time.monotonic() - (asked[3] + 0.1) >= 0.19
    timer.stop()


async def test_a_session_that_is_never_done_is_over_all_the_same() -> None:
    said: list[str] = []
    over = asyncio.Event()

    def ended(code: str, text: str) -> None:
        said.append(code)
        over.set()

    timer = SessionTimer(ApiConfig(session_idle_s=0.05, session_s=0.3), lambda now: now + 1000, ended)
    await asyncio.wait_for(over.wait(), 30)
    assert said == ["session_expired"]
    timer.stop()
