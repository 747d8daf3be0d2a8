"""What a pipeline is asked with: a conversation's items as messages, calls and their outputs, tools and media."""

from __future__ import annotations

import json

import numpy
import pytest

from omni_bus.api.voice.chat_prompt import NO_OUTPUT, chat_tool
from omni_bus.api.voice.conversation import Conversation
from omni_bus.api.voice.items import InputAudio, InputImage, InputText, Item, OutputAudio, OutputText
from omni_bus.payloads import ChatInput, MediaPart, Message, TextPart, ToolCall

ALL = frozenset({"audio", "image"})
QUESTION = Message("user", (TextPart("q"),))


def conversation(*items: Item) -> Conversation:
    made = Conversation()
    for item in items:
        made.add(item)
    return made


def messages(*items: Item, accepts: frozenset[str] = ALL, prefer_transcripts: bool = False) -> tuple[Message, ...]:
    chat, _ = conversation(*items).to_chat(None, accepts=accepts, prefer_transcripts=prefer_transcripts)
    return chat.messages


def text(role: str, words: str) -> Message:
    return Message(role, (TextPart(words),))  # type: ignore[arg-type]


def question(words: str = "q") -> Item:
    return Item.message("user", [InputText(words)])


def call(call_id: str, name: str = "f", arguments: str = '{"a": 1}') -> Item:
    return Item.function_call(name, arguments, call_id=call_id)


def output(call_id: str, words: str) -> Item:
    return Item.function_call_output(call_id, words)


def test_a_whole_conversation() -> None:
    first, second = numpy.arange(4, dtype=numpy.float32), numpy.ones(2, numpy.float32)
    chat, media = conversation(
        Item.message("system", [InputText("The user is in Paris.")]),
        Item.message("user", [InputText("Look:"), InputImage(b"png"), InputAudio(first)]),
        Item.message("assistant", [OutputAudio("A cat.")]),
        Item.message("user", [InputAudio(second)]),
    ).to_chat("Be brief.", [{"type": "function", "name": "f", "parameters": {"type": "object"}}], accepts=ALL)
    assert chat == ChatInput(
        messages=(
            text("system", "Be brief."),
            text("system", "The user is in Paris."),
            Message("user", (TextPart("Look:"), MediaPart("image", 0), MediaPart("audio", 1))),
            text("assistant", "A cat."),
            Message("user", (MediaPart("audio", 2),)),
        ),
        tools=('{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}',),
    )
    assert {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in media.items()} == {
        "media0": ("uint8", (3,), b"png"),
        "media1": ("float32", (480,), first.tobytes() + bytes(4 * 476)),
        "media2": ("float32", (480,), second.tobytes() + bytes(4 * 478)),
    }


def test_audio_that_is_a_view_of_other_audio_travels_whole() -> None:
    samples = numpy.arange(10, dtype=numpy.float32)[::2]
    _, media = conversation(Item.message("user", [InputAudio(samples)])).to_chat(None, accepts=ALL)
    assert bytes(media["media0"].data)[: samples.nbytes] == samples.tobytes()


@pytest.mark.parametrize("count", [1, 79, 80, 81, 159, 160, 161, 240, 16_000])
def test_audio_ends_in_a_moment_of_silence_and_with_a_whole_hop(count: int) -> None:
    _, media = conversation(Item.message("user", [InputAudio(numpy.ones(count, numpy.float32))])).to_chat(None, accepts=ALL)
    sent = numpy.frombuffer(media["media0"].data, numpy.float32)
    assert len(sent) % 160 == 0 and 400 <= len(sent) - count < 560
    assert sent[:count].all() and not sent[count:].any()


def test_no_instructions_is_no_message() -> None:
    for instructions in (None, ""):
        assert conversation(question()).to_chat(instructions, accepts=ALL)[0].messages == (QUESTION,)


def test_a_conversation_may_be_empty() -> None:
    assert conversation().to_chat(None, accepts=ALL) == (ChatInput(()), {})


def test_other_items_in_place_of_the_conversations() -> None:
    chat, _ = conversation(question("theirs")).to_chat("i", items=[question()], accepts=ALL)
    assert chat.messages == (text("system", "i"), QUESTION)
    assert conversation(question("theirs")).to_chat(None, items=[], accepts=ALL)[0].messages == ()


def test_texts_side_by_side_are_one() -> None:
    made = messages(Item.message("user", [InputText("a"), InputText("b "), InputText("c"), InputText(" "), InputText("d")]))
    assert made == (text("user", "a\nb c\nd"),)


def test_an_interrupted_answer_is_what_was_said_of_it() -> None:
    spoken = OutputAudio()
    spoken.add_text("One two three four.")
    spoken.add_audio(1000.0, 8)
    spoken.add_audio(1000.0, 19)
    made = conversation(question(), Item.message("assistant", [spoken], item_id="a", status="incomplete"), question("go on"))
    made.truncate("a", 0, 1000)
    assert made.to_chat(None, accepts=ALL)[0].messages == (QUESTION, text("assistant", "One two"), text("user", "go on"))
    made.truncate("a", 0, 0)
    assert made.to_chat(None, accepts=ALL)[0].messages == (QUESTION, text("user", "go on"))


