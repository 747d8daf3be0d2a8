"""Functions over /v1/realtime with Qwen3-Omni: a call out of the Thinker's own tokens, its output given back, and the spoken answer."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from bench.realtime_socket import RealtimeSocket, connected
from tests.e2e.test_realtime_clients import WEATHER, drive, nothing_left, say
from tests.support import scripted_omni
from tests.support.realtime_events import EventChecker
from tests.support.running_server import Server, running

MODEL = "scripted-omni"
LIMIT_S = 120.0
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL_EVENTS = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]
__all__ = ["say"]  # the fixture


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("scripted") / "omni"
    scripted_omni.write(directory)
    stages = ("processor", "thinker", "talker", "code2wav")
    sets = [
        f"model.path={directory}",
        f"model.name={MODEL}",
        "stages.talker.sampling.max_tokens=24",
        *(f"stages.{stage}.threads=1" for stage in stages),
    ]
    with running("qwen3_omni_tiny.toml", sets=sets) as started:
        yield started


def hum(seconds: float) -> bytes:
    """PCM16 at 24 kHz."""
    time = np.arange(int(seconds * 24_000)) / 24_000
    return (8_000 * np.sin(2 * np.pi * 180 * time)).astype("<i2").tobytes()


async def response(socket: RealtimeSocket) -> int:
    """Ask for one, to its end; the number of its first event."""
    since = socket.count
    await socket.send("response.create")
    await socket.until("response.done", since=since, limit=LIMIT_S)
    return next(at for at in range(since, socket.count) if socket.events[at].type == "response.created")


async def test_a_spoken_turn_is_answered_by_a_call_and_its_output_by_speech(server: Server) -> None:
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        session = {"type": "realtime", "tools": [TOOL], "audio": {"input": {"turn_detection": None}}}
        await socket.send("session.update", session=session)
        await socket.until("session.updated")
        await socket.append(hum(1.5))
        await socket.send("input_audio_buffer.commit")

        begin = await response(socket)
        types = [kind for at, kind in enumerate(socket.types(begin)) if kind != socket.types(begin)[at - 1] or not at]
        assert types == CALL_EVENTS, "no text and no sound"
        events = socket.events[begin:]
        deltas = [event["delta"] for event in events if event.type == "response.function_call_arguments.delta"]
        done = next(event for event in events if event.type == "response.function_call_arguments.done")
        assert "".join(deltas) == done["arguments"] == scripted_omni.ARGUMENTS and len(deltas) > 1
        assert done["name"] == "get_weather"
        calling = events[-1]["response"]
        (item,) = calling["output"]
        assert (item["type"], item["name"], item["status"]) == ("function_call", "get_weather", "completed")
        assert (item["id"], item["call_id"], item["arguments"]) == (done["item_id"], done["call_id"], done["arguments"])
        assert calling["status"] == "completed" and calling["usage"]["output_tokens"] > 0

        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "sun, 21 degrees"}
        await socket.send("conversation.item.create", item=output)
        begin = await response(socket)
        telling = socket.events[-1]["response"]
        (item,) = telling["output"]
        assert (item["type"], item["content"][0]["transcript"]) == ("message", scripted_omni.SENTENCE)
        sound = b"".join(event.pcm for event in socket.events[begin:] if event.type == "response.output_audio.delta")
        assert telling["status"] == "completed" and np.frombuffer(sound, "<i2").any()
        assert telling["usage"]["input_tokens"] > calling["usage"]["input_tokens"], "the call and its output are in the prompt"
    await asyncio.to_thread(nothing_left, server)


async def test_without_functions_what_the_model_writes_is_text(server: Server) -> None:
    """The same tokens where the session has no function: nothing is called."""
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        session = {"type": "realtime", "output_modalities": ["text"], "audio": {"input": {"turn_detection": None}}}
        await socket.send("session.update", session=session)
        await socket.until("session.updated")
        await socket.append(hum(1.0))
        await socket.send("input_audio_buffer.commit")
        await response(socket)
        (item,) = socket.events[-1]["response"]["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", "".join(scripted_omni.CALL))


def test_openai_calls_a_function_of_qwen3_omni(
    server: Server, say: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    saw = drive("openai", "tool", server, tmp_path, "--say", say(WEATHER), model=MODEL)
    call = saw.one("response.function_call_arguments.done")
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
    calling, telling = (done["response"] for done in saw.all("response.done"))
    assert [item["type"] for item in calling["output"]] == ["function_call"]
    assert telling["output"][0]["content"][0]["transcript"] == scripted_omni.SENTENCE
    [audio] = saw.all("client.audio")
    assert audio["item_id"] == telling["output"][0]["id"] and audio["peak"] > 0
    nothing_left(server)
