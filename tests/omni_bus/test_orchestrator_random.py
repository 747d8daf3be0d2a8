"""Random interleavings: workers, clients, crashes, cancels, faults and the clock in any order the network allows.

Messages of one peer stay in order, those of different peers come in any. Whatever happens: each ticket ends exactly once and
hears nothing afterwards, chunks come in order, a stage hears only of requests that were opened there, and at the end nothing is left.
"""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest

from omni_bus import events
from omni_bus.deployment import BusConfig
from omni_bus.errors import ErrorInfo, ProtocolViolation
from omni_bus.events import RequestOptions, StageLoad, StageReplica
from omni_bus.orchestrator import Message
from tests.support.bus_script import Bus, deployment

Outbox = collections.deque[events.Event]


@dataclasses.dataclass
class Row:
    """One request in one stage."""

    credits: dict[str, int]
    left: int  # words that source still has to say
    seq: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unread: int = 0
    input_closed: bool = False
    to_pass_on: int = 0
    closed: bool = False
    done: bool = False


class Worker:
    def __init__(self, name: str, chance: random.Random) -> None:
        self.name, self.stage, self.chance = name, name.split(".")[0], chance
        self.outbox: Outbox = collections.deque()
        self.rows: dict[int, Row] = {}
        self.gone: set[int] = set()  # requests that were closed or cancelled here
        self.busy_s = self.audio_s = 0.0
        replica = StageReplica(self.stage, "cpu", 4)
        self.outbox.append(events.Register(worker=name, pid=1, host="h", boot="b", replicas=(replica,)))
        self.outbox.append(events.Ready(self.stage, 4))

    def receive(self, event: events.Event) -> None:
        match event:
            case events.Open(request=request):
                assert request not in self.rows and request not in self.gone
                self.rows[request] = Row({route.edge: route.credits for route in event.outputs}, self.chance.randrange(8))
            case events.Close(request=request):
                assert self.rows.pop(request).done
                self.gone.add(request)
            case events.Cancel(request=request):
                del self.rows[request]
                self.gone.add(request)
                self.outbox.append(events.Cancelled(request, self.stage))
            case events.Chunk(request=request):
                row = self.rows[request]
                if row.done:
                    return  # it crossed our Done; the broker hands it back to its producer
                assert not row.input_closed
                row.unread += 1
                row.input_closed = event.last
            case events.Consumed(request=request):
                if request not in self.gone:
                    self.rows[request].credits[event.edge] += event.count

    def step(self, mischief: bool) -> None:
        """Do one thing for one of the requests, or tell some load."""
        if mischief and self.chance.random() < 0.1:
            self.tell()
        rows = [(request, row) for request, row in self.rows.items() if not row.done]
        if not rows:
            return
        request, row = self.chance.choice(rows)
        if mischief and self.chance.random() < 0.03:
            self.misbehave(request, row)
        elif row.unread and self.chance.random() < 0.7:
            self.read(request, row)
        elif row.closed:
            row.done = True
            self.outbox.append(events.Done(request, self.stage, {"n": 1}))
        elif all(row.credits.values()) and (self.stage == "source" or row.to_pass_on or self.at_end(row)):
            self.write(request, row)

    def tell(self) -> None:
        self.busy_s += self.chance.random()
        self.audio_s += self.chance.random() * (self.stage == "sink")
        lead = self.chance.choice([None, -1.0, 3.0]) if self.stage == "sink" else None
        load = StageLoad(stage=self.stage, busy_s=self.busy_s, audio_s=self.audio_s, lead_s=lead)
        self.outbox.append(events.Heartbeat((load,)))

    def at_end(self, row: Row) -> bool:
        read_all = row.input_closed and not row.unread and not row.to_pass_on
        return row.left == 0 and (self.stage == "source" or read_all)

    def read(self, request: int, row: Row) -> None:
        row.unread -= 1
        row.to_pass_on += self.stage != "source"
        edge = {"source": "client->source", "relay": "source->relay", "sink": "relay->sink"}[self.stage]
        self.outbox.append(events.Consumed(request, edge, 1))

    def write(self, request: int, row: Row) -> None:
        if self.stage != "source":
            row.left = 0
        row.closed = self.at_end(row)
        for edge in row.credits:
            row.credits[edge] -= 1
            self.outbox.append(events.Chunk(request, edge, row.seq[edge], row.closed))
            row.seq[edge] += 1
        if self.stage == "source":
            row.left = max(0, row.left - 1)
        elif row.to_pass_on:
            row.to_pass_on -= 1

    def misbehave(self, request: int, row: Row) -> None:
        edge = next(iter(row.credits))
        self.outbox.append(
            self.chance.choice(
                [
                    events.Chunk(request, edge, row.seq[edge] + 1, False),
                    events.Chunk(request, edge, max(0, row.seq[edge] - 1), False),
                    events.Chunk(request, "no->edge", 0, False),
                    events.Consumed(request, edge, 1),
                    events.Consumed(request, "source->relay", 99),
                    events.Done(request, self.stage) if not row.closed else events.Done(request, "elsewhere"),
                    events.Done(request, "nowhere"),
                    events.Cancelled(request, self.stage),
                    events.Failed(request, self.stage, ErrorInfo("stage_failed", "it broke")),
                    events.Heartbeat(()),
                ]
            )
        )