def test_what_is_empty_or_in_progress_is_left_out() -> None:
    made = messages(
        Item.message("user", []),
        Item.message("user", [InputText("  \n")]),
        Item.message("user", [InputAudio(numpy.empty(0, numpy.float32))]),
        question(),
        Item.message("assistant", [OutputText("half a")], status="in_progress"),
        Item.function_call("f", status="in_progress"),
    )
    assert made == (QUESTION,)


def test_audio_that_is_not_taken_stands_as_its_transcript() -> None:
    samples = numpy.ones(100, numpy.float32)
    known, unknown = Item.message("user", [InputAudio(samples, "hello")]), Item.message("user", [InputAudio(samples)])
    assert messages(known, unknown, accepts=frozenset()) == (text("user", "hello"),)
    assert messages(known, unknown) == (Message("user", (MediaPart("audio", 0),)), Message("user", (MediaPart("audio", 1),)))


def test_audio_with_a_transcript_need_not_be_heard_again() -> None:
    samples = numpy.ones(100, numpy.float32)
    noise = Item.message("user", [InputAudio(samples, "")])
    made = messages(
        Item.message("user", [InputAudio(samples, "hello")]),
        noise,
        Item.message("user", [InputAudio(samples)]),
        prefer_transcripts=True,
    )
    assert made == (text("user", "hello"), Message("user", (MediaPart("audio", 0),)))


def test_a_transcript_without_audio_stands_for_itself() -> None:
    assert messages(Item.message("user", [InputAudio(numpy.empty(0, numpy.float32), "hello")])) == (text("user", "hello"),)


def test_images_that_are_not_taken_are_left_out() -> None:
    item = Item.message("user", [InputImage(b"png"), InputText("q")])
    assert messages(item, accepts=frozenset({"audio"})) == (QUESTION,)


def test_a_call_and_its_output() -> None:
    assert messages(question(), call("1"), output("1", "42")) == (
        QUESTION,
        Message("assistant", (), (ToolCall("f", '{"a": 1}'),)),
        text("tool", "42"),
    )


def test_words_and_calls_of_one_answer_are_one_message_and_outputs_follow_in_the_calls_order() -> None:
    made = messages(
        question(),
        Item.message("assistant", [OutputText("Let me see.")]),
        call("1", "f"),
        call("2", "g", ""),
        output("2", "second"),
        output("1", ""),
        Item.message("assistant", [OutputText("Done.")]),
    )
    assert made == (
        QUESTION,
        Message("assistant", (TextPart("Let me see."),), (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"))),
        text("tool", NO_OUTPUT),
        text("tool", "second"),
        text("assistant", "Done."),
    )


def test_an_output_goes_behind_its_call_whatever_was_said_in_between() -> None:
    assert messages(call("1"), question(), output("1", "42")) == (
        Message("assistant", (), (ToolCall("f", '{"a": 1}'),)),
        text("tool", "42"),
        QUESTION,
    )


def test_a_call_without_an_output_never_takes_anothers() -> None:
    made = messages(call("1", "slow"), call("2", "quick"), output("2", "42"), question())
    assert made == (
        Message("assistant", (), (ToolCall("quick", '{"a": 1}'),)),
        text("tool", "42"),
        Message("assistant", (), (ToolCall("slow", '{"a": 1}'),)),
        QUESTION,
    )


def test_an_unanswered_call_alone_stays() -> None:
    said = Item.message("assistant", [OutputText("Wait.")])
    assert messages(said, call("1"), question()) == (
        Message("assistant", (TextPart("Wait."),), (ToolCall("f", '{"a": 1}'),)),
        QUESTION,
    )
    assert messages(call("1")) == (Message("assistant", (), (ToolCall("f", '{"a": 1}'),)),)


def test_a_deleted_call_takes_its_output_out_of_the_prompt() -> None:
    made = conversation(question(), call("1"), output("1", "42"), question("and now?"))
    made.delete(made.items[1].id)
    assert made.to_chat(None, accepts=ALL)[0].messages == (QUESTION, text("user", "and now?"))


def test_a_call_that_broke_off_is_left_out() -> None:
    broken = Item.function_call("f", '{"a": "b', call_id="1", status="incomplete")
    said = Item.message("assistant", [OutputText("Wait.")])
    assert messages(question(), said, broken, output("1", "42")) == (QUESTION, text("assistant", "Wait."))


def test_an_outputs_first_version_counts() -> None:
    assert messages(call("1"), output("1", "42"), output("1", "43"))[1:] == (text("tool", "42"),)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "f", "description": "déjà", "parameters": {"type": "object"}, "strict": None},
        {"type": "function", "function": {"name": "f", "description": "déjà", "parameters": {"type": "object"}}},
    ],
)
def test_tools_have_openais_chat_form(tool: dict[str, object]) -> None:
    made = chat_tool(tool)
    assert "déjà" in made
    assert json.loads(made) == {
        "type": "function",
        "function": {"name": "f", "description": "déjà", "parameters": {"type": "object"}},
    }
