"""What LiveKit's Realtime plugin relies on, as a scripted client: it sends what the plugin sends and waits for what it waits for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.realtime_socket import Event, RealtimeSocket, connected
from tests.e2e.conftest import Serve
from tests.support.cascade import skip_without_packages
from tests.support.realtime_events import EventChecker
from tests.support.running_server import Server

MODEL = "cascade"
STORY = "Please tell me a long story about a cat and a dog."
SESSION = {
    "type": "realtime",
    "output_modalities": ["audio"],
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": 24000},
            "transcription": {"model": "gpt-4o-mini-transcribe"},
            "turn_detection": {
                "type": "semantic_vad",
                "create_response": True,
                "eagerness": "medium",
                "interrupt_response": True,
            },
        },
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "speed": 1.0, "voice": "heart"},
    },
    "max_output_tokens": "inf",
    "tool_choice": "auto",
}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def server(shared_server: Serve) -> Server:
    skip_without_packages()
    return shared_server("quickstart.toml", sets=["stages.asr.threads=1"])


@pytest.fixture
async def socket(server: Server) -> AsyncIterator[RealtimeSocket]:
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        await socket.send("session.update", event_id=_id("session_update_"), session=SESSION)
        await socket.until("session.updated")
        yield socket


def _id(prefix: str) -> str:
    return prefix + secrets.token_hex(6)


async def add(socket: RealtimeSocket, previous: str | None, **item: Any) -> str:
    """An item under an id of the client's, behind `previous` (None: first). LiveKit waits for its id, and places it by previous_item_id."""
    wanted, since = _id("item_"), socket.count
    before = "root" if previous is None else previous
    await socket.send(
        "conversation.item.create", event_id=_id("chat_ctx_create_"), previous_item_id=before, item={"id": wanted, **item}
    )
    added = await socket.until("conversation.item.added", "error", since=since)
    assert added.type == "conversation.item.added", added
    assert (added["item"]["id"], added["previous_item_id"]) == (wanted, previous)
    return wanted


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


async def generate_reply(socket: RealtimeSocket, instructions: str | None = None, **said: Any) -> tuple[Event, int]:
    """`response.created` that carries this request's own client_event_id, and where it stands. LiveKit waits ten seconds for it."""
    event_id, since = _id("response_create_"), socket.count
    response = {"metadata": {"client_event_id": event_id}, **said}
    if instructions is not None:
        response["instructions"] = instructions
    await socket.send("response.create", event_id=event_id, response=response)
    created = await socket.until("response.created", "error", since=since, limit=60)
    assert created.type == "response.created", created
    assert created["response"]["metadata"] == {"client_event_id": event_id}
    return created, since


async def playing(socket: RealtimeSocket, since: int) -> tuple[str, str]:
    """The item and its answer's id once it is heard, with all that LiveKit's handlers of an answer assert."""
    await socket.until("response.output_audio.delta", since=since)
    events = {event.type: event for event in reversed(socket.events[since:])}
    item = events["response.output_item.added"]["item"]
    assert item["id"] and item["type"] == "message"
    assert events["response.content_part.added"]["part"]["type"] == "audio"
    assert events["response.content_part.added"]["item_id"] == item["id"]
    added = events["conversation.item.added"]
    assert added["item"]["id"] == item["id"] and added["item"]["role"] == "assistant" and added["item"]["content"] is not None
    assert socket.types(since).index("conversation.item.added") < socket.types(since).index("response.output_audio.delta")
    return item["id"], events["response.created"]["response"]["id"]


async def test_a_reply_is_known_by_its_metadata_and_stands_behind_the_last_item(socket: RealtimeSocket) -> None:
    system = await add(socket, None, **message("system", "You are a helpful assistant."))
    user = await add(socket, system, **message("user", "What is the capital of France?"))
    _, since = await generate_reply(socket)
    done = await socket.until("response.done", since=since)
    item, _ = await playing(socket, since)
    added = await socket.until("conversation.item.added", since=since, where=lambda event: bool(event["item"]["id"] == item))
    assert added["previous_item_id"] == user
    assert done["response"]["status"] == "completed"
    assert [output["id"] for output in done["response"]["output"]] == [item]
    assert "Paris" in done["response"]["output"][0]["content"][0]["transcript"]
    usage = done["response"]["usage"]
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert {"text_tokens", "audio_tokens", "cached_tokens"} <= set(usage["input_token_details"])
    assert {"text_tokens", "audio_tokens"} <= set(usage["output_token_details"])


async def test_parts_of_a_session_are_updated_one_by_one(socket: RealtimeSocket) -> None:
    """`update_tools` and `update_instructions` send only what they change."""
    since = socket.count
    await socket.send(
        "session.update", event_id=_id("tools_update_"), session={"type": "realtime", "model": MODEL, "tools": [TOOL]}
    )
    tools = await socket.until("session.updated", "error", since=since)
    since = socket.count
    await socket.send(
        "session.update", event_id=_id("instructions_update_"), session={"type": "realtime", "instructions": "Be brief."}
    )
    both = await socket.until("session.updated", "error", since=since)
    assert tools.type == both.type == "session.updated", (tools, both)
    assert [tool["name"] for tool in both["session"]["tools"]] == ["get_weather"]
    assert both["session"]["instructions"] == "Be brief."
    assert both["session"]["audio"]["output"]["voice"] == "heart"
    assert both["session"]["audio"]["input"]["turn_detection"]["eagerness"] == "medium"


