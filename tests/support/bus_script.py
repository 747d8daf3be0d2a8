"""Scripts for the orchestrator: what goes in (`>`), what has to come out (`<`), in this order and nothing else.

    > c submit 1 text
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0 last

The bus is the probe pipeline's (source → relay → sink). Requests are numbered 1, 2, … in the order in which the broker made them;
tickets are the client's own. `> tick 5` lets five seconds pass. At the end nothing may be left of any request.
"""

from __future__ import annotations

from omni_bus import events
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, EdgeConfig, ModelConfig, StageConfig
from omni_bus.errors import OmniBusError, ProtocolViolation, from_info
from omni_bus.events import CLIENT, ErrorInfo, RequestOptions, StageReplica
from omni_bus.orchestrator import Message, Orchestrator
from omni_bus.spec import load_pipeline

PIPELINE = load_pipeline("probe")
STAGES = tuple(stage.name for stage in PIPELINE.stages)


def deployment(
    *,
    bus: BusConfig | None = None,
    replicas: dict[str, int] | None = None,
    process: str = "",
    edges: dict[str, EdgeConfig] | None = None,
) -> Deployment:
    """The probe pipeline with four credits an edge. `edges` replaces some."""
    defaults = {edge.name: EdgeConfig(credits=4) for edge in PIPELINE.edges}
    counts = replicas or {}
    return Deployment(
        model=ModelConfig(pipeline="probe"),
        api=ApiConfig(),
        bus=bus or BusConfig(heartbeat_s=2.0, lost_after_s=20.0, step_s=0.0),
        stages={name: StageConfig(devices=("cpu",), process=process, replicas=counts.get(name, 1)) for name in STAGES},
        edges=defaults | (edges or {}),
    )


