"""A process whose stages have a thread each: one worker a thread, with a link, a loop and a CUDA stream of its own.

The broker sees as many workers as if each had a process. What they share is what a process has once: CUDA's context and memory,
Python's lock, the signals, which reach the main thread only, and the end: where one of them ends unasked, all do, and are started
again together.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Mapping

import torch

from omni_bus.deployment import Deployment, RunDir
from omni_bus.errors import ConfigError
from omni_bus.spec import PipelineSpec
from omni_bus.stages.streams import take_stream
from omni_bus.workers import seat, watchdog
from omni_bus.workers.devices import device_of
from omni_bus.workers.stop_signal import GRACE_S, StopSignal

_log = logging.getLogger(__name__)
# Between two turns at Python's lock. A step whose work on the card is done waits so long for another stage's Python; the interpreter's
# own 5 ms would be longer than the step.
SWITCH_S = 0.0005


class ThreadStop:
    """StopSignal for a loop in another thread than the main one."""

    def __init__(self) -> None:
        self.raised = False
        self.leave = False
        self.abort = True  # until its stages are loaded, from the first moment on: nothing before that looks at a flag
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def tell(self, *, raised: bool, leave: bool = False) -> None:
        """By the main thread."""
        self.raised |= raised
        self.leave |= leave
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class StageThreads:
    """The threads of one process. To be used from its main thread."""

    def __init__(
        self,
        run_dir: RunDir,
        deployment: Deployment,
        pipeline: PipelineSpec,
        workers: Mapping[str, tuple[str, ...]],
        incarnation: int,
    ) -> None:
        self._run_dir = run_dir
        self._deployment = deployment
        self._pipeline = pipeline
        self._workers = workers
        self._incarnation = incarnation
        self._stops = {name: ThreadStop() for name in workers}
        self._ends: queue.SimpleQueue[tuple[str, seat.End]] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # one more in `_ends`
        self._problem = ""  # what the user can mend: the log's last line

    def serve(self, stop: StopSignal) -> int:
        """Until all have ended as they were to; returns the exit code. Ends the process itself where one ends otherwise."""
        sys.setswitchinterval(SWITCH_S)
        for stages in self._workers.values():
            for stage in stages:
                # Imports what it needs: threads that import at once may meet half a module.
                self._pipeline.stage(stage).factory()
        running = set(self._workers)
        for name in self._workers:
            # Daemons: the interpreter's end would wait for one that is in the middle of a load.
            threading.Thread(target=self._run, args=(name,), name=name, daemon=True).start()
        poller = select.poll()
        for descriptor in (stop.fd, self._bell):
            poller.register(descriptor, select.POLLIN)
        first: seat.End | None = None  # that was not asked for
        until = math.inf
        while running:
            poller.poll(None if until == math.inf else max(0, math.ceil(1000 * (until - time.monotonic()))))
            stop.clear()
            for name, end in self._ended():
                running.discard(name)
                if not end.asked and first is None and not stop.raised:
                    first, until = end, time.monotonic() + GRACE_S
                    if running:
                        _log.error("%s has ended, and with it end %s", name, ", ".join(sorted(running)))
            ending = first is not None or stop.raised
            if (ending or stop.leave) and running:
                loading = any(self._stops[name].abort for name in running)
                if loading or time.monotonic() >= until:
                    self._exit(0 if first is None else first.code)
                for name in running:
                    self._stops[name].tell(raised=ending, leave=stop.leave)
        if first is not None:
            self._exit(first.code)
        return 0

    def _run(self, name: str) -> None:
        """In the thread of worker `name`."""
        end = seat.End(1, False)
        try:
            for stage in self._workers[name]:
                own_stream(device_of(self._deployment, stage, int(name.rpartition(".")[2])))
            end = seat.serve(self._run_dir, self._deployment, self._pipeline, name, self._incarnation, self._stops[name])
        except ConfigError as error:
            end = seat.End(2, False)
            self._problem = self._problem or f"{name}: {error.message}"
        except Exception:
            _log.exception("%s failed", name)
        finally:
            watchdog.loop_is_over()
            self._ends.put((name, end))
            os.eventfd_write(self._bell, 1)

    def _ended(self) -> list[tuple[str, seat.End]]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._ends.get_nowait())
        return found

    def _exit(self, code: int) -> None:
        """At once: a load looks at no flag, and the interpreter takes seconds to put torch away, in which the broker misses its workers.
        What is left of shared memory is swept by whoever started this process."""
        if self._problem:
            print(self._problem, file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)


def own_stream(device: str) -> None:
    """Have this thread's kernels and copies go to a stream that waits for no other thread's."""
    if device != "cpu":
        torch.cuda.set_stream(take_stream(device, threading.current_thread()))
