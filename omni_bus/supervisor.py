"""`omni-bus up`: starts broker, workers and API, shows their progress, starts again what dies, stops all in order.

SIGTERM drains first: what runs has `bus.drain_s` to finish, and the API says meanwhile that it takes nothing new. Ctrl-C does not wait
so long, and a second signal waits for nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterable
from typing import Any

from omni_bus.api_port import check_port
from omni_bus.broker_link import NO_BROKER, BrokerLink
from omni_bus.child import Child, how_it_ended
from omni_bus.control_server import ControlServer
from omni_bus.deployment import Deployment
from omni_bus.errors import ShuttingDown
from omni_bus.events import DrainWorker, Exited, Expect, Status
from omni_bus.liveness import Liveness, states_of
from omni_bus.mps import Mps, wanted
from omni_bus.operations import Operations
from omni_bus.progress import Progress
from omni_bus.run_dirs import clear_run_dir, create_run_dir, sweep_run_dirs
from omni_bus.segments import sweep
from omni_bus.spec import load_pipeline
from omni_bus.stop_order import Stop
from omni_bus.worker_pool import WorkerPool

EARLY_DEATHS = 3  # of one process, before the server was ever ready: then it never will be
LAST_LINES = 15
USER_ERROR = 2
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported


class Supervisor:
    """One running server. `run` returns the exit code."""

    def __init__(self, deployment: Deployment, *, verbose: bool = False) -> None:
        self._deployment = deployment
        self._verbose = verbose
        self._progress = Progress(tuple(deployment.stages), sys.stderr)
        self._run_dir = create_run_dir()
        self._broker = self._child("broker")
        pipeline = load_pipeline(deployment.model.pipeline)
        self._pool = WorkerPool(self._run_dir, deployment, pipeline, make=self._child, start=self._start, tell=self._tell)
        self._apis = [self._child(f"api.{index}") for index in range(deployment.api.processes)]
        self._mps = Mps(self._run_dir, self._progress.say) if wanted(deployment) else None
        self._link: BrokerLink | None = None
        self._liveness = Liveness(deployment.bus, self._tell_user)
        self._broker_watch: asyncio.Task[None] | None = None
        self._stages_ready = False
        self._announced = False
        self._stopping = False
        self._drains = False  # the stop lets what runs finish
        self._control: ControlServer | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}  # child → its next start
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[int]
        self._hurry = asyncio.Event()

    @property
    def url(self) -> str:
        host = self._deployment.api.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._deployment.api.port}"

    async def run(self) -> int:
        """Serve until a signal, or until a process cannot be started."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        self._note_all("swept", [*sweep(), *(str(path) for path in sweep_run_dirs(self._run_dir))])
        self._run_dir.write(self._pool.deployment)
        await self._start_mps()
        if not self._stopping:
            self._start_all()
            self._control = await ControlServer.start(self._run_dir.control, self._operations(), self._ready, self._tell_user)
        code = await self._ended
        await self._stop()
        if self._mps is not None:
            await self._mps.stop()
        self._note_all("swept", sweep(tag=self._run_dir.tag))
        clear_run_dir(self._run_dir, keep_logs=code != 0)
        if code != 0:
            self._progress.say(f"omni-bus: the logs are in {self._run_dir.path}")
        return code

    def _child(self, name: str) -> Child:
        return Child(name, self._run_dir.log(name), self._on_exit)

    def _operations(self) -> Operations:
        bus = self._deployment.bus
        pipeline = load_pipeline(self._deployment.model.pipeline)
        return Operations(self._pool, pipeline, self._status, self._drain_remote, drain_s=bus.drain_s)

    def _ready(self) -> bool:
        return self._announced and self._link is not None

    async def _status(self) -> Status:
        if self._link is None:
            raise ShuttingDown(NO_BROKER)
        return await self._link.status()

    async def _drain_remote(self, worker: str, grace_s: float) -> None:
        """Of another host: until the broker knows it no longer."""
        if (link := self._link) is None:
            raise ShuttingDown(NO_BROKER)
        link.send(DrainWorker(worker, grace_s))
        await link.until(lambda status: all(replica.worker != worker for replica in status.replicas))

    def _tell(self, event: Expect | DrainWorker) -> None:
        """A broker that is not there reads the deployment when it comes."""
        if self._link is not None:
            self._link.send(event)

    async def _start_mps(self) -> None:
        """Before the workers: CUDA looks for it once, when a process first uses it."""
        if self._mps is None:
            return
        starting = asyncio.ensure_future(self._mps.start())
        either: set[asyncio.Future[Any]] = {starting, self._ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return
        if (reason := starting.result()) is None:
            self._note("mps started")
        elif self._deployment.bus.mps == "on":
            self._progress.say(f"omni-bus: bus.mps: {reason}")
            self._end(USER_ERROR)
        else:
            self._progress.say(f"omni-bus: going on without MPS: {reason}")
            self._mps = None

    def _start_all(self) -> None:
        self._stages_ready = False
        for child in self._children():
            self._start(child)
        self._spawn(self._liveness.standing_still(self._children, self._apis))

    def _start(self, child: Child) -> None:
        if child.alive or child.leaving or self._stopping:
            return
        python, run_dir = [sys.executable, "-m"], str(self._run_dir.path)
        if child is self._broker:
            child.start([*python, "omni_bus.broker_main", run_dir])
            self._connect()
            self._broker_watch = self._spawn(self._liveness.broker(child, self._status, self._connect))
        elif child in self._pool.children:
            child.start(
                [*python, "omni_bus.workers", run_dir, child.name, str(child.incarnation)],
                environment=self._worker_environment(),
            )
        else:
            child.start(
                [*python, "omni_bus.api", run_dir, child.name.removeprefix("api.")], self._announce, self._api_environment()
            )
        self._note(f"{child.name} started, pid {child.pid}")

    def _worker_environment(self) -> dict[str, str]:
        return {**os.environ, **({} if self._mps is None else self._mps.environment)}

    def _api_environment(self) -> dict[str, str]:
        """Several API processes answer scrapes for each other, from files that prometheus_client keeps in this directory."""
        environment = {name: value for name, value in os.environ.items() if name != METRICS_VARIABLE}
        if self._deployment.api.processes > 1:
            environment[METRICS_VARIABLE] = str(self._run_dir.metrics)
        return environment

    def _children(self) -> Iterable[Child]:
        return [self._broker, *self._pool.children, *self._apis]

    # ---- becoming ready

    def _on_status(self, status: Status) -> None:
        self._progress.show(status)
        for child in self._pool.children:
            if not child.ready and all(found and {*found} == {"ready"} for found in states_of(status, child)):
                child.ready = True
                if child.incarnation > 1 and not child.on_trial:
                    self._progress.say(f"omni-bus: {child.name} is ready again")
        if not self._stopping:
            self._liveness.workers(status, self._pool.children)
        self._stages_ready = status.ready
        self._announce()

    def _announce(self) -> None:
        """Once every stage is ready and every API process listens."""
        if self._stopping or not self._stages_ready or not all(api.ready for api in self._apis):
            return
        self._broker.ready = True
        if not self._announced:
            self._announced = True
            self._progress.close()
            print(f"omni-bus: ready on {self.url}", flush=True)

    # ---- what dies

    def _on_exit(self, child: Child, code: int) -> None:
        sweep(tag=self._run_dir.tag, pid=child.pid)
        self._note(f"{child.name} ended: {how_it_ended(code)}")
        if self._stopping or child.expected:
            return
        if child in self._pool.children and self._link is not None:
            for worker in child.workers:
                self._link.send(Exited(worker))
        if child.leaving or child.on_trial:
            return  # whoever asked for that waits for it
        if not self._announced and (code == USER_ERROR or child.early_deaths >= EARLY_DEATHS):
            self._give_up(child, code)
            return
        delay = child.backoff(self._deployment.bus.restart_backoff_s)
        self._progress.say(f"omni-bus: {child.title} ended ({how_it_ended(code)}); starting it again in {delay:g} s")
        if child is self._broker:
            self._disconnect()
        self._later(delay, child)

    def _give_up(self, child: Child, code: int) -> None:
        self._progress.close()
        if code == USER_ERROR:
            [reason] = child.last_lines(1) or [f"{child.name} refused the configuration"]
            self._progress.say(f"omni-bus: {reason}")
            self._end(USER_ERROR)
            return
        for line in child.last_lines(LAST_LINES):
            self._progress.say(f"  {child.name} | {line}")
        times = f"{child.early_deaths} times before it was ready"
        self._progress.say(f"omni-bus: {child.name} ended {times} ({how_it_ended(code)}); its last lines are above")
        self._end(1)

    def _connect(self) -> None:
        """To the broker that is, or comes. Workers and API processes do so by themselves, with nothing left of what the last one knew."""
        if self._link is not None:
            self._link.close()
        self._link = BrokerLink(self._run_dir.broker, self._on_status)

    def _disconnect(self) -> None:
        if self._broker_watch is not None:
            self._broker_watch.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._stages_ready = False

    def _later(self, delay: float, child: Child) -> None:
        self._timers[child.name] = asyncio.get_running_loop().call_later(delay, self._start, child)

    # ---- stopping

    def _on_signal(self, number: signal.Signals) -> None:
        self._note(f"{number.name}")
        if self._stopping:
            self._hurry.set()
        self._drains = self._drains or number == signal.SIGTERM
        self._end(0)

    def _end(self, code: int) -> None:
        self._stopping = True
        if not self._ended.done():
            self._ended.set_result(code)

    async def _stop(self) -> None:
        self._progress.close()
        if self._control is not None:
            await self._control.close()
        for timer in self._timers.values():
            timer.cancel()
        self._liveness.close()
        for task in self._tasks:
            task.cancel()
        stop = Stop(self._broker, self._pool.children, self._apis, self._link, self._hurry)
        if self._drains:
            self._tell_user(f"draining for up to {self._deployment.bus.drain_s:g} s; once more, and it ends at once")
            await stop.drain(self._deployment.bus.drain_s)
        await stop.all()
        if self._link is not None:
            self._link.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- small things

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._progress.say(f"omni-bus: internal error: {error!r}")
            self._end(1)

    def _tell_user(self, text: str) -> None:
        self._progress.say(f"omni-bus: {text}")

    def _note_all(self, what: str, names: Iterable[str]) -> None:
        for name in names:
            self._note(f"{what} {name}")

    def _note(self, text: str) -> None:
        if self._verbose:
            self._progress.say(f"omni-bus: {text}")


def serve(deployment: Deployment, *, verbose: bool = False) -> int:
    """Run a server in this process's main thread until it is told to stop; returns the exit code."""

    async def main() -> int:
        return await Supervisor(deployment, verbose=verbose).run()

    check_port(deployment)
    return asyncio.run(main())
