"""The event loop's lag is seen, and heavy requests do not cause it."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import time
from typing import Any

import numpy as np
import soundfile

from omni_bus.api.loop_lag import LoopLag
from tests.support.scripted_bus import FOREVER


async def test_a_held_up_loop_is_seen_while_a_request_is_in_flight() -> None:
    seen: list[tuple[float, float]] = []
    lag = LoopLag(lambda late, held: seen.append((late, held)), lambda: 1)
    lag.start()
    await asyncio.sleep(0.05)
    time.sleep(0.08)  # noqa: ASYNC251  the hold-up itself
    await asyncio.sleep(0.05)
    lag.stop()
    count = len(seen)
    late, held = max(seen)
    assert late > 0.06 and 0.04 < held <= late and count > 3
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
    assert seen
    lag.stop()


async def test_the_lag_is_a_metric(server: Any) -> None:
    server.bus.script = (FOREVER,)
    waiting = asyncio.create_task(server.chat())
    await asyncio.sleep(0.15)
    waiting.cancel()
    assert await server.metric("omni_bus_event_loop_lag_seconds_count") > 2
    assert await server.metric("omni_bus_event_loop_lag_worst_seconds") > 0


async def test_large_media_are_decoded_off_the_loop(server: Any) -> None:
    """20 MB of audio in four requests at once: no step of the loop takes longer than the processor time of 20 ms."""
    buffer = io.BytesIO()
    samples = (np.random.default_rng(1).standard_normal(48_000 * 20) * 8000).astype(np.int16)
    soundfile.write(buffer, np.stack([samples, samples], 1), 48_000, format="WAV")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(buffer.getvalue()).decode(), "format": "wav"}}
    message = [{"role": "user", "content": [part]}]
    body = json.dumps({"model": "scripted", "messages": message}).encode()
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
    assert worst < 0.020
