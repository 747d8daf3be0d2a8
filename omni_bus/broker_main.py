"""The broker process: `python -m omni_bus.broker_main RUN_DIR`."""

from __future__ import annotations

import asyncio
import gc
import os
import pathlib
import signal
import sys
import time

import uvloop

from omni_bus.broker import Broker
from omni_bus.deployment import RunDir
from omni_bus.errors import ConfigError
from omni_bus.process import die_with_parent
from omni_bus.spec import load_pipeline


def log(line: str) -> None:
    """One line to stderr, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} broker {line}", file=sys.stderr, flush=True)


async def serve(run_dir: RunDir) -> None:
    """Serve one deployment until SIGTERM."""
    deployment = run_dir.read()
    broker = Broker(run_dir.broker, load_pipeline(deployment.model.pipeline), deployment, log, run_dir.secrets())
    try:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, broker.stop)
        loop.add_signal_handler(
            signal.SIGINT, lambda: None
        )  # a Ctrl-C reaches all processes; the supervisor stops them in order
        gc.freeze()
        await broker.wait()
    finally:
        broker.close()


def main() -> int:
    die_with_parent()
    os.umask(0o077)
    try:
        uvloop.run(serve(RunDir(pathlib.Path(sys.argv[1]))))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
