"""What the user said, in writing: by the answer's own recogniser, or behind the answer, and never in its way."""

from __future__ import annotations

import asyncio

import pytest

from omni_bus.api.voice import events
from omni_bus.api.voice.items import InputAudio
from omni_bus.api.voice.settings import ResponseWish, Transcription
from omni_bus.errors import StageFailed
from omni_bus.payloads import MediaPart, Message, TextPart, TranscriptWish
from tests.api.voice.conftest import Seen, StartSession
from tests.support.scripted_bus import FOREVER, audio, heard, text

SECOND = b"\x01\x00" * 24_000
WRITE = {"transcription": Transcription(model="any", language="en", prompt="Names: Ada.")}


async def say(seen: Seen, seconds: int = 1) -> str:
    """Audio, committed; the item's id."""
    await seen.session.append_audio(SECOND * seconds)
    seen.session.commit_audio()
    return (await seen.until(events.InputCommitted, len(seen.of(events.InputCommitted)) + 1)).item_id


def respond(seen: Seen) -> None:
    seen.session.create_response(ResponseWish(settings=seen.session.settings))


async def a_while() -> None:
    """Long enough for all that is ready to happen."""
    for _ in range(50):
        await asyncio.sleep(0)


def transcript(seen: Seen, item_id: str) -> str | None:
    part = seen.session.get_item(item_id).content[0]
    assert isinstance(part, InputAudio)
    return part.transcript


async def test_a_pipeline_that_hears_tells_in_the_answers_own_request(start: StartSession) -> None:
    seen = await start(ear=True, settings=WRITE)
    seen.bus.script = (heard("hello there", last=False), heard(""), text("Hi", "stop"), audio(b"", last=True))
    item_id = await say(seen, 2)
    respond(seen)
    written = await seen.until(events.InputTranscriptDone)
    await seen.until(events.ResponseDone)
    assert written == events.InputTranscriptDone(item_id, 0, "hello there", 2.0)
    assert [event.delta for event in seen.of(events.InputTranscriptDelta)] == ["hello there"]
    assert len(seen.bus.submissions) == 1
    assert transcript(seen, item_id) == "hello there"


async def test_what_was_heard_once_is_not_heard_again(start: StartSession) -> None:
    """Also where nobody asked for transcripts: then nothing is told of it."""
    seen = await start(ear=True)
    seen.bus.script = (heard("hello", last=False), heard(""), text("Hi", "stop"), audio(b"", last=True))
    await say(seen)
    respond(seen)
    await seen.until(events.ResponseDone)
    second = await say(seen)
    seen.bus.script = (heard("and you", last=False), heard(""), text("Well", "stop"), audio(b"", last=True))
    respond(seen)
    await seen.until(events.ResponseDone, 2)
    assert not seen.of(events.InputTranscriptDone)
    assert list(seen.bus.submissions[1].tensors) == ["media0"]
    assert seen.bus.submissions[1].payload.messages == (
        Message("user", (TextPart("hello"),)),
        Message("assistant", (TextPart("Hi"),)),
        Message("user", (MediaPart("audio", 0),)),
    )
    assert transcript(seen, second) == "and you"


async def test_several_pieces_are_told_each_for_its_item(start: StartSession) -> None:
    seen = await start(ear=True, settings=WRITE)
    seen.bus.script = (heard("one", last=False), heard("", last=False), heard(""), text("Hi", "stop"), audio(b"", last=True))
    ids = [await say(seen), await say(seen)]
    respond(seen)
    await seen.until(events.InputTranscriptDone, 2)
    assert [(event.item_id, event.transcript) for event in seen.of(events.InputTranscriptDone)] == [
        (ids[0], "one"),
        (ids[1], ""),
    ]


async def test_without_an_answer_the_recogniser_is_asked_alone(start: StartSession) -> None:
    seen = await start(ear=True, settings=WRITE)
    seen.bus.script = (heard("hello", last=False), heard("there", last=False), heard(""))
    item_id = await say(seen)
    written = await seen.until(events.InputTranscriptDone)
    assert (written.item_id, written.transcript) == (item_id, "hello there")
    assert [event.delta for event in seen.of(events.InputTranscriptDelta)] == ["hello", " there"]
    [asked] = seen.bus.submissions
    assert asked.options.modalities == ("transcript",)
    assert asked.payload.transcript == TranscriptWish(language="en", prompt="Names: Ada.")


async def test_a_model_without_a_recogniser_is_asked_when_the_answers_first_audio_has_left(start: StartSession) -> None:
    """Not behind its first words: they come before the audio, which the same model has yet to write for."""
    speak, taken = asyncio.Event(), asyncio.Event()
    taken.set()
    seen = await start(settings=WRITE, gate=taken)
    seen.bus.scripts.append((text("Hi"), speak, audio(), text("", "stop"), audio(b"", last=True)))
    seen.bus.script = (text(" hello"), text(" there ", "stop"))
    item_id = await say(seen)
    respond(seen)
    await seen.until(events.OutputTranscriptDelta)
    await a_while()
    assert len(seen.bus.submissions) == 1, "its words are no audio"
    taken.clear()
    speak.set()
    await seen.until_taken(2)
    await a_while()
    assert len(seen.bus.submissions) == 1, "the client has not been sent it yet"
    taken.set()
    written = await seen.until(events.InputTranscriptDone)
    assert (written.item_id, written.transcript) == (item_id, "hello there")
    assert (written.input_tokens, written.output_tokens) == (7, 2)
    asked = seen.bus.submissions[1]
    assert asked.options.modalities == ("text",)
    assert asked.payload.messages[-1].parts[0] == MediaPart("audio", 0)
    assert seen.names.index("OutputAudioDelta") < seen.names.index("InputTranscriptDelta")


