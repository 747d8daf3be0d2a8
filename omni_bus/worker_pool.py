"""The processes of stages of one server: which there are, how one is added, renewed, drained and taken away while the others serve."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable

from omni_bus.child import Child
from omni_bus.deployment import Deployment, RunDir
from omni_bus.errors import OmniBusError
from omni_bus.events import DrainWorker, Expect
from omni_bus.scaling import numbers_of, replicas_of, with_held, with_numbers
from omni_bus.spec import PipelineSpec

LEAVE_S = 3.0  # after its drain, for a worker to go by itself; then it is asked
ASKED_S = 2.0  # and then it is killed


class NotStarted(OmniBusError):
    """A worker process ended before it was ready."""

    code = "not_started"
    status = 500


class WorkerPool:
    """`make` and `start` are the supervisor's, which starts again what dies; `tell` reaches the broker, if there is one."""

    def __init__(
        self,
        run_dir: RunDir,
        deployment: Deployment,
        pipeline: PipelineSpec,
        *,
        make: Callable[[str], Child],
        start: Callable[[Child], None],
        tell: Callable[[Expect | DrainWorker], None],
    ) -> None:
        self._run_dir = run_dir
        self._make = make
        self._start = start
        self._tell = tell
        self._pipeline = pipeline
        self.deployment = with_held(deployment, pipeline)  # as it stands now
        self.children = [self._child(name) for name in deployment.processes()]

    def of_group(self, group: str) -> list[Child]:
        """Those that stay, by number."""
        return sorted((child for child in self.children if group_name(child) == group and not child.leaving), key=number)

    def reserve(self, group: str, new: Iterable[int]) -> None:
        """Divide what is left of the devices among workers that are to be added: all at once, or the first would take what others need."""
        self._set_numbers(group, {*numbers_of(self.deployment, group), *new})

    async def add(self, group: str, new: int) -> Child:
        """Start a worker for which memory was reserved, and wait until it is ready: the broker gives it requests from then on. Raises NotStarted, and forgets it."""
        child = self._child(f"{group}.{new}")
        child.on_trial = True
        self.children.append(child)
        try:
            await self._started(child)
        except NotStarted:
            self._forget(child)
            raise
        finally:
            child.on_trial = False
        return child

    async def renew(self, child: Child, grace_s: float) -> None:
        """Drain a worker and start it again in its place, with what its device has then. Raises NotStarted where the new process ends;
        it is then tried again."""
        await self._drained(child, grace_s)
        self._write(with_held(self.deployment, self._pipeline, anew=child.name))
        child.leaving = False
        await self._started(child)

    async def remove(self, child: Child, grace_s: float) -> None:
        """Drain a worker, for up to `grace_s` seconds, and take it away. Returns when it has ended."""
        await self._drained(child, grace_s)
        self._forget(child)

    def _child(self, name: str) -> Child:
        child = self._make(name)
        child.workers = tuple(self.deployment.processes()[name])
        return child

    async def _started(self, child: Child) -> None:
        for worker, replicas in replicas_of(self.deployment, child.name).items():
            self._tell(Expect(worker, replicas))
        self._start(child)
        if not await child.settled():
            [why] = child.last_lines(1) or ["it says nothing"]
            raise NotStarted(f"{child.name} ended before it was ready: {why}")

    async def _drained(self, child: Child, grace_s: float) -> None:
        child.leaving = True
        for worker in child.workers:
            self._tell(DrainWorker(worker, grace_s))
        if not child.ready:
            child.send_signal(signal.SIGTERM)  # one that loads does not read its socket
        for seconds, then in ((grace_s + LEAVE_S, signal.SIGTERM), (ASKED_S, signal.SIGKILL)):
            try:
                async with asyncio.timeout(seconds):
                    return await child.gone()
            except TimeoutError:
                child.send_signal(then)
        await child.gone()

    def _forget(self, child: Child) -> None:
        self.children.remove(child)
        for worker in child.workers:
            self._tell(DrainWorker(worker, 0.0))  # a broker that was started meanwhile may still expect it
        group = group_name(child)
        self._set_numbers(group, {*numbers_of(self.deployment, group)} - {number(child)})

    def _set_numbers(self, group: str, numbers: set[int]) -> None:
        self._write(with_held(with_numbers(self.deployment, group, numbers), self._pipeline))

    def _write(self, deployment: Deployment) -> None:
        """Every process that starts from now on reads the deployment as it is then."""
        self.deployment = deployment
        self._run_dir.write(deployment)


def group_name(child: Child) -> str:
    return child.name.rpartition(".")[0]


def number(child: Child) -> int:
    return int(child.name.rpartition(".")[2])
