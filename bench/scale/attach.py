"""How long a worker of another host takes from its start to its first chunk: `omni-bus worker` over TCP and CURVE, here by the loopback."""

from __future__ import annotations

import asyncio
import pathlib
import signal
import sys
import tempfile
import time
from typing import Any

from bench.demo import free_port
from bench.scale.server import Server, serving, until
from omni_bus.bench_load import Load, one
from omni_bus.events import Status
from omni_bus.http_client import Unreachable, first_model
from omni_bus.keys import new_certificates

LIMIT_S = 60.0
STAGE = "relay"
CONFIG = """
[model]
pipeline = "probe"
[bus]
listen = "tcp://127.0.0.1:{port}"
keys = "keys"
[stages.source]
threads = 1
[stages.relay]
replicas = 0
threads = 1
[stages.sink]
threads = 1
"""


def missing(*stages: str) -> Any:
    """Whether a status has these stages without a ready replica, and no others."""

    def holds(status: Status) -> bool:
        return status.missing == stages

    return holds


async def attached(server: Server, broker: str, key: pathlib.Path, load: Load, number: int) -> dict[str, float]:
    """Seconds since the command was started; it is then told to leave, and the stage has nobody again."""
    start = time.monotonic()
    words = ["-m", "omni_bus", "worker", "--broker", broker, "--key", str(key), "--stage", STAGE, "--threads", "1"]
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert worker.stderr is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            while b"attached to" not in (line := await worker.stderr.readline()):
                if not line:
                    raise RuntimeError("the worker ended before it was attached")
            let_in = time.monotonic() - start
            await until(server, missing())
            ready = time.monotonic() - start
            answer = await one(load, number)
            if answer.error is not None:
                raise RuntimeError(f"the stage was ready, and a request failed: {answer.error}")
            first = ready + answer.packets[0][0]
            worker.send_signal(signal.SIGINT)
            await until(server, missing(STAGE))
            await worker.wait()
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
    return {"attached_s": round(let_in, 3), "ready_s": round(ready, 3), "first_chunk_s": round(first, 3)}


def measure(runs: int, end: float) -> dict[str, Any]:
    """`runs` workers, one after the other; none is begun after `end`."""

    async def all_of(server: Server, broker: str, key: pathlib.Path) -> list[dict[str, float]]:
        async with asyncio.timeout(LIMIT_S):
            while not list(server.base.glob("omni-bus-*/broker.sock")):  # noqa: ASYNC110  (nothing is measured yet)
                await asyncio.sleep(0.1)
            await until(server, missing(STAGE))
            load = server.load(model=await _model(server), words=4)
        found: list[dict[str, float]] = []
        for number in range(runs):
            if found and time.monotonic() > end:
                break
            found.append(await attached(server, broker, key, load, number))
        return found

    with tempfile.TemporaryDirectory() as scratch:
        directory, port = pathlib.Path(scratch), free_port(0)
        new_certificates(directory / "keys", "worker")
        config = directory / "remote.toml"
        config.write_text(CONFIG.format(port=port))
        with serving(config, [], ready=False) as server:
            key = directory / "keys" / "worker.key_secret"
            return {"stage": STAGE, "runs": asyncio.run(all_of(server, f"tcp://127.0.0.1:{port}", key))}


async def _model(server: Server) -> str:
    """The API listens some time after the broker does."""
    while True:
        try:
            return await first_model(server.url)
        except Unreachable:
            await asyncio.sleep(0.1)
