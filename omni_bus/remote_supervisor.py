"""`omni-bus worker`: brings workers to a broker on another host, starts again what dies, attaches anew, and leaves in order."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec

from omni_bus.attach import ATTACH_ANEW, DISMISSED, Attachment, remote_name, seated
from omni_bus.attach_client import NoBroker, ask, wish
from omni_bus.child import BACKOFF_LIMIT_S, Child, how_it_ended
from omni_bus.config import with_threads
from omni_bus.deployment import BusConfig, Deployment
from omni_bus.devices import missing_device
from omni_bus.errors import ConfigError, DeviceUnavailable
from omni_bus.events import Attached
from omni_bus.keys import KeyPair, ServerSecrets, WorkerKey
from omni_bus.liveness import Liveness
from omni_bus.memory import plan
from omni_bus.names import did_you_mean
from omni_bus.run_dirs import clear_run_dir, create_run_dir, sweep_run_dirs
from omni_bus.segments import sweep
from omni_bus.spec import load_pipeline, pipeline_names
from omni_bus.tcp_endpoint import TcpEndpoint, own_address

ATTACH_S = 10.0  # for the first answer of the broker; later it may take any time to come back
TOLD_S = 4.5  # for a worker that was told to end now
MARGIN_S = 2.0  # that a drain may take beyond what the broker gives it
LAST_LINES = 15
USER_ERROR = 2


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for."""

    broker: TcpEndpoint
    key: WorkerKey
    stages: tuple[str, ...]
    pipeline: str = ""  # "" = whichever the broker serves
    replicas: int = 1
    devices: tuple[str, ...] = ()  # dealt out to the replicas; () = what the broker's deployment says first
    threads: int = 0
    model_path: str | None = None  # None = what the broker says
    address: str = ""  # at which other hosts reach this one; "" = the one towards the broker
    data_port: int = 0  # 0 = the one behind the broker's


