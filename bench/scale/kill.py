"""From `kill -9` of one process to the first packet of an answer that was asked for afterwards; the server mends itself, nobody helps.

A client asks anew as soon as it is refused. Each round has a server of its own, as a process that dies again soon is started again later.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from bench.scale.server import PROBE, PROBE_STAGES, TINY_STAGES, Server, one_thread, serving, tiny_qwen, until
from omni_bus.bench_load import Load, one
from omni_bus.events import Status
from omni_bus.http_client import first_model

LIMIT_S = 60.0
AGAIN_S = 0.01  # between an answer that failed and the next question
ONE_OF_TWO = "sink.1"
TARGETS = ("source.0", "relay.0", "sink.0", "api.0", "broker")


async def killed(server: Server, target: str, load: Load) -> dict[str, Any]:
    """Seconds until a request that was begun after the kill brought its first packet, and until all processes were ready again."""
    pid = server.pid(target)

    def whole(status: Status) -> bool:
        """Every replica is ready, and none of them is the process that was killed."""
        return status.ready and all(replica.state == "ready" and replica.pid != pid for replica in status.replicas)

    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    failed = 0
    async with asyncio.timeout(LIMIT_S):
        while True:
            began = time.monotonic()
            answer = await one(load, failed)
            if answer.error is None:
                break
            failed += 1
            await asyncio.sleep(AGAIN_S)
        restored = began + answer.packets[0][0] - start
        await until(server, whole)
    return {"target": target, "restored_s": round(restored, 3), "whole_s": round(time.monotonic() - start, 3), "failed": failed}


def measure(runs: int, end: float) -> dict[str, Any]:
    """`runs` rounds on the probe: each target once with one replica a stage, then one of two. Then each stage of the tiny Qwen3-Omni, once.

    None is begun after `end`.
    """

    async def on_probe(server: Server) -> list[dict[str, Any]]:
        load = server.load(model=await first_model(server.url), words=2)
        found = [await killed(server, target, load) for target in TARGETS]
        await asyncio.to_thread(server.command, "scale", ONE_OF_TWO.partition(".")[0], "2")
        return [*found, await killed(server, ONE_OF_TWO, load)]

    async def on_tiny(server: Server) -> list[dict[str, Any]]:
        load = server.load(model=await first_model(server.url), text_tokens=4, frames=4)
        return [await killed(server, f"{stage}.0", load) for stage in TINY_STAGES]

    rows: list[dict[str, Any]] = []
    for _ in range(runs):
        if rows and time.monotonic() > end:
            return {"rows": rows}
        with serving(PROBE, one_thread(*PROBE_STAGES)) as server:
            rows += asyncio.run(on_probe(server))
    if time.monotonic() < end:
        with tiny_qwen() as server:
            rows += asyncio.run(on_tiny(server))
    return {"rows": rows}
