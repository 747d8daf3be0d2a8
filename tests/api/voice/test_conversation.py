"""A conversation's items: their order, their ids, their deletion, and what is dropped when there are too many."""

from __future__ import annotations

import numpy
import pytest

from omni_bus.api.voice.conversation import Conversation, ConversationError, ConversationLimits
from omni_bus.api.voice.items import InputAudio, InputImage, InputText, Item, OutputAudio, OutputText
from omni_bus.errors import OmniBusError, from_info


def user(item_id: str, text: str = "hello") -> Item:
    return Item.message("user", [InputText(text)], item_id=item_id)


def heard(item_id: str, seconds: float) -> Item:
    return Item.message("user", [InputAudio(numpy.zeros(int(seconds * 16_000), numpy.float32))], item_id=item_id)


def ids(conversation: Conversation) -> list[str]:
    return [item.id for item in conversation]


def error_of(call: object, *arguments: object, **fields: object) -> ConversationError:
    with pytest.raises(ConversationError) as caught:
        call(*arguments, **fields)  # type: ignore[operator]
    return caught.value


def test_items_stand_where_they_were_put() -> None:
    conversation = Conversation()
    assert conversation.add(user("a")) is None
    assert conversation.add(user("b")) == "a"
    assert conversation.add(user("c"), "a") == "a"
    assert conversation.add(user("d"), "root") is None
    assert conversation.add(user("e"), "b") == "b"
    assert ids(conversation) == ["d", "a", "c", "b", "e"]
    assert [conversation.previous_id(name) for name in ids(conversation)] == [None, "d", "a", "c", "b"]


def test_ids_of_ours_differ_and_say_what_they_are() -> None:
    made = {Item.message("user").id for _ in range(100)}
    assert len(made) == 100 and all(name.startswith("item_") for name in made)
    assert Item.function_call("f").call_id.startswith("call_")


def test_an_id_that_is_there_already_is_refused_and_changes_nothing() -> None:
    conversation = Conversation()
    conversation.add(user("a", "first"))
    error = error_of(conversation.add, user("a", "second"))
    assert (error.code, error.param) == ("item_create_duplicate_item_id", "item.id")
    assert [part.text for item in conversation for part in item.content if isinstance(part, InputText)] == ["first"]


def test_the_same_id_in_two_conversations_is_two_items() -> None:
    one, other = Conversation(), Conversation()
    one.add(user("a", "one"))
    other.add(user("a", "other"))
    one.delete("a")
    assert ids(one) == [] and ids(other) == ["a"]


def test_an_unknown_previous_item_is_refused_and_nothing_is_added() -> None:
    conversation = Conversation()
    conversation.add(user("a"))
    error = error_of(conversation.add, user("b"), "nowhere")
    assert (error.code, error.param) == ("item_create_invalid_previous_item_id", "previous_item_id")
    assert ids(conversation) == ["a"] and "b" not in conversation
    conversation.add(user("b"))
    assert ids(conversation) == ["a", "b"]


@pytest.mark.parametrize("action", ["retrieve", "delete", "truncate"])
def test_an_unknown_item_is_an_error_with_openais_code(action: str) -> None:
    conversation = Conversation()
    calls = {
        "retrieve": lambda: conversation.get("x"),
        "delete": lambda: conversation.delete("x"),
        "truncate": lambda: conversation.truncate("x", 0, 0),
    }
    error = error_of(calls[action])
    assert (error.code, error.param, error.status) == (f"item_{action}_invalid_item_id", "item_id", 400)


def test_an_error_quotes_no_more_than_a_little_of_an_id() -> None:
    assert len(error_of(Conversation().get, "x" * 10_000).message) < 200


def test_an_error_survives_the_bus_as_its_base_class() -> None:
    error = error_of(Conversation().get, "x")
    back = from_info(error.info())
    assert isinstance(back, OmniBusError) and (back.code, back.status) == (error.code, 400)


def test_a_deleted_id_may_be_used_again() -> None:
    conversation = Conversation()
    conversation.add(user("a", "first"))
    assert conversation.delete("a").id == "a"
    conversation.add(user("a", "second"))
    assert conversation.get("a").content == [InputText("second")]


