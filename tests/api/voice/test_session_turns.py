"""Turns of the user, told from real speech: what a turn becomes, what it interrupts, what is kept of an answer that was cut short."""

from __future__ import annotations

import asyncio
import dataclasses
import tracemalloc

import pytest

from omni_bus.api.voice import events
from omni_bus.api.voice.items import InputAudio
from omni_bus.api.voice.settings import ResponseWish
from omni_bus.api.voice.turn_config import ServerVad
from omni_bus.errors import InvalidRequest
from omni_bus.payloads import TextPart
from tests.api.voice.conftest import Seen, StartSession, silence, spoken
from tests.support.cascade import skip_without_packages
from tests.support.scripted_bus import FOREVER, audio, text

SECOND = b"\x01\x00" * 24_000
QUESTION = "What is the capital of France?"
PIECE = 4800
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _speech() -> None:
    skip_without_packages()


async def hear(seen: Seen, pcm: bytes) -> None:
    for start in range(0, len(pcm), PIECE):
        await seen.session.append_audio(pcm[start : start + PIECE])


def vad(**fields: object) -> dict[str, object]:
    return {"turn_detection": ServerVad(**fields)}  # type: ignore[arg-type]


def last_said(seen: Seen, request: int = -1) -> str:
    """What the request holds of the assistant's last message; "" where there is none."""
    found = [message for message in seen.bus.submissions[request].payload.messages if message.role == "assistant"]
    return "".join(part.text for part in found[-1].parts if isinstance(part, TextPart)) if found else ""


async def test_a_turn_is_told_committed_and_answered(start: StartSession) -> None:
    seen = await start(settings=vad())
    seen.bus.script = (text("Paris", "stop"), audio(SECOND[:960]), audio(b"", last=True))
    question = spoken(QUESTION)
    await hear(seen, question + silence(1.0))
    await seen.until(events.ResponseDone)
    assert seen.names[:6] == [
        *("UserSpeechStarted", "UserSpeechStopped", "InputCommitted", "ItemAdded", "ItemDone", "ResponseCreated")
    ]
    started, stopped = seen.of(events.UserSpeechStarted)[0], seen.of(events.UserSpeechStopped)[0]
    item = seen.of(events.ItemAdded)[0].item
    assert started.item_id == stopped.item_id == item.id
    [part] = item.content
    assert isinstance(part, InputAudio)
    assert part.duration_ms == pytest.approx(stopped.audio_end_ms - started.audio_start_ms, abs=1)
    assert len(question) / 48 - 300 < part.duration_ms < len(question) / 48 + 1000
    [sent] = seen.bus.submissions[0].tensors.values()
    assert sent.shape[0] >= len(part.pcm16k)
    assert seen.metric("omni_bus_voice_turn_answered_seconds_count") == 1


@pytest.mark.parametrize("first", ["text", "call"])
async def test_which_sound_answers_a_turn(start: StartSession, first: str) -> None:
    """What is said behind a function call does. Where a text was the answer, none does: the time would count until some later one speaks."""
    seen = await start(settings={**vad(), "speaks": first == "call", "tools": (TOOL,)})
    seen.bus.script = (text("Paris" if first == "text" else CALL, "stop"),)
    await hear(seen, spoken(QUESTION) + silence(1.0))
    await seen.until(events.ResponseDone)
    seen.bus.script = (text("Rome", "stop"), audio(SECOND[:960]), audio(b"", last=True))
    speaking = dataclasses.replace(seen.session.settings, speaks=True)
    seen.session.create_response(ResponseWish(settings=speaking))
    await seen.until(events.OutputAudioDelta)
    assert seen.metric("omni_bus_voice_turn_answered_seconds_count") == (1 if first == "call" else 0)


async def test_a_turn_interrupts_the_answer_at_once(start: StartSession) -> None:
    seen = await start(settings=vad())
    seen.bus.script = (text("A long story"), *(audio(SECOND) for _ in range(60)), FOREVER)
    await hear(seen, spoken(QUESTION) + silence(1.0))
    await seen.until(events.OutputAudioDelta)
    await hear(seen, spoken(QUESTION))
    response = (await seen.until(events.ResponseDone)).response
    assert (response.status, response.reason) == ("cancelled", "turn_detected")
    second = seen.events.index(seen.of(events.UserSpeechStarted)[1])
    told = seen.names[second + 1 :]
    assert told == [
        "AnswerInterrupted",
        *("OutputAudioDone", "OutputTranscriptDone", "PartDone", "OutputItemDone", "ItemDone", "ResponseDone"),
    ], "not a sample after the user began to speak"
    await asyncio.wait_for(seen.bus.streams[0].cancelled.wait(), 30)
    await hear(seen, silence(1.0))
    await seen.until(events.ResponseCreated, 2)
    assert seen.metric("omni_bus_voice_interruptions_total") == 1
    assert seen.metric("omni_bus_voice_cancel_seconds_count") == 1


