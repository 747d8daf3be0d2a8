"""Large requests that come all at once are bounded in memory, alone and together."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import numpy as np
import pytest
import soundfile

from omni_bus.api import intake
from omni_bus.api.keys import INTAKE
from tests.support.scripted_bus import FOREVER


async def test_too_many_large_bodies_at_once_are_refused(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "LIMIT_BYTES", 0)
    server = await start(max_body_mb=1)
    book = server.app[INTAKE]
    assert book.limit == 4 * 2**20, "a body of the largest size always fits"
    with book.share() as other:
        other.add(book.limit - 1000)
        status, answer = await server.chat(user="x" * 100_000)
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert (await server.chat())[0] == 200, "small ones still pass"
    assert book.held == 0 and (await server.chat(user="x" * 100_000))[0] == 200


async def test_decoded_audio_counts(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "LIMIT_BYTES", 0)
    server = await start(max_body_mb=1)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(8_000 * 100, dtype=np.int16), 8_000, format="FLAC")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(buffer.getvalue()).decode()}}
    status, answer = await server.chat(messages=[{"role": "user", "content": [part]}])
    assert (status, answer["error"]["code"]) == (503, "overloaded"), "100 s are 6.4 MB as float32"
    assert server.app[INTAKE].held == 0


@pytest.mark.parametrize("fields", [{}, {"temperature": -1}, {"messages": []}])
async def test_everything_is_given_back(server: Any, fields: dict[str, Any]) -> None:
    await server.chat(**fields)
    assert server.app[INTAKE].held == 0


async def test_an_answer_under_way_holds_nothing_of_its_request(server: Any) -> None:
    server.bus.script = (FOREVER,)
    waiting = asyncio.create_task(server.chat())
    await server.bus.asked.wait()
    await asyncio.sleep(0)
    assert server.app[INTAKE].held == 0
    waiting.cancel()
