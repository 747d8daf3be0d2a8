"""`api.deadline_s` of a response: what the stages or a client are late with ends it, what is held back for the ear does not."""

from __future__ import annotations

import asyncio

from omni_bus.api.voice import events
from omni_bus.api.voice.settings import ResponseWish
from tests.api.voice.conftest import Seen, StartSession
from tests.support.scripted_bus import FOREVER, audio, text

DEADLINE_S = 1.5
SECOND = b"\x01\x00" * 24_000


async def answered(seen: Seen) -> events.ResponseState:
    seen.session.create_response(ResponseWish(settings=seen.session.settings))
    return (await seen.until(events.ResponseDone)).response


def is_late(response: events.ResponseState) -> bool:
    return response.status == "failed" and response.error is not None and response.error.code == "deadline_exceeded"


async def test_an_answer_may_be_spoken_for_longer_than_the_deadline(start: StartSession) -> None:
    seen = await start(deadline_s=DEADLINE_S, voice_lead_s=0.2)
    seen.bus.script = (text("A story", "stop"), *(audio(SECOND) for _ in range(3)), audio(b"", last=True))
    assert (await answered(seen)).status == "completed"
    assert len(b"".join(event.data for event in seen.of(events.OutputAudioDelta))) == 3 * len(SECOND)
    assert seen.bus.submissions[0].deadline_s > DEADLINE_S, "the broker must not end it first"


async def test_a_stage_that_hangs_behind_speech_is_late(start: StartSession) -> None:
    seen = await start(deadline_s=DEADLINE_S, voice_lead_s=0.2)
    seen.bus.script = (text("A story"), audio(SECOND), FOREVER)
    assert is_late(await answered(seen))
    await asyncio.wait_for(seen.bus.streams[0].cancelled.wait(), 30)


async def test_a_stage_that_never_begins_is_late(start: StartSession) -> None:
    for speaks in (True, False):
        seen = await start(deadline_s=0.3, settings={"speaks": speaks})
        seen.bus.script = (FOREVER,)
        assert is_late(await answered(seen))
        if not speaks:
            assert seen.bus.submissions[0].deadline_s == 0.3, "a text is not held back"


async def test_a_client_that_takes_nothing_is_late(start: StartSession) -> None:
    gate = asyncio.Event()
    seen = await start(gate=gate, deadline_s=0.3)
    seen.bus.script = (*(audio(SECOND[:4800]) for _ in range(3)), FOREVER)
    seen.session.create_response(ResponseWish(settings=seen.session.settings))
    async with asyncio.timeout(30):
        await seen.bus.asked.wait()
        await seen.bus.streams[0].cancelled.wait()
    gate.set()
    assert is_late((await seen.until(events.ResponseDone)).response)
