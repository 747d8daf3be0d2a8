"""Items as clients send them: read whole, or refused with the field's name."""

from __future__ import annotations

import base64
import json

import numpy
import pytest

from omni_bus.api.voice.item_json import item_from_json
from omni_bus.api.voice.items import InputAudio, InputImage, InputText, OutputAudio, OutputText
from omni_bus.errors import InvalidRequest, ModelRefused, OmniBusError, UndecodableMedia


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def message(*content: object, role: str = "user", **fields: object) -> bytes:
    return json.dumps({"type": "message", "role": role, "content": list(content), **fields}).encode()


def test_a_users_message_with_every_kind_of_part() -> None:
    pcm = (numpy.sin(numpy.arange(24_000) * 0.05) * 8000).astype(numpy.int16).tobytes()
    item = item_from_json(
        message(
            {"type": "input_text", "text": "Look"},
            {"type": "input_audio", "audio": b64(pcm), "transcript": "la"},
            {"type": "input_image", "image_url": "data:image/png;base64," + b64(b"png"), "detail": "low"},
            id="mine",
            status="in_progress",
            object="realtime.item",
            unknown={"is": "ignored"},
        )
    )
    assert (item.id, item.kind, item.role, item.status) == ("mine", "message", "user", "completed")
    words, audio, image = item.content
    assert words == InputText("Look") and image == InputImage(b"png")
    assert isinstance(audio, InputAudio) and audio.transcript == "la"
    assert audio.pcm16k.dtype == numpy.float32 and audio.duration_ms == pytest.approx(1000, abs=2)
    assert float(numpy.abs(audio.pcm16k).max()) == pytest.approx(8000 / 32768, rel=0.02)


def test_audio_is_in_the_sessions_format() -> None:
    (part,) = item_from_json(message({"type": "input_audio", "audio": b64(b"\xff" * 8000)}), input_format="pcmu").content
    assert isinstance(part, InputAudio) and part.duration_ms == pytest.approx(1000, abs=2)


def test_audio_of_earlier_turns_may_be_its_transcript_alone() -> None:
    (part,) = item_from_json(message({"type": "input_audio", "transcript": "hello"}), accepts=frozenset()).content
    assert isinstance(part, InputAudio) and part.transcript == "hello" and not len(part.pcm16k)


def test_messages_of_the_other_roles() -> None:
    assert item_from_json(message({"type": "input_text", "text": "s"}, role="system")).content == [InputText("s")]
    said = item_from_json(
        message({"type": "output_text", "text": "t"}, {"type": "output_audio", "transcript": "a"}, role="assistant")
    )
    assert said.content == [OutputText("t"), OutputAudio("a")] and said.role == "assistant"


@pytest.mark.parametrize("kind", ["text", "input_text"])
def test_stock_clients_names_for_text_of_any_role(kind: str) -> None:
    part = {"type": kind, "text": "t"}
    assert item_from_json(message(part, role="assistant")).content == [OutputText("t")]
    assert item_from_json(message(part, role="user")).content == [InputText("t")]
    assert item_from_json(message(part, role="system")).content == [InputText("t")]


def test_calls_and_outputs() -> None:
    call = item_from_json(b'{"type":"function_call","name":"f","arguments":"{\\"a\\": 1}","call_id":"c","id":"i"}')
    assert (call.kind, call.name, call.arguments, call.call_id, call.id) == ("function_call", "f", '{"a": 1}', "c", "i")
    assert item_from_json(b'{"type":"function_call","name":"f","arguments":""}').call_id.startswith("call_")
    output = item_from_json(b'{"type":"function_call_output","call_id":"c","output":""}')
    assert (output.kind, output.call_id, output.output) == ("function_call_output", "c", "")
    assert output.id.startswith("item_")


