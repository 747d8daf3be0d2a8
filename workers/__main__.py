"""`python -m omni_bus.workers RUN_DIR WORKER INCARNATION`: the process that the supervisor starts for each worker."""

from __future__ import annotations

import argparse
import logging
import pathlib
import sys

import torch

from omni_bus import segments
from omni_bus.connectors.cuda_ipc import CudaIpcConnector
from omni_bus.connectors.select import Connectors
from omni_bus.deployment import RunDir
from omni_bus.errors import ConfigError
from omni_bus.names import did_you_mean
from omni_bus.process import die_with_parent
from omni_bus.spec import load_pipeline
from omni_bus.workers import engine_loop
from omni_bus.workers.devices import threads_of
from omni_bus.workers.link import BrokerLink
from omni_bus.workers.stop_signal import StopSignal
from omni_bus.workers.trace import Trace, TracedLink
from omni_bus.workers.worker import Worker


def serve(run_dir: RunDir, name: str, incarnation: int, stop: StopSignal) -> None:
    """Load the worker's stages and serve until the broker or a signal ends it. Raises ConfigError for what the user can mend."""
    deployment = run_dir.read()
    pipeline = load_pipeline(deployment.model.pipeline)
    workers = deployment.workers()
    if name not in workers:
        raise ConfigError(f"no worker {name!r} in this deployment{did_you_mean(name, workers)}")
    segments.sweep()
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads_of(deployment, workers[name]))
    cuda_ipc = CudaIpcConnector(run_dir.tag, buffer_bytes=deployment.bus.gpu_buffer_mb << 20)
    connectors = Connectors(run_dir.tag, cuda_ipc=cuda_ipc)
    link: BrokerLink
    if deployment.bus.trace:
        trace = Trace(deployment.bus.trace, f"{name}.{incarnation}")
        link, pipeline = TracedLink(run_dir.broker, name, stop.fd, trace), trace.pipeline(pipeline)
    else:
        link = BrokerLink(run_dir.broker, name, stop.fd)
    try:
        worker = Worker(name, deployment, pipeline, connectors, link.send)
        worker.register()
        stop.abort = True
        worker.load()
        stop.abort = False
        engine_loop.run(worker, link, stop, deployment.bus.heartbeat_s)
    finally:
        stop.abort = False
        connectors.close()
        link.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m omni_bus.workers", description=__doc__)
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument("worker")
    parser.add_argument("incarnation", type=int, help="how many times the supervisor has started this worker before")
    arguments = parser.parse_args()
    die_with_parent()
    stop = StopSignal()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger(__name__).info("worker %s, start %d", arguments.worker, arguments.incarnation)
    try:
        serve(RunDir(arguments.run_dir), arguments.worker, arguments.incarnation, stop)
    except ConfigError as error:
        print(f"{arguments.worker}: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
