"""What operators ask of a running server: replicas added or taken away, one drained, all replaced one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator

from omni_bus.attach import is_remote
from omni_bus.child import Child
from omni_bus.errors import ConfigError, OmniBusError
from omni_bus.events import Status
from omni_bus.names import did_you_mean
from omni_bus.scaling import MAX_REPLICAS, free_number, group_of, groups, no_room, numbers_of, stages_of, with_numbers
from omni_bus.spec import PipelineSpec
from omni_bus.worker_pool import WorkerPool, number

STATUS_S = 2.0  # for the broker to say who has how much work
LEFT_S = 10.0  # behind its drain, for a worker of another host to be gone

Say = Callable[[str], None]


class Operations:
    """One change at a time: a second one is refused until the first is over. ConfigError for what cannot be, NotStarted for what failed."""

    def __init__(
        self,
        pool: WorkerPool,
        pipeline: PipelineSpec,
        status: Callable[[], Awaitable[Status]],
        drain_remote: Callable[[str, float], Awaitable[None]],
        *,
        drain_s: float,
    ) -> None:
        """`drain_remote`: a worker's name and the seconds that it has; returns when it has left."""
        self._pool = pool
        self._pipeline = pipeline
        self._status = status
        self._drain_remote = drain_remote
        self._drain_s = drain_s
        self._running = ""

    async def scale(self, stage: str, replicas: int, say: Say) -> None:
        """Start or drain workers until the stage, and those that share its process, have so many replicas."""
        group = group_of(self._pool.deployment, stage)
        if not 1 <= replicas <= MAX_REPLICAS:
            raise ConfigError(f"a stage has from 1 to {MAX_REPLICAS} replicas")
        with self._alone(f"scale {stage} {replicas}"):
            children = self._pool.of_group(group)
            if len(children) < replicas:
                await self._grow(group, replicas - len(children), say)
            elif len(children) > replicas:
                work = await self._work()
                least = sorted(children, key=lambda child: (sum(work.get(name, 0.0) for name in child.workers), -number(child)))
                await self._leave(least[: len(children) - replicas], say)
            say(f"{self._named(group)}: {_count(len(self._pool.of_group(group)))}")

    async def drain(self, replica: str, say: Say) -> None:
        """Take one replica, "talker/1", away, or a worker of another host, "talker@HOST-1a2b3c.0"."""
        if is_remote(replica.encode()):
            await self._drain_other_host(replica, say)
            return
        child = self._child(replica)
        group = child.name.rpartition(".")[0]
        if self._pool.of_group(group) == [child]:
            raise ConfigError(
                f"{child.name} is the only replica of {self._named(group)}; start another first: omni-bus scale "
                f"{stages_of(self._pool.deployment, group)[0]} 2"
            )
        with self._alone(f"drain {replica}"):
            await self._leave([child], say)
            say(f"{self._named(group)}: {_count(len(self._pool.of_group(group)))}")

    async def restart(self, stage: str, rolling: bool, say: Say) -> None:
        """Replace every worker of a stage ("": of all), one after the other.

        A spare is ready before the old one is drained, where there is room for it; else the old one goes first, which leaves a stage
        of one replica without any for a while: `rolling` refuses that.
        """
        deployment = self._pool.deployment
        chosen = [group_of(deployment, stage)] if stage else groups(deployment)
        reasons = {group: self._no_spare(group) for group in chosen}
        for group, reason in reasons.items():
            if rolling and reason is not None and len(self._pool.of_group(group)) < 2:
                raise ConfigError(
                    f"{self._named(group)} has one replica and no room for a spare: {reason}; "
                    "without --rolling it is restarted with a gap"
                )
        with self._alone("restart"):
            for group, reason in reasons.items():
                for child in self._pool.of_group(group):
                    if reason is None:
                        await self._replace(group, child, say)
                        continue
                    if len(self._pool.of_group(group)) == 1:
                        say(f"{child.name}: no room for a spare ({reason}): requests are refused until it is back")
                    say(f"{child.name} is drained and started again")
                    await self._pool.renew(child, self._drain_s)
                    say(f"{child.name} is ready")

    # ---- inside

    async def _drain_other_host(self, worker: str, say: Say) -> None:
        try:
            async with asyncio.timeout(STATUS_S):
                replicas = (await self._status()).replicas
        except TimeoutError:
            raise OmniBusError("the broker does not answer; try again in a moment") from None
        stages = {replica.stage for replica in replicas if replica.worker == worker}
        if not stages:
            known = {replica.worker for replica in replicas if is_remote(replica.worker.encode())}
            raise ConfigError(f'there is no worker "{worker}"{did_you_mean(worker, known)}; `omni-bus status` lists them')
        others = {replica.stage for replica in replicas if replica.worker != worker and replica.state == "ready"}
        if alone := sorted(stages - others):
            raise ConfigError(f"{worker} is the only ready replica of stage {alone[0]}; start another first")
        with self._alone(f"drain {worker}"):
            say(f"{worker} is drained")
            try:
                async with asyncio.timeout(self._drain_s + LEFT_S):
                    await self._drain_remote(worker, self._drain_s)
            except TimeoutError:
                raise OmniBusError(f"{worker} gets nothing new, but has not left within {self._drain_s + LEFT_S:g} s") from None
            say(f"{worker} has left")

    async def _replace(self, group: str, child: Child, say: Say) -> None:
        new = free_number(self._pool.deployment, group, like=number(child))
        say(f"{group}.{new} is started in place of {child.name}")
        self._pool.reserve(group, [new])
        await self._pool.add(group, new)
        say(f"{group}.{new} is ready")
        await self._leave([child], say)

    async def _grow(self, group: str, count: int, say: Say) -> None:
        new: list[int] = []
        planned = self._pool.deployment
        for _ in range(count):
            new.append(free_number(planned, group))
            planned = with_numbers(planned, group, (*numbers_of(planned, group), new[-1]))
        if (reason := no_room(self._pool.deployment, self._pipeline, group, new)) is not None:
            raise ConfigError(f"{self._named(group)}: {reason}")
        self._pool.reserve(group, new)

        async def start(added: int) -> None:
            say(f"{group}.{added} is started")
            await self._pool.add(group, added)
            say(f"{group}.{added} is ready")

        results = await asyncio.gather(*map(start, new), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error

    async def _leave(self, children: Iterable[Child], say: Say) -> None:
        async def leave(child: Child) -> None:
            say(f"{child.name} is drained")
            await self._pool.remove(child, self._drain_s)
            say(f"{child.name} has left")

        await asyncio.gather(*map(leave, children))

    async def _work(self) -> dict[str, float]:
        """Worker → requests, and steps of queued work. Nothing where the broker does not answer: then all are alike."""
        work: dict[str, float] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_S):
                for replica in (await self._status()).replicas:
                    load = replica.load
                    queued = load.queued / load.per_step if load is not None and load.per_step else 0.0
                    work[replica.worker] = work.get(replica.worker, 0.0) + replica.requests + queued
        return work

    def _no_spare(self, group: str) -> str | None:
        deployment = self._pool.deployment
        for child in self._pool.of_group(group):
            spare = free_number(deployment, group, like=number(child))
            if (reason := no_room(deployment, self._pipeline, group, [spare], like=number(child))) is not None:
                return reason
        return None

    def _child(self, replica: str) -> Child:
        """Of "talker/1", or of a process's or a worker's name, "talker.1"."""
        stage, _, last = replica.rpartition("/")
        name = f"{group_of(self._pool.deployment, stage)}.{last}" if stage else replica
        names = {name: child for child in self._pool.children if not child.leaving for name in (child.name, *child.workers)}
        if name not in names:
            raise ConfigError(f'there is no replica "{replica}"{did_you_mean(name, names)}; `omni-bus status` lists them')
        return names[name]

    def _named(self, group: str) -> str:
        stages = stages_of(self._pool.deployment, group)
        return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages)} (one process)"

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if self._running:
            raise ConfigError(f'"{self._running}" is still under way; wait until it is over')
        self._running = what
        try:
            yield
        finally:
            self._running = ""


def _count(replicas: int) -> str:
    return f"{replicas} replica{'s' if replicas != 1 else ''}"