PNG = {"type": "input_image", "image_url": "data:image/png;base64," + b64(b"png")}
WRONG: dict[str, tuple[bytes, type[OmniBusError], str]] = {
    "no_object": (b"[]", InvalidRequest, "item"),
    "no_type": (b"{}", InvalidRequest, "item.type"),
    "unknown_type": (b'{"type":"item_reference","id":"x"}', InvalidRequest, "item.type"),
    "type_of_a_wrong_type": (b'{"type":5}', InvalidRequest, "item.type"),
    "unknown_role": (message({"type": "input_text", "text": "x"}, role="tool"), InvalidRequest, "item.role"),
    "no_content": (b'{"type":"message","role":"user"}', InvalidRequest, "item.content"),
    "empty_content": (message(), InvalidRequest, "item.content"),
    "a_part_that_is_no_object": (message("hello"), InvalidRequest, "item.content[0]"),
    "a_part_without_a_type": (message({"text": "x"}), InvalidRequest, "item.content[0].type"),
    "a_part_of_another_role": (message({"type": "output_text", "text": "x"}), InvalidRequest, "item.content[0].type"),
    "audio_of_the_system": (message({"type": "input_audio"}, role="system"), InvalidRequest, "item.content[0].type"),
    "text_without_text": (message({"type": "input_text"}), InvalidRequest, "item.content[0].text"),
    "text_of_a_wrong_type": (message({"type": "input_text", "text": 5}), InvalidRequest, "item.content[0].text"),
    "the_second_part": (message({"type": "input_text", "text": "x"}, {"type": "x"}), InvalidRequest, "item.content[1].type"),
    "audio_without_audio": (message({"type": "input_audio"}), InvalidRequest, "item.content[0].audio"),
    "audio_that_is_no_base64": (message({"type": "input_audio", "audio": "!"}), InvalidRequest, "item.content[0].audio"),
    "half_a_sample": (message({"type": "input_audio", "audio": b64(b"abc")}), UndecodableMedia, "item.content[0].audio"),
    "an_image_by_http": (
        message({"type": "input_image", "image_url": "http://localhost/x.png"}),
        InvalidRequest,
        "item.content[0].image_url",
    ),
    "an_image_without_address": (message({"type": "input_image"}), InvalidRequest, "item.content[0].image_url"),
    "an_image_that_is_no_base64": (
        message({"type": "input_image", "image_url": "data:image/png;base64,!"}),
        InvalidRequest,
        "item.content[0].image_url",
    ),
    "an_answers_audio": (
        message({"type": "output_audio", "audio": b64(b"ab")}, role="assistant"),
        InvalidRequest,
        "item.content[0].transcript",
    ),
    "a_call_without_a_name": (b'{"type":"function_call","arguments":"{}"}', InvalidRequest, "item.name"),
    "a_call_with_an_empty_name": (b'{"type":"function_call","name":"","arguments":"{}"}', InvalidRequest, "item.name"),
    "a_call_without_arguments": (b'{"type":"function_call","name":"f"}', InvalidRequest, "item.arguments"),
    "arguments_that_are_no_json": (b'{"type":"function_call","name":"f","arguments":"{"}', InvalidRequest, "item.arguments"),
    "arguments_that_are_no_object": (b'{"type":"function_call","name":"f","arguments":"[]"}', InvalidRequest, "item.arguments"),
    "an_output_without_a_call": (b'{"type":"function_call_output","output":"x"}', InvalidRequest, "item.call_id"),
    "an_output_that_is_no_text": (b'{"type":"function_call_output","call_id":"c","output":1}', InvalidRequest, "item.output"),
    "an_empty_id": (message({"type": "input_text", "text": "x"}, id=""), InvalidRequest, "item.id"),
    "more_parts_than_a_message_may_have": (
        message(*({"type": "input_text", "text": ""} for _ in range(257))),
        InvalidRequest,
        "item.content",
    ),
    "an_endless_id": (message({"type": "input_text", "text": "x"}, id="x" * 1000), InvalidRequest, "item.id"),
}


@pytest.mark.parametrize("name", WRONG)
def test_is_refused_by_the_fields_name(name: str) -> None:
    raw, kind, param = WRONG[name]
    with pytest.raises(kind) as caught:
        item_from_json(raw)
    assert caught.value.param == param
    assert param in caught.value.message and "\n" not in caught.value.message and len(caught.value.message) < 300


@pytest.mark.parametrize(("part", "kind"), [({"type": "input_audio", "audio": b64(bytes(48))}, "audio"), (PNG, "image")])
def test_media_that_the_model_does_not_take_are_refused(part: object, kind: str) -> None:
    with pytest.raises(ModelRefused, match=kind):
        item_from_json(message(part), accepts=frozenset({"audio", "image"} - {kind}))


def test_the_fields_name_begins_where_the_item_stands() -> None:
    with pytest.raises(InvalidRequest) as caught:
        item_from_json(message(), where="response.input[2]")
    assert caught.value.param == "response.input[2].content"
