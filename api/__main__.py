"""`python -m omni_bus.api RUN_DIR INDEX DESCRIPTOR`: one API process of a running server. Ends in order on SIGTERM or SIGINT.

DESCRIPTOR is the pipe to whoever started it: it gets a byte when the process listens, and one with each `bus.heartbeat_s` from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Callable

import uvloop
from aiohttp import web

from omni_bus.api.app import create_app, create_runner
from omni_bus.api.bus import Bus
from omni_bus.api.metrics import Metrics, share_metrics
from omni_bus.client import BusClient
from omni_bus.deployment import RunDir
from omni_bus.errors import OmniBusError
from omni_bus.process import die_with_parent
from omni_bus.spec import load_pipeline


async def serve(run_dir: RunDir, index: int, beat: Callable[[], None]) -> None:
    """Until a signal asks to end. `beat` is called when it listens, and again and again while its loop goes round."""
    deployment = run_dir.read()
    pipeline = load_pipeline(deployment.model.pipeline)

    async def connect() -> Bus:
        return await BusClient.connect(run_dir.broker, pipeline)

    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    if deployment.api.processes > 1:
        share_metrics(run_dir.metrics, index)
    metrics = Metrics(run_dir.metrics, index) if deployment.api.processes > 1 else Metrics()
    app = create_app(deployment, pipeline, connect, metrics)
    runner = create_runner(app)
    await runner.setup()
    gc.collect()
    gc.freeze()  # what lives for good need not be walked by later collections: they hold the loop
    try:
        api = deployment.api
        await web.TCPSite(runner, api.host, api.port, reuse_port=api.processes > 1).start()
        while not ending.is_set():
            beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deployment.bus.heartbeat_s):
                    await ending.wait()
    finally:
        await runner.cleanup()


def main(arguments: list[str]) -> int:
    run_dir, index, pipe = RunDir(pathlib.Path(arguments[0])), int(arguments[1]), int(arguments[2])
    os.set_blocking(pipe, False)
    die_with_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s api.{index} %(levelname)s %(name)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(run_dir, index, lambda: _tell(pipe)))
    except (OmniBusError, OSError) as error:
        print(f"api.{index}: {error}", file=sys.stderr)
        return 1
    return 0


def _tell(pipe: int) -> None:
    # A supervisor that is stopped does not read, and one that is gone takes this process with it.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(pipe, b"+")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