class RemoteSupervisor:
    """`run` returns the exit code. Raises ConfigError for what the user can mend before anything has started."""

    def __init__(self, wanted: Wanted, *, verbose: bool = False) -> None:
        self._wanted = wanted
        self._verbose = verbose
        name = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32] or "host"
        self._host = f"{name}-{secrets.token_hex(3)}"
        self._run_dir = create_run_dir()
        self._children: list[Child] = []
        self._bus = BusConfig()  # the broker's, once it has told
        self._stopping = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._attaching: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None  # for workers that are stopped; one whose loop hangs ends itself
        self._ended: asyncio.Future[int]
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        code = USER_ERROR
        try:
            sweep()
            sweep_run_dirs(self._run_dir)
            first = asyncio.ensure_future(self._attach(ATTACH_S))
            await self._first_of(first, self._ended)
            if first.done():
                first.result()
                self._start_all()
            else:
                first.cancel()
                await asyncio.wait({first})
            code = await self._ended
        finally:
            await self._stop()
            sweep(tag=self._run_dir.tag)
            clear_run_dir(self._run_dir, keep_logs=code == 1)
        if code == 1:
            self._say(f"the logs are in {self._run_dir.path}")
        return code

    # ---- attaching

    async def _attach(self, wait_s: float) -> None:
        """Ask the broker what to serve, check that it can be served here, and write it down for the workers."""
        wanted = self._wanted
        told = await ask(wanted.broker, wanted.key, self._host, wish(wanted.stages, wanted.pipeline), wait_s)
        deployment = self._seated(told)
        self._bus = deployment.bus
        attachment = Attachment(
            broker=str(wanted.broker),
            key=wanted.key,
            host=self._host,
            address=wanted.address or own_address(wanted.broker),
            listen="*" if wanted.address else own_address(wanted.broker),
            data_port=wanted.data_port or wanted.broker.port + 1,
        )
        self._run_dir.write_secrets(ServerSecrets(told.server, KeyPair(told.data_public, told.data_secret)))
        attachment.write(self._run_dir)
        self._run_dir.write(deployment)
        self._say(f"attached to {wanted.broker}, pipeline {deployment.model.pipeline}")

    def _seated(self, told: Attached) -> Deployment:
        wanted = self._wanted
        try:
            theirs = msgspec.json.decode(told.deployment, type=Deployment)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"the broker's deployment cannot be read here: {error}; both sides need the same omni-bus"
            ) from None
        names = pipeline_names()
        if (name := theirs.model.pipeline) not in names:
            here = ", ".join(names)
            raise ConfigError(f'the broker serves pipeline "{name}"{did_you_mean(name, names)}, and omni-bus here has {here}')
        pipeline = load_pipeline(name)
        deployment = with_threads(
            seated(theirs, wanted.stages, wanted.devices, wanted.replicas, wanted.threads, wanted.model_path)
        )
        for stage in wanted.stages:
            for device in deployment.stages[stage].devices:
                if pipeline.stage(stage).cpu_only and device != "cpu":
                    raise DeviceUnavailable(f"--device: stage {stage} runs on the CPU only, not on {device}")
                if (problem := missing_device(device)) is not None:
                    raise DeviceUnavailable(f"--device: stage {stage} {problem}; name another with --device")
        try:
            pipeline.check_model(deployment.model.path, deployment.stages)
        except ConfigError as error:
            raise ConfigError(f"{error.message}; say with --model-path where the checkpoint is on this host") from None
        if problems := plan(deployment, pipeline).problems:
            raise ConfigError("\n".join(problems))
        return deployment

    async def _attach_anew(self) -> None:
        """As often as it takes: the broker may be away for long. Ends the command where it refuses."""
        delay = self._bus.restart_backoff_s
        for timer in self._timers.values():
            timer.cancel()
        for child in self._children:
            child.expected = True
            child.send_signal(signal.SIGTERM)
        await self._gone(TOLD_S)
        for child in self._children:
            child.send_signal(signal.SIGKILL)
        await self._gone(TOLD_S)
        while not self._stopping:
            await asyncio.sleep(delay)
            try:
                await self._attach(ATTACH_S)
            except NoBroker:
                delay = min(2 * delay, BACKOFF_LIMIT_S)
            except ConfigError as error:
                self._say(error.message)
                self._end(USER_ERROR)
            else:
                self._start_all()
                return

    # ---- the workers

    def _start_all(self) -> None:
        if not self._children:
            seats = (f"{self._wanted.stages[0]}.{number}" for number in range(self._wanted.replicas))
            self._children = [Child(seat, self._run_dir.log(seat), self._on_exit) for seat in seats]
        for child in self._children:
            self._start(child)
        if self._watching is not None:
            self._watching.cancel()
        liveness = Liveness(self._bus, self._say, self._name)
        # No worker is among those that beat: the one byte in its pipe says that it is ready.
        self._watching = asyncio.ensure_future(liveness.standing_still(lambda: self._children, ()))
        self._watching.add_done_callback(self._task_ended)

    def _start(self, child: Child) -> None:
        if child.alive or self._stopping:
            return
        command = [sys.executable, "-m", "omni_bus.workers", str(self._run_dir.path), child.name, str(child.incarnation)]
        child.start(command, lambda: self._say(f"{self._name(child)} is ready"))
        if self._verbose:
            self._say(f"{self._name(child)} started, pid {child.pid}")

    def _name(self, child: Child) -> str:
        return remote_name(child.name, self._host)

    def _on_exit(self, child: Child, code: int) -> None:
        sweep(tag=self._run_dir.tag, pid=child.pid)
        if self._stopping:
            if not any(child.alive for child in self._children):
                self._end(0)
            return
        if child.expected:
            return
        if code == DISMISSED:
            self._say(f"{self._name(child)} was drained by the server's operator and has left")
            self._children.remove(child)
            if not self._children:
                self._end(0)
        elif code == USER_ERROR:
            [reason] = child.last_lines(1) or [f"{child.name} refused to serve"]
            self._say(reason)
            self._end(USER_ERROR)
        elif code == ATTACH_ANEW or (code == 0 and not any(other.alive for other in self._children)):
            # The broker has sent all away: it stops, or it is another one than before.
            self._say(f"{self._name(child)} was sent away by the broker; attaching anew")
            if self._attaching is None or self._attaching.done():
                self._attaching = asyncio.ensure_future(self._attach_anew())
                self._attaching.add_done_callback(self._task_ended)
        else:
            for line in child.last_lines(LAST_LINES) if code and not child.ready else ():
                self._say(f"  {child.name} | {line}")
            delay = child.backoff(self._bus.restart_backoff_s)
            self._say(f"{self._name(child)} ended ({how_it_ended(code)}); starting it again in {delay:g} s")
            self._timers[child.name] = asyncio.get_running_loop().call_later(delay, self._start, child)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"internal error: {error!r}")
            self._end(1)

    # ---- leaving

    def _on_signal(self) -> None:
        if self._stopping:
            self._hurry.set()
        self._stopping = True
        if self._children and any(child.alive for child in self._children):
            self._say("leaving once what runs here has finished; a second Ctrl-C leaves at once")
        self._end(0)

    def _end(self, code: int) -> None:
        self._stopping = True
        if not self._ended.done():
            self._ended.set_result(code)

    async def _stop(self) -> None:
        """Drained first, unless the user is in a hurry; then told; then killed."""
        self._stopping = True
        for timer in self._timers.values():
            timer.cancel()
        for task in (self._attaching, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        for child in self._children:
            child.send_signal(signal.SIGUSR1)
        await self._gone(self._bus.drain_s + MARGIN_S)
        for child in self._children:
            child.send_signal(signal.SIGTERM)
        await self._gone(TOLD_S, even_in_a_hurry=True)
        for child in self._children:
            child.send_signal(signal.SIGKILL)
        await asyncio.gather(*(child.gone() for child in self._children))

    async def _gone(self, seconds: float, *, even_in_a_hurry: bool = False) -> None:
        """Wait until all have ended, the time is over, or the user is in a hurry."""
        everyone = asyncio.ensure_future(asyncio.wait_for(asyncio.gather(*(child.gone() for child in self._children)), seconds))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await self._first_of(everyone, *(() if even_in_a_hurry else (hurry,)))
        for future in (everyone, hurry):
            future.cancel()
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await everyone

    @staticmethod
    async def _first_of(*futures: asyncio.Future[Any]) -> None:
        await asyncio.wait(set(futures), return_when=asyncio.FIRST_COMPLETED)

    def _say(self, line: str) -> None:
        print(f"omni-bus: {line}", file=sys.stderr, flush=True)


def bring(wanted: Wanted, *, verbose: bool = False) -> int:
    """Serve from this process's main thread until told to leave; returns the exit code."""

    async def main() -> int:
        return await RemoteSupervisor(wanted, verbose=verbose).run()

    work: Coroutine[Any, Any, int] = main()
    return asyncio.run(work)
