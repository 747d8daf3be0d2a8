"""The event loop's lag is seen, and heavy requests do not cause it."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import soundfile

from omni_bus.api.audio_decode import decode_audio
from omni_bus.api.loop_lag import LoopLag
from omni_bus.api.media import base64_content
from tests.support.scripted_bus import FOREVER

PATIENCE_S = 60.0


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_held_up_loop_is_seen_while_a_request_is_in_flight() -> None:
    seen: list[tuple[float, float]] = []
    lag = LoopLag(lambda late, held: seen.append((late, held)), lambda: 1)
    lag.start()
    await until(lambda: bool(seen))
    seen.clear()
    time.sleep(0.08)  # noqa: ASYNC251  the hold-up itself
    await until(lambda: len(seen) > 3)
    lag.stop()
    count = len(seen)
    late, held = seen[0]
    assert late > 0.06 and 0.04 < held <= late
    await asyncio.sleep(0.03)
    assert len(seen) == count, "no timer is left"


async def test_an_idle_server_hardly_looks_and_a_request_wakes_it() -> None:
    in_flight = 0
    seen: list[tuple[float, float]] = []
    lag = LoopLag(lambda late, held: seen.append((late, held)), lambda: in_flight)
    lag.start()
    await asyncio.sleep(0.2)
    assert not seen
    in_flight = 1
    lag.wake()
    await asyncio.sleep(0.1)
    assert seen, "long before an idle server's next look"
    lag.stop()


async def test_the_lag_is_a_metric(server: Any) -> None:
    server.bus.script = (FOREVER,)
    waiting = asyncio.create_task(server.chat())
    async with asyncio.timeout(PATIENCE_S):
        while await server.metric("omni_bus_event_loop_lag_seconds_count") <= 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    waiting.cancel()
    assert await server.metric("omni_bus_event_loop_lag_worst_seconds") > 0


async def test_large_media_are_decoded_off_the_loop(server: Any) -> None:
    """20 MB of audio in four requests at once: no step of the loop takes as much processor time as the decoding of one of them."""
    buffer = io.BytesIO()
    samples = (np.random.default_rng(1).standard_normal(48_000 * 20) * 8000).astype(np.int16)
    soundfile.write(buffer, np.stack([samples, samples], 1), 48_000, format="WAV")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(buffer.getvalue()).decode(), "format": "wav"}}
    message = [{"role": "user", "content": [part]}]
    body = json.dumps({"model": "scripted", "messages": message}).encode()
    used = time.thread_time()
    decode_audio(base64_content(base64.b64encode(buffer.getvalue()).decode(), "audio"), False, "audio")
    one = time.thread_time() - used
    worst = 0.0
    running = True

    async def watch() -> None:
        nonlocal worst
        while running:
            used = time.thread_time()
            await asyncio.sleep(0)
            worst = max(worst, time.thread_time() - used)

    watcher = asyncio.create_task(watch())

    def ask() -> int:  # in a thread: the client's own work is not the server's
        connection = http.client.HTTPConnection(server.host, server.port)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        status = connection.getresponse().status
        connection.close()
        return status

    assert await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(4))) == [200] * 4
    running = False
    await watcher
    assert worst < one / 2, f"{worst:.4f} s at once; decoding takes {one:.4f} s"
