"""Functions in /v1/chat/completions: what the bus is asked of them, and calls in whole and streamed answers, with and without sound."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest

from omni_bus.client import StreamItem
from omni_bus.errors import StageFailed
from omni_bus.payloads import Message, TextPart, ToolCall
from tests.support.scripted_bus import PCM_CHUNK, audio, heard, text

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now>, in °C.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = {"tools": [WEATHER, CLOCK]}
SPEECH = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
PARIS = '{"city": "Paris", "é": [1, {"b": "}"}]}'


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deltas(answer: str, size: int = 3, reason: str = "stop") -> tuple[StreamItem, ...]:
    """A model's text, cut without regard to what it says."""
    return (*(text(answer[start : start + size]) for start in range(0, len(answer), size)), text("", reason))


async def events(server: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        blocks = (await answer.text()).split("\n\n")
    assert blocks.pop() == "" and blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def put_together(seen: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], bytes]:
    """A stream's message as a client makes it of the deltas, and its sound."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    sound = b""
    for event in seen:
        delta = event["choices"][0]["delta"]
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        sound += base64.b64decode(delta.get("audio", {}).get("data", ""))
        for piece in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"} and piece["function"]["arguments"] == ""
                calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
            else:
                assert piece["index"] == len(calls) - 1 and set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"} and piece["function"]["arguments"]
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return message, sound


def without_ids(message: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]]]:
    """(content, [(name, arguments)]); each call must have an id of its own."""
    calls = message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls) and message.get("tool_calls") != []
    return message["content"], [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


ONE = written("get_weather", PARIS)
ANSWERS: dict[str, tuple[str, str | None, list[tuple[str, str]]]] = {
    "a_call": (ONE, None, [("get_weather", PARIS)]),
    "two_calls": (f"{ONE}\n{written('clock', '{}')}", None, [("get_weather", PARIS), ("clock", "{}")]),
    "words_and_a_call": (f"Let me look.\n\n{ONE}", "Let me look.", [("get_weather", PARIS)]),
    "words_behind_a_call": (f"{ONE}\nDone.", "Done.", [("get_weather", PARIS)]),
    "a_call_without_arguments": ('<tool_call>{"name": "clock"}</tool_call>', None, [("clock", "{}")]),
    "a_function_that_is_not_on_offer": (written("no_such", "{}"), None, [("no_such", "{}")]),
    "a_call_that_breaks_in_its_arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": tru]}}</tool_call>',
        None,
        [("f", '{"a": tru]')],
    ),
    "words_alone": ("It is sunny.", "It is sunny.", []),
    "nothing": ("", None, []),
    "broken_json": ("<tool_call>{bad}</tool_call>", "<tool_call>{bad}</tool_call>", []),
    "a_call_without_a_name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "a_tag_without_an_end": ("See <tool_ca", "See <tool_ca", []),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_calls_in_an_answer_whole_and_streamed(name: str, server: Any) -> None:
    answer, content, calls = ANSWERS[name]
    reason = "tool_calls" if calls else "stop"
    server.bus.script = deltas(answer)
    status, whole = await server.chat(**TOOLS)
    choice = whole["choices"][0]
    assert status == 200 and choice["finish_reason"] == reason
    # A whole answer knows that there were no calls: an answer of nothing is an empty text, as it is without functions.
    assert without_ids(choice["message"]) == (content if content is not None or calls else "", calls)
    for size in (1, 7, 1000):
        server.bus.script = deltas(answer, size)
        seen = await events(server, **TOOLS)
        assert seen[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
        assert without_ids(put_together(seen)[0]) == (content, calls)
        assert [event["choices"][0]["finish_reason"] for event in seen] == [None] * (len(seen) - 1) + [reason]


async def test_the_events_of_a_streamed_call(server: Any) -> None:
    server.bus.script = (*(text(piece) for piece in ('<tool_call>{"name": "f", ', '"arguments": {"a"', ": 1}}</tool_call>")),)
    server.bus.script += (text("", "stop"),)
    seen = await events(server, **TOOLS, stream_options={"include_usage": True})
    call_id = seen[1]["choices"][0]["delta"]["tool_calls"][0]["id"]
    assert [event["choices"][0]["delta"] for event in seen[:-1]] == [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, "id": call_id, "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {},
    ]
    assert {event["modality"] for event in seen[:-1]} == {"text"} and all(event["usage"] is None for event in seen[:-1])
    assert (seen[-1]["choices"], seen[-1]["usage"]["completion_tokens"]) == ([], 2)


async def test_a_limit_that_cuts_a_call_off_is_the_reason(server: Any) -> None:
    server.bus.script = deltas('<tool_call>{"name": "f", "arguments": {"a": "b', reason="length")
    _, whole = await server.chat(**TOOLS)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert without_ids(whole["choices"][0]["message"]) == (None, [("f", '{"a": "b')])
    assert whole["usage"]["total_tokens"] == 9
    seen = await events(server, **TOOLS)
    assert seen[-1]["choices"][0]["finish_reason"] == "length"
    assert without_ids(put_together(seen)[0]) == (None, [("f", '{"a": "b')])


@pytest.mark.parametrize("parallel", [True, False, None])
async def test_one_call_where_the_client_takes_one(server: Any, parallel: bool | None) -> None:
    server.bus.script = deltas(f"{ONE}\n{written('clock', '{}')}\n{written('clock', PARIS)} So.")
    calls = [("get_weather", PARIS), *([] if parallel is False else [("clock", "{}"), ("clock", PARIS)])]
    _, whole = await server.chat(**TOOLS, parallel_tool_calls=parallel)
    assert without_ids(whole["choices"][0]["message"])[1] == calls
    message, _ = put_together(await events(server, **TOOLS, parallel_tool_calls=parallel))
    assert without_ids(message)[1] == calls


@pytest.mark.parametrize(
    "fields", [{}, {"tools": []}, {"tools": None}, {**TOOLS, "tool_choice": "none"}], ids=["none", "empty", "null", "chosen"]
)
async def test_without_functions_a_call_is_text(server: Any, fields: dict[str, Any]) -> None:
    server.bus.script = deltas(ONE)
    _, whole = await server.chat(**fields)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": ONE}
    seen = await events(server, **fields)
    assert put_together(seen)[0] == {"role": "assistant", "content": ONE}
    assert seen[0]["choices"][0]["delta"]["content"] == "" and seen[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(asked.payload.tools == () for asked in server.bus.submissions)


async def test_a_failure_behind_a_call_is_an_event(server: Any) -> None:
    server.bus.script = (text(ONE), StageFailed("stage thinker failed"))
    *seen, last = await events(server, **TOOLS)
    assert without_ids(put_together(seen)[0])[1] == [("get_weather", PARIS)]
    assert last["error"]["code"] == "stage_failed"


# ---- sound

QUIET, LOUD = b"\x01\x00" * 480, b"\x7f\x00" * 480
WORDS = "Let me look."
SOUNDS: dict[str, tuple[tuple[StreamItem, ...], bytes]] = {
    "a_call_alone_is_silent": ((text(ONE[:5]), audio(LOUD), text(ONE[5:]), audio(LOUD), text("", "stop"), audio(LOUD)), b""),
    "a_call_alone_is_silent_where_the_model_tells": (
        (audio(LOUD, spoken=0), text(ONE), audio(LOUD, spoken=3), text("", "stop"), audio(LOUD, spoken=len(ONE))),
        b"",
    ),
    "words_are_heard_up_to_the_call": (
        (
            text(WORDS),
            audio(QUIET, spoken=6),
            text(f"\n{ONE}", "stop"),
            audio(QUIET, spoken=len(WORDS)),
            audio(LOUD, spoken=len(WORDS) + 1),
            audio(LOUD, spoken=len(WORDS) + len(ONE)),
        ),
        QUIET + QUIET,
    ),
    "words_that_are_spoken_late_are_heard": (
        (text(WORDS), text(f"\n{ONE}", "stop"), audio(QUIET, spoken=6), audio(QUIET, spoken=12), audio(LOUD, spoken=20)),
        QUIET + QUIET,
    ),
    "it_falls_silent_at_the_call_where_it_does_not_tell": (
        (text(WORDS), audio(QUIET), text("\n<tool_call>"), audio(LOUD), text(ONE[11:], "stop"), audio(LOUD)),
        QUIET,
    ),
    "what_only_looked_like_a_call_is_heard": (
        (audio(QUIET), text("<tool"), audio(QUIET), text("box>"), audio(QUIET), text("", "stop"), audio(QUIET)),
        QUIET * 4,
    ),
    "sound_that_is_ahead_of_its_text": ((audio(QUIET, spoken=2), audio(QUIET, spoken=5), text("Hello", "stop")), QUIET * 2),
    "sound_that_is_ahead_of_its_text_and_of_a_call": ((text("Hi"), audio(LOUD, spoken=6), text(ONE, "stop")), b""),
    "white_space_alone": ((text("  "), audio(QUIET, spoken=1), text("", "stop"), audio(QUIET, spoken=2)), QUIET * 2),
    "no_text_at_all": ((audio(QUIET), text("", "stop"), audio(QUIET)), QUIET * 2),
}


@pytest.mark.parametrize("name", SOUNDS)
async def test_sound_of_words_and_none_of_calls(name: str, server: Any) -> None:
    script, sound = SOUNDS[name]
    server.bus.script = (*script, audio(b"", last=True))
    _, whole = await server.chat(**TOOLS, **SPEECH)
    heard_whole = whole["choices"][0]["message"].get("audio")
    assert (base64.b64decode(heard_whole["data"]) if heard_whole else b"") == sound
    message, streamed = put_together(await events(server, **TOOLS, **SPEECH))
    assert streamed == sound
    assert without_ids(message)[1] == without_ids(whole["choices"][0]["message"])[1]
    given = 2 * len(sound) / 2 / 24_000
    assert await server.metric("omni_bus_audio_seconds_total") == pytest.approx(given)
    assert await server.metric("omni_bus_ttfp_seconds_count") == (2 if sound else 0), (
        "sound that nobody gets is no first packet"
    )


async def test_without_functions_no_sound_waits(server: Any) -> None:
    server.bus.script = (audio(), text("<tool_call>"), audio(), text("", "stop"), audio(b"", last=True))
    seen = await events(server, **SPEECH)
    assert [event["modality"] for event in seen] == ["text", "audio", "text", "audio", "text"]
    assert put_together(seen)[1] == PCM_CHUNK * 2


async def test_calls_where_only_sound_is_wanted(server: Any) -> None:
    server.bus.script = (text(WORDS), audio(), text(ONE, "stop"), audio(), audio(b"", last=True))
    _, whole = await server.chat(**TOOLS, modalities=["audio"])
    message = whole["choices"][0]["message"]
    assert without_ids(message) == (None, [("get_weather", PARIS)]) and message["audio"]["transcript"] == WORDS
    seen = await events(server, **TOOLS, modalities=["audio"])
    assert without_ids(put_together(seen)[0]) == (None, [("get_weather", PARIS)])
    assert seen[0]["choices"][0]["delta"] == {"role": "assistant"}


async def test_what_was_heard_comes_before_the_call(server: Any) -> None:
    server.bus.script = (heard("weather in paris"), heard(""), *deltas(ONE))
    seen = await events(server, **TOOLS)
    assert seen[1]["input_transcript"] == "weather in paris" and "tool_calls" in seen[2]["choices"][0]["delta"]
    _, whole = await server.chat(**TOOLS)
    assert whole["choices"][0]["message"]["input_transcript"] == "weather in paris"


# ---- what the bus is asked


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def called(*calls: tuple[str, str, str], content: str | None = None) -> dict[str, Any]:
    """An assistant's message of (id, name, arguments)."""
    made = [{"id": i, "type": "function", "function": {"name": name, "arguments": text}} for i, name, text in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


async def asked(server: Any, **fields: Any) -> Any:
    status, answer = await server.chat(**fields)
    assert status == 200, answer
    return server.bus.submissions[-1].payload


async def test_functions_reach_the_model_in_openais_form(server: Any) -> None:
    payload = await asked(server, **TOOLS, tool_choice="auto")
    assert [json.loads(tool) for tool in payload.tools] == [
        {"type": "function", "function": {name: WEATHER["function"][name] for name in ("name", "description", "parameters")}},  # type: ignore[index]
        CLOCK,
    ]
    assert "°C" in payload.tools[0] and "\n" not in payload.tools[0]
    assert payload.messages == (Message("user", (TextPart("hi"),)),)


async def test_calls_and_results_of_a_history(server: Any) -> None:
    """Results in the order of their calls; ids that a client uses again mean the nearest message before."""
    payload = await asked(
        server,
        messages=[
            user("Rain?"),
            called(("1", "get_weather", PARIS), ("2", "clock", ""), content="Let me look."),
            result("2", "12:00"),
            result("1", [{"type": "text", "text": "no"}, {"type": "text", "text": "ne"}]),
            called(("1", "clock", '{"zone":  "UTC"}')),
            result("1", ""),
            {"role": "assistant", "content": "None."},
            user("Thanks."),
        ],
        **TOOLS,
    )
    assert payload.messages == (
        Message("user", (TextPart("Rain?"),)),
        Message("assistant", (TextPart("Let me look."),), (ToolCall("get_weather", PARIS), ToolCall("clock", "{}"))),
        Message("tool", (TextPart("no"), TextPart("ne"))),
        Message("tool", (TextPart("12:00"),)),
        Message("assistant", (), (ToolCall("clock", '{"zone":  "UTC"}'),)),
        Message("tool", (TextPart(""),)),
        Message("assistant", (TextPart("None."),)),
        Message("user", (TextPart("Thanks."),)),
    )


async def test_an_answers_own_message_can_be_sent_back(server: Any) -> None:
    server.bus.script = deltas(f"Look. {ONE}")
    _, whole = await server.chat(**TOOLS)
    message = whole["choices"][0]["message"]
    payload = await asked(server, messages=[user("hi"), message, result(message["tool_calls"][0]["id"], "sun")])
    assert payload.messages[1:] == (
        Message("assistant", (TextPart("Look."),), (ToolCall("get_weather", PARIS),)),
        Message("tool", (TextPart("sun"),)),
    )


NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("choice", "names", "words"),
    [
        (None, ["get_weather", "clock"], None),
        ("auto", ["get_weather", "clock"], None),
        ("none", [], None),
        ("required", ["get_weather", "clock"], "Answer by calling one of the functions, with no other words."),
        (NAMED, ["clock"], "Answer by calling the function clock, with no other words."),
    ],
    ids=["null", "auto", "none", "required", "named"],
)
async def test_a_choice_of_functions(server: Any, choice: Any, names: list[str], words: str | None) -> None:
    payload = await asked(server, **TOOLS, tool_choice=choice)
    assert [json.loads(tool)["function"]["name"] for tool in payload.tools] == names
    hi = Message("user", (TextPart("hi"),))
    assert payload.messages == ((hi,) if words is None else (Message("system", (TextPart(words),)), hi))
    payload = await asked(
        server, **TOOLS, tool_choice=choice, messages=[{"role": "developer", "content": "Be brief."}, user("hi")]
    )
    system = "Be brief." if words is None else f"Be brief.\n\n{words}"
    assert payload.messages == (Message("system", (TextPart(system),)), hi)


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_a_choice_of_nothing_is_no_fault(server: Any, choice: str) -> None:
    assert (await asked(server, tool_choice=choice)).tools == ()


