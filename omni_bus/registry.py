"""Which replicas of which stage there are, in what state, how loaded. No I/O, no clock."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterator

from omni_bus.attach import is_remote
from omni_bus.deployment import Deployment
from omni_bus.errors import ProtocolViolation
from omni_bus.events import Expect, Load, Ready, Register, ReplicaStatus, StageLoad


class ReplicaState(enum.Enum):
    STARTING = "starting"  # its process has not registered yet
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclasses.dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of a worker process; one that is started again becomes a new object."""

    name: str
    pid: int = 0
    host: str = ""
    boot: str = ""
    restarts: int = 0
    heard: float = 0.0  # monotonic time of its last event
    data: str = ""  # endpoint of its data socket
    replicas: dict[str, Replica] = dataclasses.field(default_factory=dict)
    requests: set[int] = dataclasses.field(default_factory=set)  # ids of the requests bound to any of its replicas

    @property
    def peer(self) -> bytes:
        return self.name.encode()

    @property
    def number(self) -> int:
        """Its place among the workers of its stages."""
        number = self.name.rpartition(".")[2]
        return int(number) if number.isascii() and number.isdigit() else 0

    @property
    def remote(self) -> bool:
        return is_remote(self.peer)

    @property
    def machine(self) -> tuple[str, str]:
        """Equal where shared memory reaches from one to the other: never for one that came over the network, whatever host it says."""
        return (self.name, "") if self.remote else (self.host, self.boot)

    @property
    def attached(self) -> bool:
        for replica in self.replicas.values():  # asked at every event: a loop takes half the time of a generator
            if replica.state is not ReplicaState.STARTING and replica.state is not ReplicaState.LOST:
                return True
        return False

    @property
    def lost(self) -> bool:
        return any(replica.state is ReplicaState.LOST for replica in self.replicas.values())

    @property
    def loading(self) -> bool:
        return any(replica.state is ReplicaState.LOADING for replica in self.replicas.values())

    @property
    def must_be_heard(self) -> bool:
        """One that loads weights may be silent."""
        return self.attached and not self.loading

    def silent(self, now: float, lost_after_s: float) -> bool:
        return self.must_be_heard and now >= self.heard + lost_after_s


@dataclasses.dataclass(slots=True, eq=False)
class Replica:
    stage: str
    worker: Worker
    device: str
    capacity: int = 1
    state: ReplicaState = ReplicaState.STARTING
    progress: float = 0.0
    detail: str = ""
    outstanding: int = 0  # requests bound and not yet done here
    unread: int = 0  # chunks sent here and not yet consumed
    load: StageLoad | None = None

    def reach(self, other: Replica) -> str:
        """The best connector for tensors between here and there."""
        if self.worker is other.worker:
            return "local"
        if self.worker.machine == other.worker.machine:
            return "shm"
        return "tcp" if self.can("tcp", other) else "inline"

    def can(self, connector: str, other: Replica) -> bool:
        """Whether a forced connector works between here and there."""
        if connector == "tcp":
            return bool(self.worker.data and other.worker.data)
        reach = self.reach(other)
        same_host = reach in ("local", "shm")
        on_gpus = self.device.startswith("cuda") and other.device.startswith("cuda")
        return {"local": reach == "local", "shm": same_host, "cuda_ipc": same_host and on_gpus}.get(connector, True)