@pytest.mark.parametrize("truncated", [True, False], ids=["the_client_says_how_much", "our_clock_does"])
async def test_history_keeps_what_was_heard_of_an_interrupted_answer(start: StartSession, truncated: bool) -> None:
    """Four words, a second each: interrupted as soon as two seconds have been sent, of which the client has played some or none."""
    words = ("One ", "two ", "three ", "four")
    ends = [len("".join(words[: count + 1])) for count in range(4)]
    seen = await start(settings=vad())
    seen.bus.script = (
        *(text(word) for word in words),
        *(audio(SECOND, spoken=end) for end in ends),
        FOREVER,
    )
    await hear(seen, spoken(QUESTION) + silence(1.0))
    item_id = (await seen.until(events.OutputAudioDelta, 2)).item_id
    seen.session.interrupt("turn_detected")
    await seen.until(events.ResponseDone)
    if truncated:
        seen.session.truncate_item(item_id, 0, 1500)
        assert await seen.until(events.ItemTruncated) == events.ItemTruncated(item_id, 0, 1500)
    seen.bus.script = (text("Yes", "stop"), audio(b"", last=True))
    seen.session.create_response(ResponseWish(settings=seen.session.settings))
    await seen.until(events.ResponseDone, 2)
    assert last_said(seen) == "One" if truncated else last_said(seen) in ("", "One", "One two")
    if not truncated:
        item = seen.session.get_item(item_id)
        assert item.content[0].to_json()["transcript"] == "One two three four", (
            "the client may still say better how much it was"
        )


