"""Functions in chat completions as the openai package sees them, over the real bus: the probe pipeline says what it is told."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.test_api_probe import FAULTS, SAMPLES_PER_WORD
from tests.support.running_server import Server

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PARIS, ROME = '{"city": "Paris, France"}', '{"city": "Rome"}'


def written(*arguments: str) -> str:
    return " ".join(f'<tool_call> {{"name": "get_weather", "arguments": {one}}} </tool_call>' for one in arguments)


@pytest.fixture
def client(shared_server: Any) -> Iterator[openai.OpenAI]:
    server = shared_server("probe.toml", sets=FAULTS)  # the one that test_api_probe.py has
    assert isinstance(server, Server)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_call_its_result_and_the_next_answer(client: openai.OpenAI) -> None:
    messages = ask(written(PARIS, ROME))
    choice = client.chat.completions.create(model="probe", messages=messages, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls is not None
    calls = [call for call in choice.message.tool_calls if call.type == "function"]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("get_weather", PARIS), ("get_weather", ROME)]
    assert len({call.id for call in calls}) == 2
    messages.append(choice.message)  # as the package's own guide does it
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in reversed(calls)]
    answer = client.chat.completions.create(model="probe", messages=[*messages, *ask("Thanks.")], tools=[WEATHER]).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("Thanks. ", None, "stop")
    messages[-1]["tool_call_id"] = "no such call"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="probe", messages=messages, tools=[WEATHER])
    assert wrong.value.param == "messages[3].tool_call_id"


def test_a_streamed_call_as_the_packages_own_stream_reads_it(client: openai.OpenAI) -> None:
    said = f"Let me look. {written(PARIS, ROME)}"
    with client.chat.completions.stream(model="probe", messages=ask(said), tools=[WEATHER]) as stream:
        seen = list(stream)
        choice = stream.get_final_completion().choices[0]
    done = [event for event in seen if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.index, event.arguments) for event in done] == [
        ("get_weather", 0, PARIS),
        ("get_weather", 1, ROME),
    ]
    pieces = [event for event in seen if event.type == "tool_calls.function.arguments.delta" and event.index == 0]
    assert "".join(event.arguments_delta for event in pieces) == PARIS and len(pieces) > 1
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert [call.function.parsed_arguments for call in choice.message.tool_calls or ()] == [json.loads(PARIS), json.loads(ROME)]


def test_raw_chunks_of_a_streamed_call(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="probe", messages=ask(written(PARIS)), tools=[WEATHER], stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = stream
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and all(delta.content is None for delta in deltas)
    first, *rest = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert first.id and first.type == "function" and first.function is not None
    assert (first.index, first.function.name, first.function.arguments) == (0, "get_weather", "")
    assert all(piece.index == 0 and piece.id is None and piece.function and piece.function.name is None for piece in rest)
    assert "".join(piece.function.arguments or "" for piece in rest if piece.function) == PARIS
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == len(written(PARIS).split())


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_alone_has_no_sound_and_words_have_theirs(client: openai.OpenAI, stream: bool) -> None:
    def sound(text: str, **fields: Any) -> bytes:
        made = client.chat.completions.create(
            model="probe",
            messages=ask(text),
            tools=[WEATHER],
            modalities=["text", "audio"],
            audio={"voice": "tone", "format": "pcm16"},
            stream=stream,
            **fields,
        )
        if stream:
            deltas = [chunk.choices[0].delta.model_dump() for chunk in made]
            return b"".join(base64.b64decode(delta["audio"]["data"]) for delta in deltas if delta.get("audio"))
        audio = made.choices[0].message.audio
        return b"" if audio is None else base64.b64decode(audio.data)

    assert sound(written(PARIS)) == b""
    assert sound("<tool_call> {oops} </tool_call>") == sound("a b c", tool_choice="none")
    assert len(sound("one two three four")) == 4 * SAMPLES_PER_WORD * 2
