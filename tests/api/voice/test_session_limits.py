"""How many events, how idle, how long: each limit refuses what is beyond it and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from omni_bus.api.voice.limits import BURST_S, EventRate, SessionTimer
from omni_bus.deployment import ApiConfig
from omni_bus.errors import RateLimited


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
    timer = SessionTimer(config, lambda code, text: ended.put_nowait((code, text)))
    said, _ = await asyncio.wait_for(ended.get(), 30)
    assert said == code
    timer.stop()
    await asyncio.sleep(0.1)
    assert ended.empty()


async def test_a_client_that_speaks_is_not_idle() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    began = loop.time()
    timer = SessionTimer(ApiConfig(session_idle_s=0.2, session_s=60.0), lambda code, text: ended.set())
    for _ in range(10):
        timer.heard()
        last = loop.time()
        await asyncio.sleep(0.05)
        if ended.is_set():  # only on a machine that stood still for so long
            break
    await asyncio.wait_for(ended.wait(), 30)
    assert loop.time() - last >= 0.19
    assert loop.time() - began > 0.2
