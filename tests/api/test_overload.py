"""What an HTTP client hears of a server that is full, and how it says how much its request is in a hurry."""

from __future__ import annotations

import pathlib
from typing import Any

import aiohttp
import pytest

from bench.realtime_socket import connected
from omni_bus.api.auth import ApiKeys
from omni_bus.errors import ConfigError, ErrorInfo, NoReadyReplica, Overloaded, from_info
from tests.support.realtime_events import EventChecker
from tests.support.scripted_bus import MODEL, heard, text

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SPEECH = {"model": MODEL, "input": "Hello."}


@pytest.mark.parametrize(("seconds", "header"), [(1.0, "1"), (1.2, "2"), (0.1, "1"), (59.01, "60"), (None, "1")])
async def test_retry_after_is_what_the_broker_computed_in_whole_seconds(
    server: Any, seconds: float | None, header: str
) -> None:
    server.bus.submit_error = from_info(Overloaded("full", retry_after_s=seconds).info())
    async with server.http.post(f"{server.url}/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"] == header
        assert (await answer.json())["error"]["code"] == "overloaded"


async def test_other_errors_keep_their_own_number(server: Any) -> None:
    server.bus.submit_error = NoReadyReplica("none is ready")
    async with server.http.post(f"{server.url}/v1/chat/completions", json=CHAT) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")


async def test_a_voice_session_outlives_a_response_that_is_refused(server: Any) -> None:
    async with connected(server.url, MODEL, check=EventChecker()) as socket:
        server.bus.scripts.append((Overloaded("the server has all the requests that it can carry", retry_after_s=3.0),))
        server.bus.scripts.append((text("Hi", "stop"),))
        await socket.send("response.create", response={"output_modalities": ["text"]})
        ended = (await socket.until("response.done"))["response"]
        assert ended["status"] == "failed"
        assert ended["status_details"]["error"]["code"] == "overloaded"
        since = socket.count
        await socket.send("response.create", response={"output_modalities": ["text"]})
        assert (await socket.until("response.done", since=since))["response"]["status"] == "completed"
    assert [submission.options.priority for submission in server.bus.submissions] == ["interactive"] * 2


def test_an_error_that_travels_keeps_when_to_come_back() -> None:
    assert from_info(Overloaded("full", retry_after_s=3.5).info()).retry_after_s == 3.5
    assert from_info(ErrorInfo("overloaded", "full", 503)).retry_after_s is None


@pytest.mark.parametrize("said", [None, "interactive", "batch"])
async def test_a_request_says_its_priority(start: Any, said: str | None) -> None:
    server = await start(ear=True)
    fields = {} if said is None else {"priority": said}
    async with server.http.post(f"{server.url}/v1/chat/completions", json={**CHAT, **fields}) as answer:
        assert answer.status == 200
    async with server.http.post(f"{server.url}/v1/audio/speech", json={**SPEECH, **fields}) as answer:
        assert answer.status == 200
    server.bus.script = (heard("hi"),)
    form = aiohttp.FormData({"model": MODEL, **fields})
    form.add_field("file", wav(), filename="a.wav")
    async with server.http.post(f"{server.url}/v1/audio/transcriptions", data=form) as answer:
        assert answer.status == 200, await answer.text()
    assert [submission.options.priority for submission in server.bus.submissions] == [said or "interactive"] * 3


@pytest.mark.parametrize("said", ["urgent", 0, ""])
async def test_another_priority_is_refused_by_name(server: Any, said: object) -> None:
    for route, body in (("chat/completions", CHAT), ("audio/speech", SPEECH)):
        async with server.http.post(f"{server.url}/v1/{route}", json={**body, "priority": said}) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert error["param"] == "priority"
        assert "interactive, batch" in error["message"]


async def test_a_key_has_a_priority_of_its_own_that_a_request_may_overrule(start: Any, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-people\n# the archive\nsk-archive priority=batch\nsk-odd  priority=interactive\n")
    server = await start(api_keys_file=str(file))
    for key, said, priority in (
        ("sk-people", None, "interactive"),
        ("sk-archive", None, "batch"),
        ("sk-archive", "interactive", "interactive"),
        ("sk-people", "batch", "batch"),
        ("sk-odd", None, "interactive"),
    ):
        status, _ = await server.chat({"Authorization": f"Bearer {key}"}, **({} if said is None else {"priority": said}))
        assert status == 200
        assert server.bus.submissions[-1].options.priority == priority
    assert (await server.chat({"Authorization": "Bearer sk-archive priority=batch"}))[0] == 401


def test_a_key_file_with_another_priority_is_refused_by_line(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one\n\nsk-two priority=low\n")
    with pytest.raises(ConfigError, match=r"line 3: priority must be interactive or batch") as refused:
        ApiKeys.read(file)
    assert "sk-two" not in refused.value.message
    file.write_text("sk-priority=low\n")
    assert ApiKeys.read(file).check("Bearer sk-priority=low") == 0


def wav() -> bytes:
    """A tenth of a second of silence at 16 kHz."""
    data = bytes(3200)
    head = b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    head += b"\x01\x00\x01\x00" + (16_000).to_bytes(4, "little") + (32_000).to_bytes(4, "little") + b"\x02\x00\x10\x00"
    return head + b"data" + len(data).to_bytes(4, "little") + data