async def test_what_can_have_been_played_is_not_cut_of_an_answer_that_is_cancelled(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (text("One two three"), audio(SECOND[:4800], spoken=3), FOREVER)
    seen.session.create_response(ResponseWish(settings=seen.session.settings))
    await seen.until(events.OutputAudioDelta)
    seen.session.cancel_response()
    seen.bus.script = (text("Yes", "stop"), audio(b"", last=True))
    seen.session.create_response(ResponseWish(settings=seen.session.settings))
    await seen.until(events.ResponseDone, 2)
    assert last_said(seen) == "One"


async def test_an_answer_that_is_not_to_be_interrupted_is_heard_out(start: StartSession) -> None:
    go = asyncio.Event()
    seen = await start(settings=vad(interrupt_response=False))
    seen.bus.scripts.append((text("A story"), go, text("", "stop"), audio(b"", last=True)))
    seen.bus.script = (text("Paris", "stop"), audio(b"", last=True))
    for _ in range(3):
        await hear(seen, spoken(QUESTION) + silence(1.0))
    assert len(seen.of(events.InputCommitted)) == 3
    assert len(seen.of(events.ResponseCreated)) == 1
    go.set()
    await seen.until(events.ResponseDone, 2)
    assert [event.response.status for event in seen.of(events.ResponseDone)] == ["completed", "completed"]
    assert len(seen.bus.submissions) == 2, "one answer for all that was said meanwhile"
    assert sum(message.role == "user" for message in seen.bus.submissions[1].payload.messages) == 3


async def test_a_turn_that_is_not_to_be_answered_is_not(start: StartSession) -> None:
    seen = await start(settings=vad(create_response=False))
    await hear(seen, spoken(QUESTION) + silence(1.0))
    assert seen.names[-1] == "ItemDone"
    assert not seen.bus.submissions


async def test_a_turn_ends_where_the_buffer_is_full(start: StartSession) -> None:
    seen = await start(settings=vad(create_response=False), session_buffer_s=1.0)
    await hear(seen, spoken(QUESTION) + silence(1.0))
    sizes = [event.item.audio_s for event in seen.of(events.ItemAdded)]
    assert len(sizes) >= 2 and max(sizes) <= 1.11, sizes


async def test_a_commit_by_hand_ends_the_turn_that_had_begun(start: StartSession) -> None:
    seen = await start(settings=vad())
    await hear(seen, spoken(QUESTION)[:-9600])
    started = await seen.until(events.UserSpeechStarted)
    seen.session.commit_audio()
    await hear(seen, silence(2.0))
    assert seen.of(events.InputCommitted)[0].item_id == started.item_id
    assert not seen.of(events.UserSpeechStopped) and not seen.bus.submissions
    assert len(seen.of(events.ItemAdded)) == 1


@pytest.mark.parametrize("settings", [{"turn_detection": None}, vad()], ids=["by_hand", "by_vad"])
async def test_much_audio_at_once_does_not_hold_up_others(start: StartSession, settings: dict[str, object]) -> None:
    seen = await start(settings=settings)
    await hear(seen, silence(0.1))  # loads what it needs
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await seen.session.append_audio(silence(60.0))
    beside.cancel()
    assert turns > 20


async def test_audio_that_is_refused_leaves_no_trace(start: StartSession) -> None:
    """Not even in the filter of the decoder: behind it a silence is silent."""
    seen = await start(session_buffer_s=2.0)
    with pytest.raises(InvalidRequest):
        await seen.session.append_audio(b"\xff\x7f" * 24_000 * 3)
    await seen.session.append_audio(bytes(48_000 * 2))  # just fits
    seen.session.commit_audio()
    [part] = (await seen.until(events.ItemAdded)).item.content
    assert isinstance(part, InputAudio)
    assert not part.pcm16k.any() and part.duration_ms == pytest.approx(2000, abs=1)


@pytest.mark.parametrize("detection", [None, ServerVad()], ids=["by_hand", "by_vad"])
async def test_a_cleared_buffer_leaves_no_half_sample(start: StartSession, detection: ServerVad | None) -> None:
    """The first byte behind a clear begins a sample, as in a buffer of bytes; carried over, half a sample turns speech into noise."""
    seen = await start(settings={"turn_detection": detection})
    await seen.session.append_audio(b"\xff\x7f" * 2400 + b"\x7f")
    seen.session.clear_audio()
    await seen.session.append_audio(bytes(4800) + b"\x00\x01" * 4800)
    seen.session.commit_audio()
    [part] = (await seen.until(events.ItemAdded)).item.content
    assert isinstance(part, InputAudio)
    assert part.pcm16k.min() > -0.01 and part.pcm16k.max() == pytest.approx(256 / 32768, abs=0.001)
    assert not part.pcm16k[:800].any(), "nor anything of what was cleared"


async def test_audio_committed_by_hand(start: StartSession) -> None:
    seen = await start(session_buffer_s=2.0)
    with pytest.raises(InvalidRequest) as empty:
        seen.session.commit_audio()
    assert empty.value.code == "input_audio_buffer_commit_empty"
    await hear(seen, SECOND)
    with pytest.raises(InvalidRequest) as full:
        await hear(seen, SECOND + SECOND)
    assert full.value.code == "input_audio_buffer_full"
    seen.session.clear_audio()
    await hear(seen, SECOND)
    seen.session.commit_audio()
    await seen.session.drained()
    assert seen.names == ["InputCleared", "InputCommitted", "ItemAdded", "ItemDone"]
    assert seen.of(events.ItemAdded)[0].item.audio_s == pytest.approx(1.0, abs=0.001)


async def test_detection_turned_on_and_off_between_turns(start: StartSession) -> None:
    import dataclasses

    seen = await start()
    settings = seen.session.settings
    await hear(seen, silence(1.0))
    await seen.session.configure(dataclasses.replace(settings, turn_detection=ServerVad(create_response=False)))
    await hear(seen, spoken(QUESTION) + silence(1.0))
    assert seen.of(events.UserSpeechStarted)[0].audio_start_ms > 900
    await seen.session.configure(settings)
    await hear(seen, spoken(QUESTION))
    seen.session.commit_audio()
    await seen.session.drained()
    assert len(seen.of(events.UserSpeechStarted)) == 1 and len(seen.of(events.InputCommitted)) == 2


async def test_ten_minutes_of_silence_leave_nothing_behind(start: StartSession) -> None:
    seen = await start(settings=vad())
    await hear(seen, silence(5.0))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(60):
            await seen.session.append_audio(silence(10.0))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000, "ten minutes are 38 MB"
    assert not seen.events


async def test_a_long_wait_for_the_user_keeps_no_more_than_the_buffer_may(start: StartSession) -> None:
    """Silence is shown to the model when nobody speaks for idle_timeout_ms, which may be longer."""
    go = asyncio.Event()
    seen = await start(session_buffer_s=2.0, settings=vad(idle_timeout_ms=6000))
    seen.bus.script = (text("Hm"), go, text("", "stop"), audio(b"", last=True))
    seen.session.create_response(ResponseWish(settings=seen.session.settings))
    await seen.until(events.OutputTranscriptDelta)
    await hear(seen, silence(0.5))
    go.set()
    await seen.until(events.ResponseDone)
    await hear(seen, silence(7.0))
    idle = await seen.until(events.UserIdle)
    assert idle.audio_end_ms - idle.audio_start_ms == 6000
    item = seen.session.get_item(idle.item_id)
    assert 1.8 < item.audio_s <= 2.0 + 0.1, "of the silence, its end"


async def test_the_oldest_items_go_where_audio_is_too_much_and_are_told(start: StartSession) -> None:
    seen = await start(session_history_s=2.5, session_buffer_s=2.0)
    for _ in range(3):
        await hear(seen, SECOND)
        seen.session.commit_audio()
    await seen.session.drained()
    first = seen.of(events.ItemAdded)[0].item.id
    assert seen.of(events.ItemDeleted) == [events.ItemDeleted(first)]
