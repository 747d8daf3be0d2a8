"""Until when a session has something to do for its client: while that lasts, nobody who only listens is sent away as idle."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from omni_bus.api.voice import events
from omni_bus.api.voice.items import InputImage, Item
from omni_bus.api.voice.settings import ResponseWish, Transcription
from tests.api.voice.conftest import Seen, StartSession, silence
from tests.support.scripted_bus import FOREVER, audio, text

SECOND = b"\x01\x00" * 24_000


def busy(seen: Seen) -> bool:
    """It has something to do now, and nobody can say for how long."""
    now = time.monotonic()
    return seen.session.busy_until(now) >= now


async def until_not_busy(seen: Seen) -> float:
    """An end is told a moment before the task that told it is gone."""
    async with asyncio.timeout(30):
        while busy(seen):  # noqa: ASYNC110 - no event tells a test of it
            await asyncio.sleep(0.01)
    return seen.session.busy_until(time.monotonic())


async def test_who_has_asked_for_nothing_is_idle_from_the_beginning(start: StartSession) -> None:
    began = time.monotonic()
    seen = await start()
    ready = time.monotonic()
    assert not busy(seen)
    assert began <= seen.session.busy_until(time.monotonic()) <= ready


@pytest.mark.parametrize("out_of_band", [False, True])
async def test_while_it_is_being_answered(start: StartSession, out_of_band: bool) -> None:
    go_on = asyncio.Event()
    seen = await start(settings={"speaks": False})
    seen.bus.script = (text("Hello"), go_on, text(" you", "stop"))
    seen.session.create_response(ResponseWish(settings=seen.session.settings, in_conversation=not out_of_band))
    await seen.until(events.OutputTextDelta)
    assert busy(seen)
    before = time.monotonic()
    go_on.set()
    await seen.until(events.ResponseDone)
    assert await until_not_busy(seen) >= before, "the end counts, not the beginning"


@pytest.mark.parametrize("out_of_band", [False, True])
async def test_until_the_answer_has_been_played(start: StartSession, out_of_band: bool) -> None:
    """All of it is sent at once, thirty seconds ahead: its end is told long before the user has heard it."""
    seen = await start(voice_lead_s=60)
    seen.bus.script = (text("A story", "stop"), *(audio(SECOND) for _ in range(30)), audio(b"", last=True))
    before = time.monotonic()
    seen.session.create_response(ResponseWish(settings=seen.session.settings, in_conversation=not out_of_band))
    await seen.until(events.ResponseDone)
    assert before + 29.9 <= seen.session.busy_until(time.monotonic()) <= time.monotonic() + 30.1
    if not out_of_band:
        seen.session.interrupt("client_cancelled")
        assert seen.session.busy_until(time.monotonic()) <= time.monotonic(), "what was thrown away is not played"


async def test_while_it_writes_down_what_the_user_said(start: StartSession) -> None:
    written = asyncio.Event()
    seen = await start(settings={"transcription": Transcription()})
    seen.bus.script = (written, text("Good morning.", "stop"))
    await seen.session.append_audio(silence(0.5))
    seen.session.commit_audio()
    assert busy(seen)
    await asyncio.wait_for(seen.bus.asked.wait(), 30)
    assert busy(seen)
    before = time.monotonic()
    written.set()
    await seen.until(events.InputTranscriptDone)
    assert await until_not_busy(seen) >= before


async def test_while_it_fetches_a_picture(start: StartSession) -> None:
    arrived = asyncio.Event()
    seen = await start()

    async def fetch() -> None:
        await arrived.wait()

    seen.session.add_unfetched(Item.message("user", [InputImage(b"")]), None, fetch, None)
    assert busy(seen)
    before = time.monotonic()
    arrived.set()
    await seen.until(events.ItemDone)
    assert await until_not_busy(seen) >= before


async def test_an_answer_that_is_cancelled_is_over(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (text("Hello"), FOREVER)
    settings = dataclasses.replace(seen.session.settings, speaks=False)
    seen.session.create_response(ResponseWish(settings=settings))
    await seen.until(events.OutputTextDelta)
    seen.session.cancel_response()
    await until_not_busy(seen)