async def test_an_interrupted_reply_is_cancelled_by_its_id_and_truncated(socket: RealtimeSocket) -> None:
    await add(socket, None, **message("user", STORY))
    created, since = await generate_reply(socket)
    item, response = await playing(socket, since)
    assert response == created["response"]["id"]
    at = socket.count
    await socket.send("response.cancel", response_id=response)
    await socket.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=400)
    done = await socket.until("response.done", since=at)
    assert done["response"]["status"] == "cancelled"
    assert done["response"]["status_details"]["reason"] == "client_cancelled"
    truncated = await socket.until("conversation.item.truncated", "error", since=at)
    assert truncated.type == "conversation.item.truncated", truncated
    assert (truncated["item_id"], truncated["content_index"], truncated["audio_end_ms"]) == (item, 0, 400)
    await socket.send("conversation.item.retrieve", item_id=item)
    kept = (await socket.until("conversation.item.retrieved", since=at))["item"]["content"][0]["transcript"]
    said = "".join(event["delta"] for event in socket.events[since:] if event.type == "response.output_audio_transcript.delta")
    assert said.startswith(kept) and len(kept) < len(said)
    behind = socket.types(socket.events.index(done) + 1)
    assert not [kind for kind in behind if kind.startswith("response.")], behind


async def test_a_reply_of_which_nothing_was_played_is_deleted(socket: RealtimeSocket) -> None:
    user = await add(socket, None, **message("user", STORY))
    _, since = await generate_reply(socket)
    item, response = await playing(socket, since)
    at = socket.count
    await socket.send("response.cancel", response_id=response)
    await socket.send("conversation.item.delete", event_id=_id("chat_ctx_delete_"), item_id=item)
    await socket.until("response.done", since=at)
    deleted = await socket.until("conversation.item.deleted", "error", since=at)
    assert deleted.type == "conversation.item.deleted", deleted
    assert deleted["item_id"] == item
    await add(socket, user, **message("user", "What is the capital of France?"))
    _, since = await generate_reply(socket, "Answer in one short sentence.")
    done = await socket.until("response.done", since=since)
    assert done["response"]["status"] == "completed"
    assert "Paris" in done["response"]["output"][0]["content"][0]["transcript"]


async def test_a_changed_chat_is_deleted_and_created_again_in_its_place(socket: RealtimeSocket) -> None:
    """`update_chat_ctx`: of what differs, deletes, then creates behind the item before; all at once, and all answered."""
    first = await add(socket, None, **message("user", "My name is Ann."))
    second = await add(socket, first, **message("assistant", "Hello Bob."))
    third = await add(socket, second, **message("user", "What is my name?"))
    since = socket.count
    await socket.send("conversation.item.delete", event_id=_id("chat_ctx_delete_"), item_id=second)
    item = {"id": second, **message("assistant", "Hello Ann.")}
    await socket.send("conversation.item.create", event_id=_id("chat_ctx_create_"), previous_item_id=first, item=item)
    deleted = await socket.until("conversation.item.deleted", "error", since=since)
    added = await socket.until("conversation.item.added", "error", since=since)
    assert deleted.type == "conversation.item.deleted" and added.type == "conversation.item.added", (deleted, added)
    assert added["item"]["id"] == second and added["previous_item_id"] == first
    await add(socket, third, **message("user", "Say it."))


async def test_a_function_and_its_output_are_items(socket: RealtimeSocket) -> None:
    """Calls of an earlier session come back as items; a reply takes them in."""
    user = await add(socket, None, **message("user", "What is the weather in Paris?"))
    call = await add(socket, user, type="function_call", call_id="call_1", name="get_weather", arguments='{"city": "Paris"}')
    output = await add(socket, call, type="function_call_output", call_id="call_1", output="It is sunny and 21 degrees.")
    _, since = await generate_reply(socket)
    done = await socket.until("response.done", since=since)
    assert done["response"]["status"] == "completed"
    item = done["response"]["output"][0]
    added = await socket.until("conversation.item.added", since=since)
    assert (added["item"]["id"], added["previous_item_id"]) == (item["id"], output)
    assert "21" in item["content"][0]["transcript"] or "sunny" in item["content"][0]["transcript"]


async def test_an_interrupt_with_nothing_to_interrupt_is_an_error_that_livekit_ignores(socket: RealtimeSocket) -> None:
    since = socket.count
    await socket.send("response.cancel")
    error = (await socket.until("error", since=since))["error"]
    assert error["code"] == "response_cancel_not_active"
    assert error["message"].startswith("Cancellation failed")


async def test_audio_is_committed_and_cleared_by_hand(socket: RealtimeSocket) -> None:
    """With turn detection off, `commit_audio` and `generate_reply` make the turn."""
    from bench.spoken import QUESTION, spoken

    pcm = spoken(QUESTION)[44:]
    manual = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
    await socket.send("session.update", session=manual)
    await socket.until("session.updated", where=lambda event: event["session"]["audio"]["input"]["turn_detection"] is None)
    await socket.append(pcm)
    since = socket.count
    await socket.send("input_audio_buffer.clear")
    await socket.until("input_audio_buffer.cleared", since=since)
    for at in range(0, len(pcm), 4800):
        await socket.append(pcm[at : at + 4800])
    since = socket.count
    await socket.send("input_audio_buffer.commit")
    committed = await socket.until("input_audio_buffer.committed", "error", since=since)
    assert committed.type == "input_audio_buffer.committed", committed
    added = await socket.until("conversation.item.added", since=since)
    assert added["item"]["id"] == committed["item_id"]
    _, since = await generate_reply(socket)
    done, heard = await asyncio.gather(
        socket.until("response.done", since=since),
        socket.until("conversation.item.input_audio_transcription.completed"),
    )
    assert "capital of France" in heard["transcript"] and heard["item_id"] == committed["item_id"]
    assert "Paris" in done["response"]["output"][0]["content"][0]["transcript"]
