"""What a session tells of a response: order, pace, calls, cancels, failures. The bus answers from scripts."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import numpy
import pytest

from omni_bus.api.voice import events, response
from omni_bus.api.voice.items import InputText, Item, OutputAudio
from omni_bus.api.voice.responses import MAX_LEAVING, MAX_OUT_OF_BAND, ResponseRefused
from omni_bus.api.voice.settings import NamedTool, ResponseWish
from omni_bus.errors import InvalidRequest, Overloaded, PromptTooLong, RateLimited, StageFailed
from omni_bus.payloads import Message, TextPart, ToolCall
from omni_bus.sampling import SamplingParams
from tests.api.voice.conftest import Seen, StartSession
from tests.support.scripted_bus import FOREVER, ScriptedStream, audio, text

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'
SECOND = b"\x01\x00" * 24_000
TENTH = SECOND[:4800]


def respond(seen: Seen, **wish: object) -> None:
    seen.session.create_response(ResponseWish(settings=seen.session.settings, **wish))  # type: ignore[arg-type]


async def done(seen: Seen, count: int = 1) -> events.ResponseState:
    return (await seen.until(events.ResponseDone, count)).response


def spoken(seen: Seen) -> bytes:
    return b"".join(event.data for event in seen.of(events.OutputAudioDelta))


def written(seen: Seen) -> str:
    deltas = [event.delta for event in seen.of(events.OutputTranscriptDelta)]
    return "".join([*deltas, *(event.delta for event in seen.of(events.OutputTextDelta))])


async def test_a_spoken_answer_in_its_order(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (text("Hello"), audio(TENTH), text(" world", "stop"), audio(TENTH), audio(b"", last=True))
    user = seen.say("hi")
    respond(seen)
    response = await done(seen)
    names = [name for name in seen.names if name not in ("OutputTranscriptDelta", "OutputAudioDelta")]
    assert names == [
        *("ItemAdded", "ItemDone", "ResponseCreated", "OutputItemAdded", "ItemAdded", "PartAdded", "OutputAudioDone"),
        *("OutputTranscriptDone", "PartDone", "OutputItemDone", "ItemDone", "ResponseDone"),
    ]
    assert (written(seen), spoken(seen)) == ("Hello world", TENTH + TENTH)
    [item] = response.output
    assert item.status == "completed" and item.content == [dataclasses.replace(item.content[0], transcript="Hello world")]
    assert seen.of(events.ItemAdded)[1].previous_item_id == user.id
    assert seen.of(events.OutputItemAdded)[0].item.content == [], "an event is not changed by what happens later"
    assert response.usage == events.Usage(input_text=3 + 4, cached=4, output_text=2, output_audio=3)
    assert seen.metric('omni_bus_voice_responses_total{status="completed"}') == 1


async def test_an_answer_in_text(start: StartSession) -> None:
    seen = await start(settings={"speaks": False})
    seen.bus.script = (text("Hello"), text(" world", "stop"))
    seen.say("hi")
    respond(seen)
    await done(seen)
    assert seen.bus.submissions[0].options.modalities == ("text",)
    assert seen.names[2:] == [
        *("ResponseCreated", "OutputItemAdded", "ItemAdded", "PartAdded", "OutputTextDelta", "OutputTextDelta"),
        *("OutputTextDone", "PartDone", "OutputItemDone", "ItemDone", "ResponseDone"),
    ]


async def test_audio_is_never_further_ahead_than_its_lead_and_text_does_not_wait_for_it(start: StartSession) -> None:
    lead_s = 0.4
    seen = await start(voice_lead_s=lead_s)
    seen.bus.script = (text("One"), *(audio(SECOND) for _ in range(2)), text(" two", "stop"), audio(b"", last=True))
    seen.say("count")
    began = time.monotonic()
    respond(seen)
    await seen.until(events.OutputTranscriptDelta, 2)
    assert len(spoken(seen)) < 2 * len(SECOND)
    assert seen.bus.streams[0].used < 2, "what has not been used up gives its stage no credit"
    while not seen.of(events.ResponseDone):
        assert seen.session._history.clock.lead_s(time.monotonic()) <= lead_s
        seen.changed.clear()
        await asyncio.wait_for(seen.changed.wait(), 30)
    assert time.monotonic() - began > 1.0, "two seconds of audio, and less than half a second of lead"
    assert len(spoken(seen)) == 2 * len(SECOND)
    assert seen.bus.streams[0].used == 2


async def test_the_next_answer_queues_behind_what_is_still_played(start: StartSession) -> None:
    seen = await start(voice_lead_s=0.5)
    seen.bus.script = (text("Hm", "stop"), audio(SECOND[:19_200]), audio(b"", last=True))
    for count in (1, 2):
        respond(seen)
        if count == 2:
            await seen.until(events.ResponseCreated, 2)
            assert seen.session.playing
        await done(seen, count)
    assert spoken(seen) == 2 * SECOND[:19_200]


async def test_marks_say_how_far_the_words_are_spoken(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (
        text("One two"),
        audio(TENTH, spoken=3),
        text("", "stop"),
        audio(TENTH, spoken=7),
        audio(b"", last=True),
    )
    respond(seen)
    [item] = (await done(seen)).output
    part = item.content[0]
    assert isinstance(part, OutputAudio)
    assert part.marks == [(100.0, 3), (200.0, 7)]


async def test_a_cancelled_response_tells_its_end_and_nothing_after(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (text("Hello"), audio(TENTH), FOREVER)
    respond(seen)
    await seen.until(events.OutputAudioDelta)
    seen.session.cancel_response()
    response = await done(seen)
    assert (response.status, response.reason) == ("cancelled", "client_cancelled")
    assert [item.status for item in response.output] == ["incomplete"]
    await asyncio.wait_for(seen.bus.streams[0].cancelled.wait(), 30)
    assert seen.names[-6:] == [
        *("OutputAudioDone", "OutputTranscriptDone", "PartDone", "OutputItemDone", "ItemDone", "ResponseDone")
    ]
    with pytest.raises(ResponseRefused) as refused:
        seen.session.cancel_response()
    assert refused.value.code == "response_cancel_not_active"


async def test_a_cancel_before_the_first_word(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (FOREVER,)
    respond(seen)
    seen.session.cancel_response()
    response = await done(seen)
    assert (response.status, response.output) == ("cancelled", ())
    respond(seen)
    await seen.until(events.ResponseCreated, 2)


async def test_nothing_is_told_of_what_lay_ready_when_it_was_cancelled(start: StartSession) -> None:
    """The task that is cancelled may have been woken already, and takes one more step."""
    go = asyncio.Event()
    seen = await start()
    seen.bus.script = (text("Hello"), go, *(text(f" {number}") for number in range(50)), FOREVER)
    respond(seen)
    await seen.until(events.OutputTranscriptDelta)
    go.set()
    for _ in range(8):
        await asyncio.sleep(0)
    seen.session.cancel_response()
    await done(seen)
    for _ in range(50):
        await asyncio.sleep(0)
    assert seen.names[-1] == "ResponseDone"


async def test_a_second_response_is_refused_and_changes_nothing(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (text("Hello"), FOREVER)
    respond(seen)
    with pytest.raises(ResponseRefused) as refused:
        respond(seen)
    assert refused.value.code == "conversation_already_has_active_response"
    await seen.until(events.OutputTranscriptDelta)
    assert len(seen.bus.submissions) == 1


async def test_responses_out_of_band_run_beside_each_other_and_leave_no_item(start: StartSession) -> None:
    seen = await start(settings={"speaks": False})
    seen.bus.script = (text("Hello"), FOREVER)
    seen.say("hi")
    for _ in range(MAX_OUT_OF_BAND):
        respond(seen, in_conversation=False, metadata={"n": "1"})
    respond(seen)
    await seen.until(events.OutputTextDelta, MAX_OUT_OF_BAND + 1)
    with pytest.raises(RateLimited):
        respond(seen, in_conversation=False)
    assert len(seen.of(events.ItemAdded)) == 2, "the user's and the conversation's own answer"
    created = [event.response for event in seen.of(events.ResponseCreated)]
    assert [response.conversation_id is None for response in created] == [True] * MAX_OUT_OF_BAND + [False]
    seen.session.cancel_response(created[1].id)
    assert (await done(seen)).id == created[1].id


async def test_a_response_to_items_of_its_own(start: StartSession) -> None:
    seen = await start(settings={"speaks": False, "instructions": "Be brief."})
    seen.bus.script = (text("Yes", "stop"),)
    seen.say("not this")
    respond(seen, in_conversation=False, input=(Item.message("user", [InputText("this")]),))
    await done(seen)
    assert seen.bus.submissions[0].payload.messages == (
        Message("system", (TextPart("Be brief."),)),
        Message("user", (TextPart("this"),)),
    )


async def test_a_limit_of_tokens_reaches_the_text_stage_and_its_end_is_incomplete(start: StartSession) -> None:
    seen = await start(settings={"max_output_tokens": 2, "sampling": {"thinker": SamplingParams(temperature=0.0)}})
    seen.bus.script = (text("One two", "length"), audio(TENTH), audio(b"", last=True))
    respond(seen)
    response = await done(seen)
    assert (response.status, response.reason) == ("incomplete", "max_output_tokens")
    assert seen.bus.submissions[0].options.sampling == {"thinker": SamplingParams(temperature=0.0, max_tokens=2)}


async def test_a_conversation_that_is_too_long_for_the_model_loses_its_older_half_in_prompts(start: StartSession) -> None:
    seen = await start(settings={"speaks": False, "instructions": "Be brief."})
    first = seen.say("one")
    seen.session.add_item(Item.message("system", [InputText("Stay.")]))
    for words in ("two", "three", "four", "five"):
        seen.say(words)
    too_long = PromptTooLong("the prompt has 9 positions")
    seen.bus.scripts.extend([(too_long,), (too_long,)])
    seen.bus.script = (text("Well", "stop"),)
    respond(seen)
    assert (await done(seen)).status == "completed"
    respond(seen)
    await done(seen, 2)
    said = [[part.text for message in sent.payload.messages for part in message.parts] for sent in seen.bus.submissions]  # type: ignore[union-attr]
    assert said == [
        ["Be brief.", "one", "Stay.", "two", "three", "four", "five"],
        ["Be brief.", "Stay.", "four", "five"],
        ["Be brief.", "Stay.", "five"],
        ["Be brief.", "Stay.", "five", "Well"],
    ]
    assert len(seen.of(events.ResponseCreated)) == 2
    assert seen.session.get_item(first.id) is first, "the conversation itself keeps it"


async def test_a_single_message_that_is_too_long_fails(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (PromptTooLong("the prompt has 9 positions"),)
    seen.say("one")
    respond(seen)
    response = await done(seen)
    assert response.error is not None and response.error.code == "context_length_exceeded"
    assert len(seen.bus.submissions) == 1


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "in_mid_answer"])
async def test_a_failure_is_told_and_the_session_goes_on(start: StartSession, refused: bool) -> None:
    seen = await start()
    if refused:
        seen.bus.submit_error = Overloaded("too many requests")
    seen.bus.script = (text("Hello"), StageFailed("stage thinker failed"))
    respond(seen)
    response = await done(seen)
    assert response.status == "failed" and response.error is not None
    assert response.error.code == ("overloaded" if refused else "stage_failed")
    assert response.usage is not None
    seen.bus.submit_error, seen.bus.script = None, (text("Hello", "stop"), audio(b"", last=True))
    respond(seen)
    assert (await done(seen, 2)).status == "completed"


@pytest.mark.parametrize("end", ["cancelled", "failed", "calls_alone"])
async def test_a_response_that_is_broken_off_says_what_it_used_by_then(start: StartSession, end: str) -> None:
    prompt = {"prompt_tokens": 9, "audio_tokens": 4, "image_tokens": 2, "cached_tokens": 5}
    seen = await start(settings={"tools": (TOOL,)} if end == "calls_alone" else {})
    if end == "calls_alone":  # its stages go on, and their end is not waited for
        seen.bus.script = (text(CALL, usage=prompt), text("", "stop", usage={**prompt, "completion_tokens": 12}), FOREVER)
    else:
        seen.bus.script = (text("Hello", usage=prompt), audio(TENTH, frames=1), text(" you"), audio(TENTH, frames=2))
        seen.bus.script += (StageFailed("stage vocoder failed"),) if end == "failed" else (FOREVER,)
    respond(seen)
    if end == "cancelled":
        await seen.until_taken(4)
        seen.session.cancel_response()
    response = await done(seen)
    made = (12, 0) if end == "calls_alone" else (2, 3)
    assert response.status == ("completed" if end == "calls_alone" else end)
    assert response.usage == events.Usage(
        input_text=3, input_audio=4, input_image=2, cached=5, output_text=made[0], output_audio=made[1]
    )


async def test_a_fault_of_ours_is_told_as_one(start: StartSession, caplog: pytest.LogCaptureFixture) -> None:
    seen = await start()
    seen.bus.script = (text("Hello"), ValueError("a secret"))
    respond(seen)
    response = await done(seen)
    assert response.error is not None and response.error.code == "internal_error"
    assert "secret" not in response.error.message
    assert "a secret" in caplog.text


async def test_a_client_that_reads_nothing_stalls_its_answer_only(start: StartSession) -> None:
    gate = asyncio.Event()
    seen = await start(gate=gate)
    seen.bus.script = (*(text(f"{number} ") for number in range(1000)), text("", "stop"), audio(b"", last=True))
    respond(seen)
    await seen.until_taken(1)
    for _ in range(200):
        await asyncio.sleep(0)
    assert seen.bus.streams[0].taken == 1
    gate.set()
    await done(seen)
    assert seen.bus.streams[0].taken == 1002


async def test_an_answer_truncated_while_it_is_given_keeps_no_more(start: StartSession) -> None:
    """Some clients truncate first and cancel then, or not at all."""
    go = asyncio.Event()
    seen = await start()
    seen.bus.script = (text("One two"), audio(TENTH, spoken=3), audio(TENTH, spoken=7), go, text(" three", "stop"))
    seen.bus.script += (audio(TENTH, spoken=13), audio(b"", last=True))
    respond(seen)
    delta = await seen.until(events.OutputAudioDelta, 2)
    seen.session.truncate_item(delta.item_id, 0, 120)
    go.set()
    [item] = (await done(seen)).output
    assert item.content[0].to_json()["transcript"] == "One"
    assert seen.session.get_item(item.id).content[0].to_json()["transcript"] == "One"


async def test_an_answer_deleted_while_it_is_given_is_gone(start: StartSession) -> None:
    go = asyncio.Event()
    seen = await start(settings={"speaks": False})
    seen.bus.script = (text("One"), go, text(" two", "stop"))
    respond(seen)
    delta = await seen.until(events.OutputTextDelta)
    seen.session.delete_item(delta.item_id)
    go.set()
    assert (await done(seen)).status == "completed"
    assert not seen.of(events.ItemDone) and seen.of(events.ItemDeleted)
    respond(seen)
    await done(seen, 2)
    assert seen.bus.submissions[1].payload.messages == ()


# ---- functions


async def test_a_call_is_told_and_its_sound_is_not(start: StartSession) -> None:
    seen = await start(settings={"tools": (TOOL,)})
    seen.bus.script = (
        text(" \n"),
        audio(TENTH),
        *(text(piece) for piece in (CALL[:20], CALL[20:50], CALL[50:])),
        text("", "stop"),
    )
    seen.bus.script += (audio(TENTH), FOREVER)
    respond(seen)
    response = await done(seen)
    [call] = response.output
    assert (call.kind, call.name, call.arguments, call.status) == (
        *("function_call", "look", '{"city": "Paris"}', "completed"),
    )
    assert "".join(event.delta for event in seen.of(events.CallArgumentsDelta)) == call.arguments
    assert not seen.of(events.OutputAudioDelta)
    await asyncio.wait_for(seen.bus.streams[0].cancelled.wait(), 30)


@pytest.mark.parametrize("told", [True, False], ids=["the_model_tells_what_it_says", "it_does_not"])
async def test_words_before_a_call_are_spoken_and_the_call_is_not(start: StartSession, told: bool) -> None:
    words = "Let me look."
    seen = await start(settings={"tools": (TOOL,)})
    loud = b"\x05\x00" * 2400
    seen.bus.script = (
        text(words),
        audio(TENTH, spoken=6 if told else None),
        text(CALL),
        text("", "stop"),
        audio(TENTH, spoken=len(words) if told else None),
        audio(loud, spoken=len(words) + 9 if told else None),
        FOREVER,
    )
    respond(seen)
    response = await done(seen)
    assert [item.kind for item in response.output] == ["message", "function_call"]
    assert written(seen) == words
    assert loud not in spoken(seen)
    if told:
        assert spoken(seen) == TENTH + TENTH
    names = seen.names
    assert names.index("OutputAudioDone") < names.index("CallArgumentsDelta")
    assert [event.item.kind for event in seen.of(events.OutputItemDone)] == ["message", "function_call"]


async def test_audio_waits_until_there_are_words(start: StartSession) -> None:
    go = asyncio.Event()
    seen = await start(settings={"tools": (TOOL,)})
    seen.bus.script = (audio(TENTH), text("<tool"), go, text("box>", "stop"), audio(b"", last=True))
    respond(seen)
    await seen.until_taken(2)
    assert not seen.of(events.OutputAudioDelta)
    go.set()
    response = await done(seen)
    assert (written(seen), spoken(seen)) == ("<toolbox>", TENTH)
    assert response.status == "completed"


async def test_what_is_said_to_a_model_of_calls_and_their_outputs(start: StartSession) -> None:
    seen = await start(settings={"tools": (TOOL,), "speaks": False})
    seen.bus.scripts.append((text(CALL, "stop"),))
    seen.bus.script = (text("Sunny.", "stop"),)
    seen.say("weather?")
    respond(seen)
    [call] = (await done(seen)).output
    seen.session.add_item(Item.function_call_output(call.call_id, "sun"))
    respond(seen)
    await done(seen, 2)
    assert seen.bus.submissions[1].payload.messages == (
        Message("user", (TextPart("weather?"),)),
        Message("assistant", (), (ToolCall("look", '{"city": "Paris"}'),)),
        Message("tool", (TextPart("sun"),)),
    )


@pytest.mark.parametrize(
    ("choice", "tools", "instructed"),
    [("auto", 2, False), ("none", 0, False), ("required", 2, True), (NamedTool("look"), 1, True)],
    ids=["auto", "none", "required", "named"],
)
async def test_a_choice_of_tools_as_it_reaches_the_model(
    start: StartSession, choice: object, tools: int, instructed: bool
) -> None:
    other = {"type": "function", "name": "listen"}
    seen = await start(settings={"tools": (TOOL, other), "tool_choice": choice, "speaks": False})
    seen.bus.script = (text("Yes", "stop"),)
    seen.say("hi")
    respond(seen)
    await done(seen)
    payload = seen.bus.submissions[0].payload
    assert len(payload.tools) == tools
    assert (payload.messages[0].role == "system") == instructed


# ---- the session around them


async def test_the_voice_stays_once_it_was_heard(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (text("Hi", "stop"), audio(TENTH), audio(b"", last=True))
    await seen.session.configure(dataclasses.replace(seen.session.settings, voice="chelsie"))
    respond(seen)
    await done(seen)
    assert seen.bus.submissions[0].options.voice == "chelsie"
    with pytest.raises(InvalidRequest) as refused:
        await seen.session.configure(dataclasses.replace(seen.session.settings, voice="Ethan"))
    assert refused.value.code == "cannot_update_voice"
    assert seen.session.settings.voice == "chelsie"


async def test_a_closed_session_leaves_no_request_and_tells_nothing(start: StartSession) -> None:
    seen = await start()
    seen.bus.script = (text("Hello"), audio(TENTH), FOREVER)
    respond(seen)
    respond(seen, in_conversation=False)
    await seen.until(events.OutputAudioDelta, 2)
    told = len(seen.events)
    await seen.session.close()
    assert all(stream.cancelled.is_set() for stream in seen.bus.streams)
    assert len(seen.events) == told
    assert seen.metric('omni_bus_voice_responses_total{status="cancelled"}') == 2


async def test_a_client_waits_while_the_stages_let_go_of_too_much(start: StartSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each response that was cancelled holds its whole prompt until every stage has let go of it."""
    let_go = asyncio.Event()

    async def cancel(stream: ScriptedStream) -> None:
        await let_go.wait()

    async def begin_and_cancel() -> None:
        for count in range(1, 3 * MAX_LEAVING + 1):
            respond(seen)
            await seen.until(events.OutputTextDelta, count)
            seen.session.cancel_response()
            await seen.session.drained()

    monkeypatch.setattr(ScriptedStream, "cancel", cancel)
    monkeypatch.setattr(response, "ACKNOWLEDGE_S", 60.0)
    seen = await start(settings={"speaks": False})
    seen.bus.script = (text("Hello"), FOREVER)
    asking = asyncio.create_task(begin_and_cancel())
    await done(seen, MAX_LEAVING + 1)
    for _ in range(2000):
        await asyncio.sleep(0)
    assert len(seen.of(events.ResponseCreated)) == MAX_LEAVING + 1
    let_go.set()
    await asyncio.wait_for(asking, 30)
    assert len(seen.of(events.ResponseCreated)) == 3 * MAX_LEAVING


async def test_audio_in_other_formats(start: StartSession) -> None:
    seen = await start(settings={"output_format": "pcmu"})
    tone = (8000 * numpy.sin(numpy.arange(24_000) * 0.1)).astype("<i2").tobytes()
    seen.bus.script = (text("Hm", "stop"), audio(tone), audio(b"", last=True))
    respond(seen)
    await done(seen)
    assert abs(len(spoken(seen)) - 8000) <= 8