async def test_behind_an_answer_in_text_it_is_asked_at_its_first_words(start: StartSession) -> None:
    go, end = asyncio.Event(), asyncio.Event()
    seen = await start(settings={**WRITE, "speaks": False})
    seen.bus.scripts.append((go, text("Hi"), end, text("", "stop")))
    seen.bus.script = (text("hello", "stop"),)
    await say(seen)
    respond(seen)
    await seen.until_taken(0)
    await a_while()
    assert len(seen.bus.submissions) == 1, "the answer goes first"
    go.set()
    await seen.until(events.InputTranscriptDone)
    assert not seen.of(events.ResponseDone)
    end.set()
    await seen.until(events.ResponseDone)


async def test_behind_an_answer_without_audio_it_is_asked_at_its_end(start: StartSession) -> None:
    end = asyncio.Event()
    seen = await start(settings=WRITE)
    seen.bus.scripts.append((text("Hi"), end, text("", "stop"), audio(b"", last=True)))
    seen.bus.script = (text("hello", "stop"),)
    await say(seen)
    respond(seen)
    await seen.until(events.OutputTranscriptDelta)
    await a_while()
    assert len(seen.bus.submissions) == 1
    end.set()
    await seen.until(events.InputTranscriptDone)
    assert seen.names.index("ResponseDone") < seen.names.index("InputTranscriptDelta")


async def test_an_answer_behind_one_that_ended_at_once_delays_a_transcription_and_no_more(start: StartSession) -> None:
    """The first one's end lets it go, and the second's beginning takes that back, before it has taken a step."""
    seen = await start(settings=WRITE)
    seen.bus.scripts.append((FOREVER,))
    seen.bus.scripts.append((text("Hi"), audio(), text("", "stop"), audio(b"", last=True)))
    seen.bus.script = (text("hello", "stop"),)
    item_id = await say(seen)
    respond(seen)
    await seen.until_taken(0)
    seen.session.cancel_response()
    respond(seen)
    assert (await seen.until(events.InputTranscriptDone)).item_id == item_id
    assert len(seen.bus.submissions) == 3


@pytest.mark.parametrize("ear", [False, True])
async def test_it_goes_where_the_sessions_answers_go(start: StartSession, ear: bool) -> None:
    """There the audio has been encoded."""
    seen = await start(ear=ear, settings=WRITE)
    seen.bus.scripts.append((text("Hi"), audio(), text("", "stop"), audio(b"", last=True)))
    seen.bus.script = (heard("hello"),) if ear else (text("hello", "stop"),)
    await say(seen)
    respond(seen)
    await seen.until(events.InputTranscriptDone)
    answer, asked = (submission.options for submission in seen.bus.submissions)
    assert answer.affinity == asked.affinity == seen.session.conversation_id


async def test_an_answer_that_begins_sends_a_transcription_back_into_the_queue(start: StartSession) -> None:
    seen = await start(settings=WRITE)
    seen.bus.scripts.append((FOREVER,))
    await say(seen)
    async with asyncio.timeout(30):
        await seen.bus.asked.wait()  # a while after nobody asked for an answer
    seen.bus.scripts.append((text("Hi", "stop"), audio(b"", last=True)))
    seen.bus.script = (text("hello", "stop"),)
    respond(seen)
    await asyncio.wait_for(seen.bus.streams[0].cancelled.wait(), 30)
    assert (await seen.until(events.InputTranscriptDone)).transcript == "hello"
    assert len(seen.bus.submissions) == 3


async def test_a_transcription_that_fails_is_told_and_the_next_one_goes_on(start: StartSession) -> None:
    seen = await start(settings=WRITE)
    seen.bus.scripts.append((StageFailed("stage thinker failed"),))
    seen.bus.script = (text("hello", "stop"),)
    ids = [await say(seen), await say(seen)]
    failed = await seen.until(events.InputTranscriptFailed)
    assert (failed.item_id, failed.error.code) == (ids[0], "stage_failed")
    assert (await seen.until(events.InputTranscriptDone)).item_id == ids[1]


async def test_an_item_that_is_deleted_is_not_written_down(start: StartSession) -> None:
    seen = await start(settings=WRITE)
    seen.bus.scripts.append((FOREVER,))
    seen.bus.script = (text("hello", "stop"),)
    ids = [await say(seen), await say(seen)]
    async with asyncio.timeout(30):
        await seen.bus.asked.wait()
    seen.session.delete_item(ids[0])
    assert (await seen.until(events.InputTranscriptDone)).item_id == ids[1]
    assert seen.bus.streams[0].cancelled.is_set()


async def test_a_session_that_closes_ends_its_transcription(start: StartSession) -> None:
    seen = await start(settings=WRITE)
    seen.bus.script = (FOREVER,)
    await say(seen)
    async with asyncio.timeout(30):
        await seen.bus.asked.wait()
    await seen.session.close()
    assert seen.bus.streams[0].cancelled.is_set()
