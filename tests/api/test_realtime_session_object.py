"""session.update and response.create: what may be said, what is refused and by which name, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.realtime_socket import RealtimeSocket, connected
from omni_bus.api.voice.formats import OutputAudioEncoder
from tests.api.conftest import Server
from tests.support.realtime_events import EventChecker
from tests.support.scripted_bus import MODEL, PCM_CHUNK, audio, text

TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}


@pytest.fixture
async def socket(server: Server) -> AsyncIterator[RealtimeSocket]:
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        yield socket


async def updated(socket: RealtimeSocket, session: dict[str, Any]) -> dict[str, Any]:
    since = socket.count
    await socket.send("session.update", session=session)
    event = await socket.until("session.updated", "error", since=since)
    assert event.type == "session.updated", event
    found: dict[str, Any] = event["session"]
    return found


async def refused(socket: RealtimeSocket, kind: str, **fields: Any) -> dict[str, Any]:
    since = socket.count
    await socket.send(kind, event_id="mine", **fields)
    error: dict[str, Any] = (await socket.until("error", since=since))["error"]
    assert error["event_id"] == "mine"
    return error


async def test_the_session_as_it_is_created(socket: RealtimeSocket) -> None:
    session = socket.events[0]["session"]
    assert session["model"] == MODEL and session["type"] == "realtime"
    assert session["output_modalities"] == ["audio"]
    assert session["audio"] == {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "noise_reduction": None,
            "transcription": None,
            "turn_detection": {
                "type": "server_vad",
                "threshold": 0.5,
                "prefix_padding_ms": 300,
                "silence_duration_ms": 500,
                "idle_timeout_ms": None,
                "create_response": True,
                "interrupt_response": True,
            },
        },
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "Ethan", "speed": 1.0},
    }
    assert (session["max_output_tokens"], session["tools"], session["tool_choice"]) == ("inf", [], "auto")


async def test_every_field_is_taken_and_shown(socket: RealtimeSocket) -> None:
    said = {
        "type": "realtime",
        "output_modalities": ["text"],
        "instructions": "Be brief.",
        "audio": {
            "input": {
                "format": {"type": "audio/pcmu"},
                "transcription": {"model": "any", "language": "en", "prompt": "Ada"},
                "turn_detection": {
                    "type": "semantic_vad",
                    "eagerness": "low",
                    "create_response": False,
                    "interrupt_response": False,
                },
            },
            "output": {"format": {"type": "audio/pcma"}, "voice": "CHELSIE", "speed": 1.25},
        },
        "max_output_tokens": 77,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "look"},
        "sampling": {"thinker": {"temperature": 0.5}},
        "seed": 7,
    }
    session = await updated(socket, said)
    said["audio"]["output"]["voice"] = "chelsie"  # type: ignore[index]
    said["audio"]["input"]["noise_reduction"] = None  # type: ignore[index]
    assert {name: session[name] for name in said} == said


async def test_fields_that_are_not_said_stay_and_null_turns_off(socket: RealtimeSocket) -> None:
    await updated(
        socket,
        {
            "instructions": "Be brief.",
            "max_output_tokens": 5,
            "audio": {"input": {"transcription": {"model": "any"}, "turn_detection": {"silence_duration_ms": 900}}},
        },
    )
    session = await updated(socket, {"audio": {"output": {"speed": 0.5}}, "some_new_field": {"a": 1}})
    assert (session["instructions"], session["max_output_tokens"]) == ("Be brief.", 5)
    assert session["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 900
    session = await updated(
        socket, {"max_output_tokens": "inf", "audio": {"input": {"transcription": None, "turn_detection": None}}}
    )
    assert session["max_output_tokens"] == "inf"
    assert session["audio"]["input"]["transcription"] is session["audio"]["input"]["turn_detection"] is None


async def test_what_stock_clients_ask_for_is_taken_and_shown_as_off_where_it_is(socket: RealtimeSocket) -> None:
    """What pipecat and openai-agents send without being told to; they read the answer by types of their own."""
    noise = {"noise_reduction": {"type": "near_field"}, "transcription": {"model": "gpt-4o-mini-transcribe"}}
    turns = {"type": "semantic_vad", "interrupt_response": True}
    session = await updated(
        socket,
        {
            "type": "realtime",
            "model": "gpt-realtime",
            "audio": {"input": {**noise, "turn_detection": turns}, "output": {"voice": "ash"}},
            "include": ["item.input_audio_transcription.logprobs"],
        },
    )
    assert session["audio"]["input"]["noise_reduction"] is session["include"] is None
    assert session["audio"]["input"]["turn_detection"]["interrupt_response"] is True
    again = await updated(socket, {"type": "realtime", "model": "gpt-realtime", "tracing": "auto", "truncation": "auto"})
    assert again == session
    off = await updated(socket, {"type": "realtime", "audio": {"input": {"turn_detection": None}}})
    assert off["audio"]["input"]["turn_detection"] is None
    assert off["audio"]["input"]["transcription"] == {"model": "gpt-4o-mini-transcribe"}


@pytest.mark.parametrize("wanted", [{"type": "near_field"}, {"type": "far_field"}, {"type": None}, {}, None])
async def test_noise_reduction_is_taken_and_shown_as_off(socket: RealtimeSocket, wanted: object) -> None:
    """Every value that OpenAI has: there is none here, and the answer says so."""
    before = await updated(socket, {})
    assert await updated(socket, {"audio": {"input": {"noise_reduction": wanted}}}) == before
    assert before["audio"]["input"]["noise_reduction"] is None


@pytest.mark.parametrize("voice", ["marin", "Alloy", {"id": "cedar"}, "onyx"])
async def test_voices_of_openai_stand_for_the_models_first(socket: RealtimeSocket, voice: object) -> None:
    session = await updated(socket, {"audio": {"output": {"voice": voice}}})
    assert session["audio"]["output"]["voice"] == "Ethan"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another_kind_of_session": ({"type": "transcription"}, "session.type"),
    "both_modalities": ({"output_modalities": ["text", "audio"]}, "session.output_modalities"),
    "no_modality": ({"output_modalities": []}, "session.output_modalities"),
    "an_unknown_modality": ({"output_modalities": ["smell"]}, "session.output_modalities"),
    "instructions_that_are_no_text": ({"instructions": 3}, "session.instructions"),
    "an_unknown_format": ({"audio": {"input": {"format": {"type": "audio/mp3"}}}}, "session.audio.input.format.type"),
    "a_rate_that_is_not_taken": (
        {"audio": {"output": {"format": {"type": "audio/pcm", "rate": 16000}}}},
        "session.audio.output.format.rate",
    ),
    "an_unknown_noise_reduction": (
        {"audio": {"input": {"noise_reduction": {"type": "loud"}}}},
        "session.audio.input.noise_reduction.type",
    ),
    "a_noise_reduction_that_is_none": ({"audio": {"input": {"noise_reduction": True}}}, "session.audio.input.noise_reduction"),
    "an_unknown_detection": (
        {"audio": {"input": {"turn_detection": {"type": "none"}}}},
        "session.audio.input.turn_detection.type",
    ),
    "a_threshold_above_one": (
        {"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 2}}}},
        "session.audio.input.turn_detection.threshold",
    ),
    "a_speed_out_of_range": ({"audio": {"output": {"speed": 3}}}, "session.audio.output.speed"),
    "an_unknown_voice": ({"audio": {"output": {"voice": "bob"}}}, "session.audio.output.voice"),
    "a_voice_that_is_no_name": ({"audio": {"output": {"voice": 5}}}, "session.audio.output.voice"),
    "no_tokens": ({"max_output_tokens": 0}, "session.max_output_tokens"),
    "tokens_in_words": ({"max_output_tokens": "many"}, "session.max_output_tokens"),
    "a_tool_of_another_kind": ({"tools": [{"type": "mcp", "server_label": "x"}]}, "session.tools[0].type"),
    "a_tool_without_a_name": ({"tools": [{"type": "function"}]}, "session.tools[0].name"),
    "two_tools_of_one_name": ({"tools": [TOOL, TOOL]}, "session.tools"),
    "a_choice_of_a_tool_that_is_not_there": ({"tool_choice": {"type": "function", "name": "fly"}}, "session.tool_choice"),
    "an_unknown_choice": ({"tool_choice": "sometimes"}, "session.tool_choice"),
    "sampling_of_no_stage": ({"sampling": {"thinkr": {}}}, "session.sampling"),
    "sampling_out_of_range": ({"sampling": {"thinker": {"top_p": 7}}}, "session.sampling.thinker.top_p"),
    "a_session_that_is_no_object": ([], "session"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_value_is_named_and_changes_nothing(socket: RealtimeSocket, case: str) -> None:
    before = await updated(socket, {"instructions": "Be brief.", "tools": []})
    wrong, param = WRONG[case]
    error = await refused(
        socket, "session.update", session={"instructions": "Be loud.", **wrong} if isinstance(wrong, dict) else wrong
    )
    assert error["param"] == param if case != "instructions_that_are_no_text" else "instructions" in error["param"]
    assert await updated(socket, {}) == before


WRONG_RESPONSES: dict[str, tuple[dict[str, Any], str]] = {
    "another_conversation": ({"conversation": "mine"}, "response.conversation"),
    "metadata_that_is_too_much": ({"metadata": {str(number): "" for number in range(17)}}, "response.metadata"),
    "metadata_that_is_too_long": ({"metadata": {"a": "x" * 600}}, "response.metadata"),
    "metadata_of_another_type": ({"metadata": {"a": 1}}, "response.metadata"),
    "an_item_that_is_none": ({"input": [{"type": "song"}]}, "response.input[0].type"),
    "an_item_that_is_not_there": ({"input": [{"type": "item_reference", "id": "x"}]}, "item_id"),
    "a_voice_that_is_not_there": ({"audio": {"output": {"voice": "bob"}}}, "response.audio.output.voice"),
    "no_tokens": ({"max_output_tokens": -1}, "response.max_output_tokens"),
}


@pytest.mark.parametrize("case", WRONG_RESPONSES)
async def test_a_response_that_cannot_be_is_refused_by_name(socket: RealtimeSocket, server: Server, case: str) -> None:
    wrong, param = WRONG_RESPONSES[case]
    error = await refused(socket, "response.create", response=wrong)
    assert (error["param"] or "").startswith(param)
    assert not server.bus.submissions


async def test_the_voice_stays_once_it_was_heard(socket: RealtimeSocket, server: Server) -> None:
    server.bus.script = (text("Hi", "stop"), audio(), audio(b"", last=True))
    await socket.send("response.create")
    await socket.until("response.done")
    error = await refused(socket, "session.update", session={"audio": {"output": {"voice": "chelsie"}}})
    assert (error["code"], error["param"]) == ("cannot_update_voice", "session.audio.output.voice")
    error = await refused(socket, "response.create", response={"audio": {"output": {"voice": "chelsie"}}})
    assert error["code"] == "cannot_update_voice"


async def test_one_response_may_be_other_than_its_session(socket: RealtimeSocket, server: Server) -> None:
    server.bus.script = (text("Hi", "stop"),)
    await updated(socket, {"instructions": "Be brief.", "tools": [TOOL]})
    await socket.send(
        "response.create",
        response={
            "output_modalities": ["text"],
            "instructions": "Be long.",
            "tools": [],
            "max_output_tokens": 9,
            "metadata": {"client_event_id": "7"},
        },
    )
    created, done = (await socket.until("response.created"))["response"], (await socket.until("response.done"))["response"]
    assert created["metadata"] == done["metadata"] == {"client_event_id": "7"}
    assert (created["status_details"], created["usage"], created["output"]) == (None, None, [])
    assert (done["output_modalities"], done["max_output_tokens"]) == (["text"], 9)
    assert done["usage"] == {
        "total_tokens": 12,
        "input_tokens": 7,
        "output_tokens": 5,
        "input_token_details": {"text_tokens": 7, "audio_tokens": 0, "image_tokens": 0, "cached_tokens": 4},
        "output_token_details": {"text_tokens": 2, "audio_tokens": 3},
    }
    [sent] = server.bus.submissions
    assert (sent.payload.tools, sent.payload.messages[0].parts[0].text) == ((), "Be long.")  # type: ignore[union-attr]
    assert (await updated(socket, {}))["instructions"] == "Be brief."


async def test_one_response_may_sound_other_than_its_session(socket: RealtimeSocket, server: Server) -> None:
    """Another format and another voice, before any has been heard; the next one is the session's again."""
    server.bus.script = (text("Hi", "stop"), audio(), audio(b"", last=True))
    before = await updated(socket, {"audio": {"output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "Ethan"}}})
    answers = []
    for output in ({"format": {"type": "audio/pcmu"}, "voice": "chelsie"}, {"format": {"type": "audio/pcma"}}, {}):
        since = socket.count
        await socket.send("response.create", response={"audio": {"output": output}} if output else {})
        done = (await socket.until("response.done", since=since))["response"]
        created = (await socket.until("response.created", since=since))["response"]
        assert created["audio"] == done["audio"]
        sent = b"".join(event.pcm for event in socket.events[since:] if event.type == "response.output_audio.delta")
        answers.append((done["audio"]["output"]["format"]["type"], done["audio"]["output"]["voice"], sent))
    (mu_law, first, mu), (a_law, second, a), (pcm, third, as_made) = answers
    assert (mu_law, a_law, pcm) == ("audio/pcmu", "audio/pcma", "audio/pcm")
    assert (first, second, third) == ("chelsie", "Ethan", "Ethan")
    assert [one.options.voice for one in server.bus.submissions] == ["chelsie", "Ethan", "Ethan"]
    assert as_made == PCM_CHUNK
    assert len(mu) == len(a) == len(PCM_CHUNK) // 6, "a byte a sample, a third of the samples"
    for data, law in ((mu, "pcmu"), (a, "pcma")):
        encoder = OutputAudioEncoder(law, 24_000)  # type: ignore[arg-type]
        assert data == encoder.push(PCM_CHUNK) + encoder.flush()
    assert await updated(socket, {}) == before