def test_the_oldest_items_are_dropped_and_told() -> None:
    dropped: list[str] = []
    conversation = Conversation(ConversationLimits(max_items=3), evicted=lambda item: dropped.append(item.id))
    for name in "abcde":
        conversation.add(user(name))
    assert ids(conversation) == ["c", "d", "e"] and dropped == ["a", "b"]
    assert "a" not in conversation
    error_of(conversation.get, "a")


def test_audio_over_the_limit_drops_whole_items() -> None:
    dropped: list[str] = []
    conversation = Conversation(ConversationLimits(max_audio_s=10), evicted=lambda item: dropped.append(item.id))
    conversation.add(heard("a", 4))
    conversation.add(user("text"))
    conversation.add(heard("b", 4))
    assert not dropped
    conversation.add(heard("c", 3))
    assert dropped == ["a"] and ids(conversation) == ["text", "b", "c"]


def test_images_and_text_over_the_limit_drop_items() -> None:
    conversation = Conversation(ConversationLimits(max_other_bytes=100))
    conversation.add(Item.message("user", [InputImage(bytes(60))], item_id="a"))
    conversation.add(Item.message("user", [InputText("x" * 60)], item_id="b"))
    assert ids(conversation) == ["b"]


def test_an_answer_in_progress_and_the_newest_item_are_never_dropped() -> None:
    conversation = Conversation(ConversationLimits(max_items=2))
    conversation.add(Item.message("assistant", [OutputText("")], item_id="answer", status="in_progress"))
    conversation.add(user("b"))
    conversation.add(user("c"))
    conversation.add(user("first"), "root")
    assert ids(conversation) == ["first", "answer"]


def test_an_item_larger_than_the_limits_is_refused() -> None:
    conversation = Conversation(ConversationLimits(max_audio_s=2))
    conversation.add(user("a"))
    assert error_of(conversation.add, heard("b", 3)).param == "item"
    assert ids(conversation) == ["a"]


def test_items_are_shown_as_the_protocol_has_them() -> None:
    samples = numpy.zeros(16_000, numpy.float32)
    shown = Item.message("user", [InputText("hi"), InputAudio(samples, "yes"), InputImage(b"png")], item_id="u").to_json()
    assert shown == {
        "id": "u",
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "hi"},
            {"type": "input_audio", "transcript": "yes"},
            {"type": "input_image", "detail": "auto"},
        ],
    }
    answer = Item.message("assistant", [OutputText("a"), OutputAudio("b", 10.0)], item_id="x", status="in_progress").to_json()
    assert answer["content"] == [{"type": "output_text", "text": "a"}, {"type": "output_audio", "transcript": "b"}]
    assert answer["status"] == "in_progress"
    assert Item.function_call("f", '{"a":1}', call_id="c", item_id="x").to_json() == {
        "id": "x",
        "object": "realtime.item",
        "type": "function_call",
        "status": "completed",
        "name": "f",
        "call_id": "c",
        "arguments": '{"a":1}',
    }
    assert Item.function_call_output("c", "42", item_id="x").to_json() == {
        "id": "x",
        "object": "realtime.item",
        "type": "function_call_output",
        "status": "completed",
        "call_id": "c",
        "output": "42",
    }


def test_the_openai_package_reads_every_item() -> None:
    from openai.types.realtime import conversation_item
    from pydantic import TypeAdapter

    reader: TypeAdapter[object] = TypeAdapter(conversation_item.ConversationItem)
    items = (
        Item.message("user", [InputText("hi"), InputAudio(numpy.zeros(10, numpy.float32)), InputImage(b"png")]),
        Item.message("assistant", [OutputText("a"), OutputAudio("b")]),
        Item.message("system", [InputText("s")]),
        Item.function_call("f", "{}"),
        Item.function_call_output("c", "1"),
    )
    for item in items:
        read = reader.validate_python(item.to_json())
        assert read.id == item.id and read.type == item.kind  # type: ignore[attr-defined]