class Registry:
    """Workers by name. Those of the deployment are there from the start and stay when lost; others are forgotten when lost."""

    def __init__(self, deployment: Deployment) -> None:
        self._stages = tuple(deployment.stages)
        self._expected: set[str] = set()
        self._workers: dict[bytes, Worker] = {}
        # By stage, so that routing a request looks at no more than it can choose from. Dicts: sets without an order of their own.
        self._ready: dict[str, dict[Replica, None]] = {stage: {} for stage in self._stages}
        for name, stages in deployment.workers().items():
            worker = Worker(name)
            worker.replicas = {stage: Replica(stage, worker, deployment.stages[stage].devices[0]) for stage in stages}
            self._expected.add(name)
            self._workers[worker.peer] = worker

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, peer: bytes) -> Worker | None:
        return self._workers.get(peer)

    def ready_replicas(self, stage: str) -> Collection[Replica]:
        return self._ready[stage]

    def expect(self, event: Expect) -> None:
        """A worker of this name is to come. ProtocolViolation for one that is attached, or for a stage the pipeline lacks."""
        worker = Worker(event.worker)
        known = self._workers.get(worker.peer)
        if (known is not None and known.attached) or not {replica.stage for replica in event.replicas} <= {*self._stages}:
            raise ProtocolViolation("a worker is expected that is here already, or with stages that are not the pipeline's")
        worker.replicas = {
            replica.stage: Replica(replica.stage, worker, replica.device, replica.capacity) for replica in event.replicas
        }
        self._expected.add(worker.name)
        self._workers[worker.peer] = worker

    def retire(self, worker: Worker) -> None:
        """It is not to come back: once lost, it is forgotten."""
        self._expected.discard(worker.name)
        if not worker.attached:
            del self._workers[worker.peer]

    def register(self, peer: bytes, event: Register, now: float) -> Worker:
        """A worker process has come up. ProtocolViolation for a stage the pipeline lacks or a name that is not its own."""
        stages = [replica.stage for replica in event.replicas]
        if peer != event.worker.encode() or not stages or len(set(stages)) != len(stages) or not set(stages) <= {*self._stages}:
            raise ProtocolViolation("a worker registered under another name, or with stages that are not the pipeline's")
        before = self._workers.get(peer)
        restarts = before.restarts + 1 if before is not None and before.pid else 0
        worker = Worker(event.worker, event.pid, event.host, event.boot, restarts, now, event.data)
        worker.replicas = {
            replica.stage: Replica(replica.stage, worker, replica.device, replica.capacity, ReplicaState.LOADING)
            for replica in event.replicas
        }
        self._workers[peer] = worker
        return worker

    def load(self, worker: Worker, event: Load) -> bool:
        """Note how far a stage's start has come; whether that is news."""
        replica = _own(worker, event.stage)
        if replica.state is not ReplicaState.LOADING:
            return False
        replica.progress, replica.detail = event.fraction, event.detail
        return True

    def ready(self, worker: Worker, event: Ready) -> bool:
        """A stage has loaded; whether that is news."""
        replica = _own(worker, event.stage)
        if replica.state is not ReplicaState.LOADING:
            return False
        replica.state = ReplicaState.READY
        self._ready[replica.stage][replica] = None
        replica.capacity, replica.progress, replica.detail = event.capacity, 1.0, ""
        return True

    def heartbeat(self, worker: Worker, loads: tuple[StageLoad, ...]) -> None:
        for load in loads:
            _own(worker, load.stage).load = load

    def drain(self, worker: Worker) -> None:
        for replica in worker.replicas.values():
            if replica.state is ReplicaState.READY:
                replica.state = ReplicaState.DRAINING
                del self._ready[replica.stage][replica]

    def lose(self, worker: Worker) -> None:
        for replica in worker.replicas.values():
            replica.state = ReplicaState.LOST
            self._ready[replica.stage].pop(replica, None)
            replica.progress, replica.outstanding, replica.unread, replica.load = 0.0, 0, 0, None
        if worker.name not in self._expected:
            del self._workers[worker.peer]

    def missing(self) -> tuple[str, ...]:
        """Stages without a ready replica."""
        return tuple(stage for stage in self._stages if not self._ready[stage])

    def silent_at(self, lost_after_s: float) -> float | None:
        """When the first worker counts as lost if nothing more is heard of any."""
        heard = [worker.heard for worker in self if worker.must_be_heard]
        return min(heard) + lost_after_s if heard else None

    def statuses(
        self, carried: Callable[[Replica], tuple[int, float | None]] = lambda _: (0, None)
    ) -> tuple[ReplicaStatus, ...]:
        """`carried`: a replica's streams and its predicted real-time factor."""
        by_stage = {stage: index for index, stage in enumerate(self._stages)}
        replicas = [replica for worker in self for replica in worker.replicas.values()]
        replicas.sort(key=lambda replica: (by_stage[replica.stage], replica.worker.number, replica.worker.name))
        return tuple(
            ReplicaStatus(
                stage=replica.stage,
                worker=replica.worker.name,
                pid=replica.worker.pid,
                host=replica.worker.host,
                device=replica.device,
                state=replica.state.value,
                progress=replica.progress,
                detail=replica.detail,
                requests=replica.outstanding,
                restarts=replica.worker.restarts,
                load=replica.load,
                streams=streams,
                predicted_rtf=rtf,
            )
            for replica in replicas
            for streams, rtf in (carried(replica),)
        )


def _own(worker: Worker, stage: str) -> Replica:
    try:
        return worker.replicas[stage]
    except KeyError:
        raise ProtocolViolation(f"worker {worker.name} has no stage {stage!r}") from None
