"""`python -m omni_bus.workers RUN_DIR PROCESS INCARNATION`: the process that a supervisor starts for stages, here or elsewhere."""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
import sys

import torch

from omni_bus import segments
from omni_bus.deployment import RunDir
from omni_bus.errors import ConfigError
from omni_bus.names import did_you_mean
from omni_bus.process import die_with_parent
from omni_bus.spec import load_pipeline
from omni_bus.workers import seat
from omni_bus.workers.devices import threads_of
from omni_bus.workers.stop_signal import StopSignal
from omni_bus.workers.threads import StageThreads


def serve(run_dir: RunDir, process: str, incarnation: int, stop: StopSignal, ready_fd: int | None) -> int:
    """Serve with all workers of the process until the broker or a signal ends it; returns the exit code.

    Raises ConfigError for what the user can mend.
    """
    deployment = run_dir.read()
    pipeline = load_pipeline(deployment.model.pipeline)
    processes = deployment.processes()
    if process not in processes:
        raise ConfigError(f"no worker {process!r} in this deployment{did_you_mean(process, processes)}")
    workers = processes[process]
    segments.sweep()
    torch.set_num_threads(threads_of(deployment, tuple(stage for stages in workers.values() for stage in stages)))
    if process not in workers:
        assert ready_fd is None, "on another host stages of one process take turns (attach.seated)"
        return StageThreads(run_dir, deployment, pipeline, workers, incarnation).serve(stop)

    def loaded() -> None:
        if ready_fd is not None:
            os.write(ready_fd, b"+")
            os.close(ready_fd)

    return seat.serve(run_dir, deployment, pipeline, process, incarnation, stop, loaded).code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m omni_bus.workers", description=__doc__)
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument("process")
    parser.add_argument("incarnation", type=int, help="how many times the supervisor has started this process before")
    parser.add_argument("ready_fd", type=int, nargs="?", help="descriptor of a pipe that is told when all is loaded")
    arguments = parser.parse_args()
    die_with_parent()
    stop = StopSignal()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger(__name__).info("process %s, start %d", arguments.process, arguments.incarnation)
    try:
        return serve(RunDir(arguments.run_dir), arguments.process, arguments.incarnation, stop, arguments.ready_fd)
    except ConfigError as error:
        print(f"{arguments.process}: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
