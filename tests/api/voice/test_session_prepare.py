"""Work ahead of a turn: what the stages are shown while the user speaks, and that it is out of the way when the turn is over."""

from __future__ import annotations

import asyncio
import dataclasses

from omni_bus.api.voice import events
from omni_bus.api.voice.prepare import WINDOW
from omni_bus.api.voice.settings import ResponseWish
from omni_bus.errors import Overloaded
from tests.api.voice.conftest import Seen, StartSession
from tests.support.scripted_bus import FOREVER, audio, text

SECOND = b"\x01\x00" * 24_000


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def shown(seen: Seen) -> list[tuple[bool, int, int]]:
    """Of each request: whether it only prepares, how many messages it has, how many windows of audio."""
    return [
        (sent.options.prepare, len(sent.payload.messages), sum(tensor.shape[0] for tensor in sent.tensors.values()) // WINDOW)
        for sent in seen.bus.submissions
    ]


async def test_the_history_is_shown_when_audio_begins_and_each_window_when_it_is_complete(start: StartSession) -> None:
    seen = await start(voice_prepare=True)
    seen.bus.script = ()
    seen.say("hello")
    for _ in range(17):
        await seen.session.append_audio(SECOND)
        await settle()
    assert shown(seen) == [(True, 1, 0), (True, 2, 1), (True, 2, 2)]
    assert all(sent.options.modalities == ("text",) for sent in seen.bus.submissions)
    assert seen.names == ["ItemAdded", "ItemDone"], "nobody hears of it"


async def test_one_at_a_time_and_the_newest_next(start: StartSession) -> None:
    go = asyncio.Event()
    seen = await start(voice_prepare=True)
    seen.bus.scripts.append((go,))
    seen.bus.script = ()
    seen.say("hello")
    for _ in range(25):
        await seen.session.append_audio(SECOND)
        await settle()
    assert shown(seen) == [(True, 1, 0)]
    go.set()
    await settle()
    assert shown(seen) == [(True, 1, 0), (True, 2, 3)]


async def test_the_turn_itself_sends_it_away(start: StartSession) -> None:
    seen = await start(voice_prepare=True)
    seen.bus.scripts.append((FOREVER,))
    seen.bus.script = (text("Hi", "stop"), audio(b"", last=True))
    seen.say("hello")
    await seen.session.append_audio(SECOND)
    await settle()
    seen.session.commit_audio()
    seen.session.create_response(ResponseWish(settings=seen.session.settings))
    await seen.until(events.ResponseDone)
    assert seen.bus.streams[0].cancelled.is_set()
    assert [sent.options.prepare for sent in seen.bus.submissions] == [True, False]
    assert [sent.options.priority for sent in seen.bus.submissions] == ["batch", "interactive"], (
        "work ahead takes an answer's place"
    )


async def test_a_refusal_is_nobodys_trouble(start: StartSession) -> None:
    seen = await start(voice_prepare=True)
    seen.bus.submit_error = Overloaded("too many requests")
    seen.say("hello")
    await seen.session.append_audio(SECOND)
    await settle()
    assert seen.names == ["ItemAdded", "ItemDone"]


async def test_nothing_is_shown_where_it_is_switched_off_or_there_is_nothing_to_show(start: StartSession) -> None:
    off = await start(voice_prepare=False)
    off.say("hello")
    await off.session.append_audio(SECOND)
    new = await start(voice_prepare=True)
    await new.session.append_audio(SECOND)
    await settle()
    assert not off.bus.submissions and not new.bus.submissions


async def test_a_session_that_closes_sends_it_away(start: StartSession) -> None:
    seen = await start(voice_prepare=True)
    seen.bus.script = (FOREVER,)
    seen.say("hello")
    await seen.session.append_audio(SECOND)
    await settle()
    await seen.session.close()
    assert seen.bus.streams[0].cancelled.is_set()


async def answered(start: StartSession) -> Seen:
    """A session whose one typed turn has been answered, and whose user is silent."""
    seen = await start(voice_prepare=True)
    seen.bus.script = (text("Hi", "stop"), audio(b"", last=True))
    seen.say("hello")
    seen.session.create_response(ResponseWish(settings=seen.session.settings))
    await seen.until(events.ResponseDone)
    return seen


async def begin_to_speak(seen: Seen) -> int:
    """How many requests that brought; nothing stays in the buffer."""
    before = len(seen.bus.submissions)
    await seen.session.append_audio(SECOND)
    await settle()
    seen.session.clear_audio()
    return len(seen.bus.submissions) - before


async def test_a_conversation_that_was_just_answered_is_not_shown_again(start: StartSession) -> None:
    seen = await answered(start)
    assert await begin_to_speak(seen) == 0
    for _ in range(9):
        await seen.session.append_audio(SECOND)
        await settle()
    assert shown(seen)[1:] == [(True, 3, 1)], "its windows are"


async def test_what_the_answer_was_not_asked_with_is_shown(start: StartSession) -> None:
    seen = await answered(start)
    item = seen.say("and another thing")
    assert await begin_to_speak(seen) == 1
    seen.session.delete_item(item.id)
    assert await begin_to_speak(seen) == 0
    first = seen.session._history.items[0]
    seen.session.delete_item(first.id)
    assert await begin_to_speak(seen) == 1, "all that came behind it is another prompt now"


async def test_other_instructions_are_shown(start: StartSession) -> None:
    seen = await answered(start)
    await seen.session.configure(dataclasses.replace(seen.session.settings, instructions="Be brief."))
    assert await begin_to_speak(seen) == 1


async def test_a_long_conversation_is_shown_again_since_what_was_kept_may_have_gone(start: StartSession) -> None:
    seen = await answered(start)
    for _ in range(9):
        await seen.session.append_audio(SECOND)
    seen.session.commit_audio()
    seen.session.create_response(ResponseWish(settings=seen.session.settings))
    await seen.until(events.ResponseDone, 2)
    assert await begin_to_speak(seen) == 1