class Bus:
    """An orchestrator with its workers registered and ready and the client `c` greeted."""

    def __init__(self, plan: Deployment | None = None, *, ready: bool = True) -> None:
        self.now = 1000.0
        self.log: list[str] = []
        self.plan = plan or deployment()
        self.orchestrator = Orchestrator(PIPELINE, self.plan, log=self.log.append, now=self.now)
        self._ids: list[int] = []
        self.handle("c", events.Hello("client"))
        self.handle("boss", events.Hello("supervisor"))
        if ready:
            for worker in self.plan.workers():
                self.start(worker)

    def start(self, worker: str, *, host: str = "here", boot: str = "b", device: str = "cpu") -> None:
        """A worker process comes up, all its stages ready."""
        stages = self.plan.workers().get(worker) or (worker.rpartition(".")[0],)
        replicas = tuple(StageReplica(stage, device, 4) for stage in stages)
        self.handle(worker, events.Register(worker=worker, pid=1, host=host, boot=boot, replicas=replicas))
        for stage in stages:
            self.handle(worker, events.Ready(stage, 4))

    def handle(self, peer: str, event: events.Event, frames: tuple[bytes, ...] = ()) -> list[Message]:
        return self._seen(self.orchestrator.handle(peer.encode(), event, frames, self.now))

    def number(self, request: int) -> int:
        """Of an internal id, its place in the order of their making."""
        return self._ids.index(request) + 1

    def request_id(self, number: int) -> int:
        return self._ids[number - 1] if number <= len(self._ids) else 999_000 + number

    def run(self, script: str, *, empty: bool = True) -> None:
        """Play the script; `empty`: nothing may be left of any request at its end."""
        lines = [line.strip() for line in script.strip().splitlines() if line.strip()]
        steps: list[tuple[str, list[str]]] = []
        for line in lines:
            kind, rest = line[0], line[1:].strip()
            assert kind in "><", line
            if kind == ">":
                steps.append((rest, []))
            else:
                steps[-1][1].append(rest)
        for step, expected in steps:
            got = [self._render(message) for message in self._play(step.split())]
            assert got == expected, f"\nafter   > {step}\nwanted  {expected}\ngot     {got}"
        if empty:
            self.check_empty()

    def check_empty(self) -> None:
        lifecycle = self.orchestrator.lifecycle
        table = lifecycle.table
        assert len(table) == 0, table.all()
        assert table._by_ticket == {}
        assert table._kept_bytes == 0
        assert table.next_alarm() is None
        assert not lifecycle.waiting.any
        assert lifecycle.admission._open == {}
        for worker in self.orchestrator.registry:
            assert worker.requests == set()
            assert [lifecycle.admission.streams(replica) for replica in worker.replicas.values()] == [0] * len(worker.replicas)
            assert [(replica.outstanding, replica.unread) for replica in worker.replicas.values()] == [(0, 0)] * len(
                worker.replicas
            )

    # ---- the notation

    def _play(self, words: list[str]) -> list[Message]:
        peer, verb, *rest = words if words[0] != "tick" else ["", *words]
        name = peer.encode()
        match verb:
            case "tick":
                self.now += float(rest[0])
                return self._seen(self.orchestrator.tick(self.now))
            case "gone":
                return self._seen(self.orchestrator.unreachable(name, self.now))
            case "junk":
                return self._seen(self.orchestrator.malformed(name, ProtocolViolation("malformed header"), self.now))
            case "start":
                self.start(peer)
                return []
        frames = (b"payload",) if verb in ("submit", "append", "chunk") else ()
        return self.handle(peer, self._event(verb, rest), frames)

    def _event(self, verb: str, rest: list[str]) -> events.Event:
        last = rest[-1:] == ["last"]
        first = int(rest[0]) if rest and rest[0].isdigit() else 0
        match verb:
            case "submit":
                deadline = float(rest[rest.index("deadline") + 1]) if "deadline" in rest else 300.0
                session = rest[rest.index("session") + 1] if "session" in rest else ""
                options = RequestOptions(
                    modalities=("text", "audio") if rest[1] == "audio" else (rest[1],),
                    affinity=session,
                    priority="batch" if "batch" in rest else "interactive",
                )
                return events.Submit(first, "a label", options, deadline, (), "more" not in rest)
            case "append":
                return events.Append(first, int(rest[1]), (), last)
            case "cancel":
                return events.CancelRequest(first)
            case "credit":  # of a client: its ticket
                return events.Consumed(first, rest[1], int(rest[2]))
            case "consumed":
                return events.Consumed(self.request_id(first), rest[1], int(rest[2]))
            case "chunk":
                return events.Chunk(self.request_id(first), rest[1], int(rest[2]), last)
            case "done":
                return events.Done(self.request_id(first), rest[1], {"n": 1})
            case "failed":
                return events.Failed(self.request_id(first), rest[1], ErrorInfo(rest[2], "it broke"))
            case "cancelled":
                return events.Cancelled(self.request_id(first), rest[1])
            case "hello":
                return events.Hello(rest[0])
            case "heartbeat":
                return events.Heartbeat(())
            case "ready":
                return events.Ready(rest[0], 4)
            case "exited":
                return events.Exited(rest[0])
            case "stop":
                return events.StopServing(float(rest[0]))
            case "drain":
                return events.DrainWorker(rest[0], float(rest[1]))
            case "expect":
                return events.Expect(rest[0], tuple(StageReplica(stage, "cpu", 4) for stage in rest[1:]))
        raise AssertionError(verb)

    def _render(self, message: Message) -> str:
        peer, event, _ = message
        match event:
            case events.Open():
                words = ["open", self.number(event.request), event.stage]
            case events.Chunk():
                words = ["chunk", self._known(event.request), event.edge, event.seq, *["last"] * event.last]
            case events.Consumed():
                on_client = event.edge.split("->")[0] == CLIENT
                words = ["credit" if on_client else "consumed", event.request if on_client else self._known(event.request)]
                words += [event.edge, event.count]
            case events.Close() | events.Cancel():
                words = [type(event).__name__.lower(), self.number(event.request), event.stage]
            case events.Delta():
                words = ["delta", event.ticket, event.edge, event.seq, *["last"] * event.last]
            case events.RequestFailed():
                words = ["failed", event.ticket, event.error.code]
            case events.Completed():
                words = ["completed", event.ticket, *event.usage]
            case events.RequestCancelled():
                words = ["cancelled", event.ticket]
            case _:
                words = [type(event).__name__.lower()]
        return " ".join(str(word) for word in (peer.decode(), *words))

    def _known(self, request: int) -> int:
        return self.number(request) if request in self._ids else request - 999_000

    def _seen(self, messages: list[Message]) -> list[Message]:
        for _, event, _ in messages:
            if isinstance(event, events.Open) and event.request not in self._ids:
                self._ids.append(event.request)
        return messages


def error_of(message: Message) -> OmniBusError:
    """The error that a client is told."""
    assert isinstance(message[1], events.RequestFailed)
    return from_info(message[1].error)


def with_tensor(edge: str, request: int, seq: int, connector: str) -> events.Chunk:
    """A chunk whose one tensor travels by `connector`."""
    return events.Chunk(request, edge, seq, False, (events.TensorRef("data", connector, "uint8", (1,), 1, "seg", 1),))
