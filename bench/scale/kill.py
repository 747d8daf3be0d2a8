"""From `kill -9` of one process to the first packet of an answer that was asked for afterwards; the server mends itself, nobody helps.

A client asks anew as soon as it is refused. Each round has a server of its own, as a process that dies again soon is started again later.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from bench.demo import ROOT
from bench.scale.replicas import PROBE_STAGES, one_thread
from bench.scale.server import Server, serving, until
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
    """`runs` rounds: each target once with one replica a stage, then one of two; none is begun after `end`."""

    async def all_of(server: Server) -> list[dict[str, Any]]:
        load = server.load(model=await first_model(server.url), words=2)
        found = [await killed(server, target, load) for target in TARGETS]
        stage = ONE_OF_TWO.partition(".")[0]
        await asyncio.to_thread(server.command, "scale", stage, "2")
        return [*found, await killed(server, ONE_OF_TWO, load)]

    rows: list[dict[str, Any]] = []
    for number in range(runs):
        if rows and time.monotonic() > end:
            break
        with serving(ROOT / "configs" / "probe.toml", one_thread(*PROBE_STAGES)) as server:
            rows += [{"round": number, **row} for row in asyncio.run(all_of(server))]
    return {"rows": rows}