def refused(param: str, says: str, **fields: Any) -> Any:
    return pytest.param(param, says, fields, id=f"{param}-{says}".replace(" ", "_"))


def history(param: str, says: str, *messages: dict[str, Any]) -> Any:
    return refused(param, says, messages=[user("hi"), *messages])


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


CALL_1 = ("1", "f", "{}")
DEEP = "[" * 100_000 + "]" * 100_000
FUNCTION_1 = "messages[1].tool_calls[0].function"


@pytest.mark.parametrize(
    ("param", "says", "fields"),
    [
        refused("tools", "expected `array", tools={}),
        refused("tools", "up to 128", tools=[tool(name=f"f{index}") for index in range(129)]),
        refused("tools[0]", "expected `object", tools=["clock"]),
        refused("tools[0].type", "is required", tools=[{"function": {"name": "f"}}]),
        refused("tools[0].type", "(valid: function)", tools=[{"type": "web_search"}]),
        refused("tools[1].type", "expected `str`, got `int` (valid: function)", tools=[CLOCK, {"type": 5}]),
        refused("tools[0].function", "is required", tools=[{"type": "function", "name": "f"}]),
        refused("tools[0].function.name", "is required", tools=[tool(description="a")]),
        refused("tools[0].function.name", "expected `str`", tools=[tool(name=5)]),
        refused("tools[0].function.name", "1 to 256", tools=[tool(name="")]),
        refused("tools[1].function.name", "1 to 256", tools=[CLOCK, tool(name="f" * 257)]),
        refused("tools[1].function.name", "same name", tools=[CLOCK, CLOCK]),
        refused("tools[0].function.description", "expected `str", tools=[tool(name="f", description=[])]),
        refused("tools[0].function.parameters", "expected `object", tools=[tool(name="f", parameters=[])]),
        refused("tools[0].function.strict", "expected `bool", tools=[tool(name="f", strict="yes")]),
        refused("parallel_tool_calls", "expected `bool", parallel_tool_calls="no"),
        refused("tool_choice", "must be none, auto, required or", tool_choice="any", **TOOLS),
        refused("tool_choice", "must be none, auto", tool_choice=[], **TOOLS),
        refused("tool_choice", "must be none, auto, required", tool_choice={"type": "function"}, **TOOLS),
        refused("tool_choice", 'must be none, auto, required or {"type"', tool_choice=tool(name=5), **TOOLS),
        refused("tool_choice", "no tool of the name 'f'", tool_choice=tool(name="f"), **TOOLS),
        refused("tool_choice", "no tool of the name 'g'", tool_choice=tool(name="g")),
        refused("tool_choice", "no tools to call", tool_choice="required"),
        refused("tool_choice", "there are no tools", tool_choice="required", tools=[]),
        history("messages[1].tool_calls", "expected `array", {"role": "assistant", "tool_calls": "f"}),
        history("messages[1].tool_calls[0].id", "is required", {"role": "assistant", "tool_calls": [tool(name="f", arguments="")]}),
        history("messages[1].tool_calls[0].function", "is required", {"role": "assistant", "tool_calls": [{"id": "1"}]}),
        history(
            "messages[1].tool_calls[0].type",
            "(valid: function)",
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "function": {"name": "f", "arguments": ""}}]},
        ),
        history(f"{FUNCTION_1}.name", "is required", called(("1", "", "{}")), result("1", "a")),
        history(f"{FUNCTION_1}.arguments", "JSON text of an object", called(("1", "f", "[1]")), result("1", "a")),
        history(f"{FUNCTION_1}.arguments", "leave out a call that broke off", called(("1", "f", '{"a": "b')), result("1", "a")),
        history(f"{FUNCTION_1}.arguments", "must be the JSON text", called(("1", "f", DEEP)), result("1", "a")),
        history(f"{FUNCTION_1}.arguments", "expected `str`", called(("1", "f", {})), result("1", "a")),  # type: ignore[arg-type]
        history("messages[1].tool_calls", "two calls have the same id", called(CALL_1, CALL_1), result("1", "a")),
        refused("messages[0].tool_calls", "only a message of the assistant", messages=[{**called(CALL_1), "role": "user", "content": "a"}]),
        history("messages[1].tool_calls[0].id", "must follow the call", called(CALL_1)),
        history("messages[1].tool_calls[0].id", "role tool with this", called(CALL_1), user("well?"), result("1", "a")),
        history("messages[1].tool_calls[1].id", "must follow", called(CALL_1, ("2", "f", "{}")), result("1", "a")),
        history("messages[2].tool_call_id", "no call of this id", called(CALL_1), result("2", "a")),
        history("messages[2].tool_call_id", "is required", called(CALL_1), {"role": "tool", "content": "a"}),
        history("messages[2].tool_call_id", "expected `str", called(CALL_1), {"role": "tool", "content": "a", "tool_call_id": 1}),
        history("messages[3].tool_call_id", "a result already", called(CALL_1), result("1", "a"), result("1", "b")),
        history("messages[1].tool_call_id", "no call of this", result("1", "a")),
        history("messages[1].tool_call_id", "the id of the call", {"role": "tool", "content": "a"}),
        history("messages[4].tool_call_id", "before it has no call", called(CALL_1), result("1", "a"), user("b"), result("1", "a")),
        history("messages[2].content", "must be a text", called(CALL_1), {"role": "tool", "tool_call_id": "1"}),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(server: Any, param: str, says: str, fields: dict[str, Any]) -> None:
    status, answer = await server.chat(**fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert says in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert not server.bus.submissions
