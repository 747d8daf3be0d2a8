"""Functions, calls and their results in a prompt: as transformers renders them, and no text of a client ever a control token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_bus.errors import InvalidRequest, ModelRefused
from omni_bus.payloads import ChatInput, Message, TextPart, ToolCall
from omni_bus.stages.qwen3_omni.processor import Processor
from tests.support.qwen3_omni import Reference
from tests.support.stage_pipeline import StagePipeline

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather "now", in °C.\n<b>Not</b> tomorrow\'s.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Zürich", "Łódź"]},
                "at least": {"type": "integer", "minimum": 0},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ARGUMENTS = '{"city":  "Zürich", "at least": 1}'  # a model's own spacing
CONTROL = ("<|im_end|>", "<tool_call>", "</tool_call>", "<|im_start|>system\n", "</tools>", "\ue0f00\ue0f1", "{{ tools }}")


@pytest.fixture
def processor(omni_pipeline: StagePipeline) -> Processor:
    return omni_pipeline.stages["processor"]._processor  # type: ignore[attr-defined,no-any-return]


def text(role: Any, content: str, *calls: ToolCall) -> Message:
    return Message(role, (TextPart(content),) if content else (), calls)


def conversation(said: str = "Will it rain?", answer: str = "It will.", arguments: str = ARGUMENTS) -> tuple[Message, ...]:
    return (
        text("system", "S."),
        text("user", said),
        text("assistant", "", ToolCall("get_weather", arguments), ToolCall("clock", "{}")),
        text("tool", answer),
        text("tool", ""),
        text("assistant", "Yes.", ToolCall("clock", "{}")),
        text("tool", "12:00"),
        text("user", "Thanks."),
    )


def openai(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    out = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": "".join(part.text for part in message.parts)}  # type: ignore[union-attr]
        if message.tool_calls:
            one["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        out.append(one)
    return out


@pytest.mark.parametrize("tools", [(), (WEATHER,), (WEATHER, CLOCK)], ids=["none", "one", "two"])
def test_tools_and_calls_are_rendered_as_transformers_does(
    tools: tuple[dict[str, Any], ...], processor: Processor, reference: Reference
) -> None:
    for messages in (conversation(), conversation()[1:], conversation()[:2]):
        rendered = reference.tokenizer.apply_chat_template(
            openai(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
        chat = ChatInput(messages, tuple(json.dumps(tool) for tool in tools))
        assert processor.prepare(chat, {}).token_ids == reference.tokenizer(rendered)["input_ids"]


def test_call_tags_of_the_template_are_tokens_of_their_own(processor: Processor, reference: Reference) -> None:
    ids = processor.prepare(ChatInput(conversation()), {}).token_ids
    begin, end = reference.tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    assert ids.count(begin) == ids.count(end) == 3
    assert ids.count(reference.tokenizer.convert_tokens_to_ids("<tool_response>")) == 3


def mutated(value: Any, typed: str) -> Any:
    """Every string of a JSON value, and every key that a template does not look up, with `typed` in it."""
    if isinstance(value, str):
        return value + typed
    if isinstance(value, list):
        return [mutated(one, typed) for one in value]
    if isinstance(value, dict):
        return {key if key.isidentifier() else key + typed: mutated(one, typed) for key, one in value.items()}
    return value


@pytest.mark.parametrize("typed", CONTROL)
def test_control_tokens_in_any_part_of_tools_stay_text(typed: str, processor: Processor, reference: Reference) -> None:
    control = set(reference.tokenizer.added_tokens_decoder)

    def prompt(typed: str) -> list[int]:
        tool = {"type": "function", "function": mutated(WEATHER["function"], typed)}
        messages = conversation("Rain? " + typed, "It will. " + typed, json.dumps({"city" + typed: typed}, ensure_ascii=False))
        return processor.prepare(ChatInput(messages, (json.dumps(tool),)), {}).token_ids

    ids = prompt(typed)
    assert [token for token in ids if token in control] == [token for token in prompt("o") if token in control]
    shown = json.dumps(typed, ensure_ascii=False)[1:-1]
    decoded = reference.tokenizer.decode(ids)
    assert decoded.count(typed) >= 2 and decoded.count(shown) >= 8


@pytest.mark.parametrize(
    "tool",
    [
        "",
        "{",
        "[]",
        "3",
        '"clock"',
        '{"type": "function"}',
        '{"type": "function", "function": []}',
        '{"type": "function", "function": {}}',
        '{"type": "function", "function": {"name": ""}}',
        '{"type": "function", "function": {"name": 3}}',
        '{"type": "web_search", "function": {"name": "a"}}',
        '{"type": "function", "function": {"name": "a", "parameters": "none"}}',
        "[" * 100_000,
        '{"type": "function", "function": {"name": "a", "parameters": {"a": ' + "[" * 200 + "]" * 200 + "}}}",
    ],
)
def test_what_is_no_function_is_refused_by_name(tool: str, processor: Processor) -> None:
    with pytest.raises(InvalidRequest) as refused:
        processor.prepare(ChatInput((text("user", "x"),), (json.dumps(CLOCK), tool)), {})
    assert refused.value.param == "tools" and len(refused.value.message) < 200


def test_messages_that_cannot_be(processor: Processor) -> None:
    call = ToolCall("clock", "{}")
    for messages in ((text("user", "x", call),), (text("user", "x"), text("assistant", "")), (text("user", ""),)):
        with pytest.raises(ModelRefused):
            processor.prepare(ChatInput(messages), {})


@pytest.mark.parametrize(
    ("template", "field"),
    [
        (
            "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor -%}",
            "tools",
        ),
        ("{{ tools }}<|im_start|>user\n{{ messages[-1].content }}<|im_end|>\n", "messages"),
        ("{{ raise_exception('no tools with ' + messages[0].content) }}", "messages"),
    ],
    ids=["no tools", "no history", "refuses"],
)
def test_a_template_without_a_place_for_a_part_is_told_not_passed_over(template: str, field: str, processor: Processor) -> None:
    tokenizer = processor.encoder._tokenizer
    kept = tokenizer.chat_template
    tokenizer.chat_template = template + "<|im_start|>assistant\n"
    try:
        with pytest.raises(ModelRefused, match="chat template") as refused:
            processor.prepare(ChatInput(conversation()[:2], (json.dumps(CLOCK),)), {})
    finally:
        tokenizer.chat_template = kept
    assert refused.value.param == field and "rain" not in refused.value.message


def test_a_template_that_writes_arguments_as_json_gets_the_object(processor: Processor, reference: Reference) -> None:
    """Some templates pass arguments through tojson whatever they are; a string would come out in quotes."""
    tokenizer = processor.encoder._tokenizer
    kept = tokenizer.chat_template
    tokenizer.chat_template = (
        "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{%- for call in message.tool_calls or [] -%}{{ call.function.name }}({{ call.function.arguments | tojson }}){%- endfor -%}"
        "<|im_end|>\n{%- endfor -%}<|im_start|>assistant\n"
    )
    try:
        ids = processor.prepare(ChatInput(conversation()), {}).token_ids
    finally:
        tokenizer.chat_template = kept
    assert f"get_weather({ARGUMENTS})clock({{}})" in reference.tokenizer.decode(ids)
