"""Work ahead of a turn: asked for when the turn begins and as soon as another window's features are certain, once each."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_bus.api.voice.prepare import REACH, WINDOW, Preparer

PATIENCE_S = 60.0


class Bus:
    """Prepared requests end as soon as they are asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.came = asyncio.Condition()

    async def submit(self, *, options: Any, payload: Any, tensors: Any, deadline_s: float, label: str) -> Any:
        async with self.came:
            self.asked.append(payload)
            self.came.notify_all()
        return Ended()

    async def count(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.came:
            await self.came.wait_for(lambda: len(self.asked) >= number)


class Ended:
    async def __aiter__(self) -> AsyncIterator[Any]:
        return
        yield

    async def cancel(self) -> None:
        pass


def preparer(bus: Bus, *, on: bool = True) -> Preparer:
    services = types.SimpleNamespace(bus=bus, config=types.SimpleNamespace(voice_prepare=on))
    return Preparer(
        services,  # type: ignore[arg-type]
        "test",
        lambda samples: types.SimpleNamespace(options=None, payload=samples, tensors={}),  # type: ignore[arg-type, return-value]
    )


async def test_each_window_is_shown_once_with_what_its_last_features_reach() -> None:
    bus = Bus()
    made = preparer(bus)
    for samples in (0, 1, WINDOW, WINDOW + REACH - 1):
        made.heard(samples)
    await bus.count(1)
    for number, samples in ((2, WINDOW + REACH), (3, 2 * WINDOW + REACH + 5)):
        made.heard(samples)
        await bus.count(number)
        made.heard(samples + 1)
    await made.close()
    assert bus.asked == [0, WINDOW + REACH, 2 * WINDOW + REACH]
    assert REACH >= 40, "the last frame of a window of 16 kHz audio is computed from 40 samples behind it"


@pytest.mark.parametrize("on", [True, False])
async def test_the_next_turn_begins_anew(on: bool) -> None:
    bus = Bus()
    made = preparer(bus, on=on)
    made.heard(WINDOW + REACH)
    if on:
        await bus.count(1)
    await made.close()
    made.heard(0)
    if on:
        await bus.count(2)
    await made.close()
    assert bus.asked == ([WINDOW + REACH, 0] if on else [])


async def test_a_turn_that_is_over_before_anything_was_asked_leaves_the_next_one_free() -> None:
    bus = Bus()
    made = preparer(bus)
    made.heard(0)
    made.stop()  # its task has not begun
    async with asyncio.timeout(PATIENCE_S):
        while not bus.asked:
            await asyncio.sleep(0)
            made.heard(0)
    await made.close()
    assert bus.asked == [0]