class Client:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.outbox: Outbox = collections.deque([events.Hello("client")])
        self.ends: dict[int, list[str]] = {}
        self.seq: collections.Counter[tuple[int, str]] = collections.Counter()
        self.unread: collections.Counter[tuple[int, str]] = collections.Counter()
        self.to_append: dict[int, tuple[int, int]] = {}  # ticket → next seq, credit
        self.welcomed = False

    def receive(self, event: events.Event) -> None:
        match event:
            case events.Welcome():
                self.welcomed = True
            case events.Delta(ticket=ticket, edge=edge):
                assert not self.ends[ticket], "a chunk after the end"
                assert event.seq == self.seq[ticket, edge]
                self.seq[ticket, edge] += 1
                self.unread[ticket, edge] += 1
            case events.Consumed(request=ticket):
                assert not self.ends[ticket], "credit after the end"
                if ticket in self.to_append:
                    seq, credit = self.to_append[ticket]
                    self.to_append[ticket] = seq, credit + event.count
            case events.Completed(ticket=ticket) | events.RequestFailed(ticket=ticket) | events.RequestCancelled(ticket=ticket):
                self.ends[ticket].append(type(event).__name__)
                self.to_append.pop(ticket, None)

    def step(self, mischief: bool) -> None:
        draw = self.chance.random()
        if draw < 0.2 and mischief:
            self.submit()
        elif draw < 0.3 and mischief and self.ends:
            self.outbox.append(events.CancelRequest(self.chance.randrange(1, len(self.ends) + 2)))
        elif draw < 0.32 and mischief and self.ends:
            self.outbox.append(events.Append(self.chance.randrange(1, len(self.ends) + 1), 1, (), False))
        elif draw < 0.7 and any(self.unread.values()):
            ticket, edge = self.chance.choice([key for key, count in self.unread.items() if count])
            self.outbox.append(events.Consumed(ticket, edge, self.unread.pop((ticket, edge))))
        elif self.to_append:
            ticket = self.chance.choice(list(self.to_append))
            seq, credit = self.to_append[ticket]
            if credit:
                last = self.chance.random() < 0.4 or not mischief
                self.outbox.append(events.Append(ticket, seq, (), last))
                self.to_append[ticket] = seq + 1, credit - 1
                if last:
                    del self.to_append[ticket]

    def submit(self) -> None:
        ticket = len(self.ends) + 1
        self.ends[ticket] = []
        modalities = self.chance.choice([("text",), ("text", "audio"), ("audio",)])
        last = self.chance.random() < 0.6
        if not last:
            self.to_append[ticket] = 1, 3
        deadline = self.chance.choice([3.0, 1000.0, 1000.0])
        options = RequestOptions(modalities=modalities, priority=self.chance.choice(events.PRIORITIES))
        self.outbox.append(events.Submit(ticket, "", options, deadline, (), last))


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        bus_config = BusConfig(max_requests=6, max_waiting=2, lost_after_s=100.0, step_s=0.0, retries=2)
        self.bus = Bus(deployment(bus=bus_config, replicas={"source": 2, "relay": 2}), ready=False)
        self.workers = {name: Worker(name, self.chance) for name in self.bus.plan.workers()}
        self.clients = {f"client{n}": Client(self.chance) for n in range(2)}
        self.inboxes: dict[str, Outbox] = {name: collections.deque() for name in (*self.workers, *self.clients)}
        self.kinds: collections.Counter[str] = collections.Counter()

    def send_out(self, messages: list[Message]) -> None:
        for peer, event, _ in messages:
            name = peer.decode()
            if name in self.inboxes:
                self.inboxes[name].append(event)
            elif name not in ("c", "boss"):
                self.send_out(self.bus.orchestrator.unreachable(peer, self.bus.now))

    def step(self, mischief: bool) -> None:
        name = self.chance.choice(list(self.inboxes))
        peer: Worker | Client = self.workers.get(name) or self.clients[name]
        draw = self.chance.random()
        if draw < 0.4 and self.inboxes[name]:
            self.receive(name, peer)
        elif draw < 0.8 and peer.outbox:
            event = peer.outbox.popleft()
            frames = (b"p",) if isinstance(event, events.Submit | events.Append | events.Chunk) else ()
            self.send_out(self.bus.handle(name, event, frames))
        else:
            peer.step(mischief)
        if mischief and self.chance.random() < 0.01:
            self.disturb(name)

    def receive(self, name: str, peer: Worker | Client) -> None:
        event = self.inboxes[name].popleft()
        if isinstance(event, events.Shutdown) and isinstance(peer, Worker):
            self.restart(name)
        else:
            peer.receive(event)

    def disturb(self, name: str) -> None:
        match self.chance.randrange(4):
            case 0 if name in self.workers:
                self.restart(name)
            case 1 if name in self.clients:
                del self.clients[name], self.inboxes[name]
                self.send_out(self.bus.orchestrator.unreachable(name.encode(), self.bus.now))
                fresh = f"client{self.chance.randrange(10**9)}"
                self.clients[fresh] = Client(self.chance)
                self.inboxes[fresh] = collections.deque()
            case 2:
                self.send_out(self.bus.orchestrator.malformed(name.encode(), ProtocolViolation("junk"), self.bus.now))
            case 3:
                self.bus.now += 1.0
                self.send_out(self.bus.orchestrator.tick(self.bus.now))

    def restart(self, name: str) -> None:
        """The process dies with all it has not sent or read, and another takes its place."""
        self.inboxes[name].clear()
        self.send_out(self.bus.handle("boss", events.Exited(name)))
        self.inboxes[name].clear()
        self.workers[name] = Worker(name, self.chance)

    def settle(self) -> None:
        """No more faults and no new requests: let everything come to its end."""
        for _ in range(40_000):
            for _ in range(20):
                self.step(mischief=False)
            busy = any(self.inboxes.values()) or any(peer.outbox for peer in (*self.workers.values(), *self.clients.values()))
            if not busy and len(self.bus.orchestrator.lifecycle.table) == 0:
                return
        raise AssertionError(f"does not settle: {self.bus.orchestrator.lifecycle.table.all()}")


@pytest.mark.parametrize("seed", range(60))
def test_any_interleaving_ends_every_ticket_once_and_leaves_nothing(seed: int) -> None:
    world = World(seed)
    for _ in range(4000):
        world.step(mischief=True)
    world.settle()
    world.bus.check_empty()
    for client in world.clients.values():
        assert all(len(ends) == 1 for ends in client.ends.values()), client.ends
    for worker in world.workers.values():
        assert worker.rows == {}


def test_the_interleavings_reach_every_kind_of_end() -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(20):
        world = World(seed)
        for _ in range(4000):
            world.step(mischief=True)
        outcomes += world.bus.orchestrator.lifecycle.table.ended
    wanted = {"done", "cancelled"} | {
        f"failed:{code}"
        for code in (
            "sequence_gap", "sequence_duplicate", "protocol_violation", "stage_failed", "replica_lost", "overloaded",
            "no_ready_replica", "deadline_exceeded",
        )
    }  # fmt: skip
    assert wanted <= set(outcomes), wanted - set(outcomes)
