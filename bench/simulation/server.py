"""A server without processes: the real orchestrator between simulated workers and listeners, and the time that its broker needs.

Everything that decides is the broker's own code: `Orchestrator.handle` and `tick`, and what is behind them (registry, routing, affinity,
admission, lifecycle). It sees every Submit, Done, Heartbeat and failure, and of each edge of a request the first chunk and the last.
The chunks between, and the credits, change no decision: they are only counted, and the broker's time is charged for them. The broker is
one queue, first come first served, as its one thread is; what an event costs was measured (broker_cost.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.simulation.answers import Answer
from bench.simulation.broker_cost import BrokerCost
from bench.simulation.code2wav import Chunks
from bench.simulation.replica import Replica, begin
from bench.simulation.stages import Frames, Once, Tokens
from bench.simulation.step_times import StepTimes
from bench.simulation.timeline import Cores, Timeline
from omni_bus import events
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, EdgeConfig, ModelConfig, StageConfig
from omni_bus.orchestrator import Message, Orchestrator
from omni_bus.spec import load_pipeline
from omni_bus.workers.load_news import LOOK_S, LoadNews

API = b"api"
SETS_A_HOST = 8  # replicas of a stage on one host: a host of eight cards
DEADLINE_S = 300.0


class Worker:
    """One worker process: the replica of one stage, and when it tells its load."""

    def __init__(self, server: Server, name: str, replica: Replica) -> None:
        self.peer, self.replica = name.encode(), replica
        self._server = server
        self._news = LoadNews()
        self._looks = False
        replica.changed = self._changed
        self.heartbeat()

    def heartbeat(self) -> None:
        self._tell()
        clock = self._server.clock
        clock.at(clock.now + self._server.bus.heartbeat_s, self.heartbeat)

    def _changed(self) -> None:
        if not self._looks:
            self._looks = True
            self._server.clock.at(self._server.clock.now + LOOK_S, self._look)

    def _look(self) -> None:
        self._looks = False
        if self._news.is_news((self.replica.load(),)):
            self._tell()

    def _tell(self) -> None:
        loads = (self.replica.load(),)
        self._news.told(loads)
        self._server.hand_over(1, self._server.say, self.peer, events.Heartbeat(loads))


class Server:
    """`ended` is called with each answer that has come to its end, for whichever reason."""

    def __init__(
        self,
        times: StepTimes,
        cost: BrokerCost,
        clock: Timeline,
        ended: Callable[[Answer, events.Event], None],
        *,
        replicas: int | dict[str, int] = 1,
        bus: BusConfig | None = None,
        kept_positions: int = 0,
        sets_a_host: int = SETS_A_HOST,
        slow_first: float = 1.0,
    ) -> None:
        """replicas: of every stage, or by stage."""
        self.clock, self.cost, self.times = clock, cost, times
        self._cores = Cores(clock, times.profile.cores)
        self.bus = bus or BusConfig(max_requests=1_000_000)
        self._ended = ended
        self._tickets = 0
        self._by_ticket: dict[int, Answer] = {}
        self._by_index: dict[int, Answer] = {}
        self._by_request: dict[int, Answer] = {}
        self._free_at = 0.0  # when the broker has done all that has come
        self.busy_s, self.events, self.requests = 0.0, 0.0, 0
        self.longest_wait_s = 0.0
        self._timer: float | None = None
        self._clock_version = -1
        pipeline = load_pipeline(times.profile.pipeline)
        names = [stage.name for stage in pipeline.stages]
        self.replicas = {name: replicas if isinstance(replicas, int) else replicas.get(name, 1) for name in names}
        deployment = Deployment(
            model=ModelConfig(pipeline=pipeline.name),
            api=ApiConfig(),
            bus=self.bus,
            stages={name: StageConfig(devices=("cuda:0",), replicas=self.replicas[name]) for name in names},
            edges={edge.name: EdgeConfig(credits=edge.credits) for edge in pipeline.edges},
        )
        self.orchestrator = Orchestrator(pipeline, deployment, log=lambda line: None, now=0.0)
        self._handle(API, events.Hello("client"))
        self.workers: dict[bytes, Worker] = {}
        self._entry = pipeline.entry.target
        for name, (stage,) in deployment.workers().items():
            number = int(name.rpartition(".")[2])
            self._start(name, stage, kept_positions, number // sets_a_host, 1.0 if number else slow_first)

    # ---- listeners

    def submit(self, answer: Answer, options: events.RequestOptions) -> None:
        """The request leaves its client now. The stages know it by `options.seed`, which must be its index."""
        assert options.seed == answer.index
        arrives = self.clock.now + self.times.profile.way_in_ms / 1e3
        self.clock.at(arrives, self._submitted, answer, options)

    def _submitted(self, answer: Answer, options: events.RequestOptions) -> None:
        self._tickets += 1
        self.requests += 1
        self._by_ticket[self._tickets] = self._by_index[answer.index] = answer
        event = events.Submit(self._tickets, "", options, DEADLINE_S)
        self._queue(1, self.cost.submit_s(sum(self.replicas.values())), self.say, API, event, (b"",))

    # ---- ports.Bus

    def send(self, worker: str, said: Sequence[events.Event]) -> None:
        for event in said:
            self.say(worker.encode(), event, (b"",) if isinstance(event, events.Chunk) else ())

    def hand_over(self, count: float, action: Callable[..., None], *arguments: Any) -> None:
        self._queue(count, count * self.cost.event_s, action, *arguments)

    # ---- the broker

    def say(self, peer: bytes, event: events.Event, frames: Sequence[bytes] = ()) -> None:
        """An event that the broker has come to, and all that follows from it at once."""
        self._carry_out(self._handle(peer, event, frames))

    def _handle(self, peer: bytes, event: events.Event, frames: Sequence[bytes] = ()) -> list[Message]:
        return self.orchestrator.handle(peer, event, frames, self.clock.now)

    def _queue(self, count: float, work_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """The action happens when half of the events have been served: a bunch's rows go on one after the other."""
        begins = max(self._free_at, self.clock.now + self.cost.transit_s(self.times.profile.hop_ms / 1e3))
        self.longest_wait_s = max(self.longest_wait_s, begins - self.clock.now)
        self._free_at = begins + work_s
        self.busy_s += work_s
        self.events += count
        self.clock.at(begins + work_s / 2, action, *arguments)

    def _carry_out(self, messages: Iterable[Message]) -> None:
        for peer, event, _ in messages:
            worker = self.workers.get(peer)
            if worker is not None:
                self._to_worker(worker, event)
            elif isinstance(event, events.Completed | events.RequestFailed | events.RequestCancelled):
                self._tell_end(event)
        version = self.orchestrator.clock_version
        if self._timer is None or version != self._clock_version:
            self._clock_version = version
            due = self.orchestrator.next_tick()
            if due is not None and (self._timer is None or due < self._timer):
                self._timer = due
                self.clock.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if due == self._timer:
            self._timer = None
            self._carry_out(self.orchestrator.tick(self.clock.now))

    def _tell_end(self, event: events.Completed | events.RequestFailed | events.RequestCancelled) -> None:
        answer = self._by_ticket.pop(event.ticket)
        self._by_index.pop(answer.index, None)
        self._by_request.pop(answer.request, None)
        answer.ends += 1
        answer.gone = True
        answer.outcome = {events.Completed: "done", events.RequestCancelled: "cancelled"}.get(
            type(event), ""
        ) or event.error.code  # type: ignore[union-attr]
        answer.ended = self.clock.now + self.times.profile.way_out_ms / 1e3
        self.clock.at(answer.ended, self._ended, answer, event)

    # ---- workers

    def _start(self, name: str, stage: str, kept_positions: int, host: int, slower: float) -> None:
        profile = self.times.profile
        kinds = {profile.once: Once, profile.frames: Frames, profile.chunks: Chunks}
        arguments = (stage, name, self.times.curves[stage].times(slower), profile, self, self.clock)
        replica = Tokens(*arguments, kept_positions=kept_positions) if stage == profile.tokens else kinds[stage](*arguments)
        replica.cores = self._cores
        self._handle(
            name.encode(),
            events.Register(
                worker=name,
                pid=1,
                host=f"host{host}",
                boot=f"host{host}",
                replicas=(events.StageReplica(stage, "cuda:0", replica.max_batch),),
                data=f"tcp://10.0.0.{host % 250 + 1}:1",
            ),
        )
        self._handle(name.encode(), events.Ready(stage, replica.max_batch))
        self.workers[name.encode()] = Worker(self, name, replica)

    def _to_worker(self, worker: Worker, event: events.Event) -> None:
        replica = worker.replica
        match event:
            case events.Open():
                assert event.options.seed is not None
                opened = self._by_index[event.options.seed]
                opened.request = event.request
                self._by_request[event.request] = opened
                opened.bound[event.stage] = replica
                replica.open(opened, event.options)
            case events.Chunk() if event.edge == f"{events.CLIENT}->{self._entry}":
                begin(self._by_request[event.request], self._entry)
            case events.Cancel():
                if (dropped := self._by_request.get(event.request)) is not None:
                    dropped.gone = True
                    replica.drop(dropped)
                self.hand_over(1, self.say, worker.peer, events.Cancelled(event.request, event.stage))
