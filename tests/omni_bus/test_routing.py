"""Who gets a request: the least work ahead of it, the same host, the replica that knows the session. By scripts, without I/O."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from omni_bus import events
from omni_bus.affinity import Affinity
from omni_bus.events import RequestOptions, StageLoad
from omni_bus.registry import Replica, ReplicaState, Worker
from omni_bus.routing import SAFE_LEAD_S, strain
from tests.support.bus_script import Bus, deployment


class Clients:
    """Submits requests and tells where they were opened."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.tickets = 0

    def submit(self, *, audio: bool = False, session: str = "") -> list[str]:
        self.tickets += 1
        options = RequestOptions(modalities=("text", "audio") if audio else ("text",), affinity=session)
        sent = self.bus.handle("c", events.Submit(self.tickets, "", options, 300.0), (b"payload",))
        return [peer.decode() for peer, event, _ in sent if isinstance(event, events.Open)]

    def finish(self, number: int, worker: str) -> None:
        """End a text request, the `number`-th that was made."""
        self.bus.run(
            f"> {worker} chunk {number} source->client 0 last\n< c delta {number} source->client 0 last\n"
            f"> {worker} done {number} source\n< {worker} close {number} source\n< c completed {number} source",
            empty=False,
        )


def load(bus: Bus, worker: str, **figures: float) -> None:
    bus.handle(worker, events.Heartbeat((StageLoad(stage=worker.rpartition(".")[0], **figures),)))  # type: ignore[arg-type]


@pytest.fixture
def clients() -> Clients:
    """Three replicas of the source; each takes four requests at once."""
    return Clients(Bus(deployment(replicas={"source": 3})))


def opened(clients: Clients, count: int, **said: object) -> Sequence[str]:
    return [clients.submit(**said)[0] for _ in range(count)]  # type: ignore[arg-type]


def test_open_requests_are_counted_here_and_now(clients: Clients) -> None:
    assert opened(clients, 7) == ["source.0", "source.1", "source.2"] * 2 + ["source.0"]
    clients.finish(2, "source.1")
    assert opened(clients, 2) == ["source.1", "source.1"], "the one that has ended makes room at once; then the lower number"


def test_numbers_are_numbers() -> None:
    clients = Clients(Bus(deployment(replicas={"source": 12})))
    assert opened(clients, 12) == [f"source.{number}" for number in range(12)]


def test_pushed_queues_count_as_steps(clients: Clients) -> None:
    load(clients.bus, "source.0", queued=1536, per_step=512)
    load(clients.bus, "source.1", queued=100, per_step=512)
    assert opened(clients, 5) == ["source.2", "source.1", "source.2", "source.1", "source.2"]
    load(clients.bus, "source.0", queued=0, per_step=512)
    assert opened(clients, 1) == ["source.0"]


def test_a_replica_without_free_kv_blocks_comes_last(clients: Clients) -> None:
    load(clients.bus, "source.0", kv_blocks_used=95, kv_blocks_total=100)
    assert opened(clients, 4) == ["source.1", "source.2"] * 2
    load(clients.bus, "source.0", kv_blocks_used=93, kv_blocks_total=100)
    assert opened(clients, 1) == ["source.0"]


def test_a_listener_who_is_near_an_underrun_weighs_until_the_other_replica_is_as_much_busier() -> None:
    clients = Clients(Bus(deployment(replicas={"source": 2})))
    load(clients.bus, "source.0", lead_s=0.06)
    load(clients.bus, "source.1", lead_s=1.0)
    assert opened(clients, 4) == ["source.1"] * 3 + ["source.0"], "0.7 of a batch of four, though its number is the lower one"


@pytest.mark.parametrize("strained", ["source.0", "source.1"])
def test_the_smallest_playback_lead_parts_replicas_that_are_equal_otherwise(strained: str) -> None:
    clients = Clients(Bus(deployment(replicas={"source": 2})))
    [relaxed] = {"source.0", "source.1"} - {strained}
    load(clients.bus, strained, lead_s=-0.5)
    load(clients.bus, relaxed, lead_s=0.15)
    assert opened(clients, 1) == [relaxed]


@pytest.mark.parametrize(
    ("lead_s", "expected"), [(None, 0.0), (5.0, 0.0), (SAFE_LEAD_S, 0.0), (SAFE_LEAD_S / 4, 0.75), (0.0, 1.0), (-3.0, 1.0)]
)
def test_strain_goes_from_none_to_one_as_the_lead_shrinks(lead_s: float | None, expected: float) -> None:
    replica = Replica("sink", Worker("sink.0", pid=1), "cpu")
    assert strain(replica) == 0.0, "it has not told anything yet"
    replica.load = StageLoad(stage="sink", lead_s=lead_s)
    assert strain(replica) == pytest.approx(expected)


def test_unread_chunks_part_replicas_that_are_equal_otherwise() -> None:
    bus = Bus(deployment(replicas={"relay": 2, "sink": 1}))
    clients = Clients(bus)
    assert [clients.submit(audio=True)[1] for _ in range(2)] == ["relay.0", "relay.1"]
    bus.run("> source.0 chunk 1 source->relay 0\n< relay.0 chunk 1 source->relay 0", empty=False)
    assert clients.submit(audio=True)[1] == "relay.1"
    bus.run("> relay.0 consumed 1 source->relay 1\n< source.0 consumed 1 source->relay 1", empty=False)
    assert clients.submit(audio=True)[1] == "relay.0", "it has fewer requests now"
    assert {replica.unread for worker in bus.orchestrator.registry for replica in worker.replicas.values()} == {0, 4}


def two_hosts() -> Clients:
    bus = Bus(deployment(replicas={"source": 2, "relay": 2, "sink": 2}), ready=False)
    for stage in ("source", "relay", "sink"):
        bus.start(f"{stage}.0", host="a")
        bus.start(f"{stage}.1", host="b")
    return Clients(bus)


def test_a_request_stays_on_its_host_unless_that_is_a_request_busier() -> None:
    clients = two_hosts()
    assert clients.submit(audio=True) == ["source.0", "relay.0", "sink.0"]
    assert clients.submit(audio=True) == ["source.1", "relay.1", "sink.1"]
    load(clients.bus, "relay.0", queued=2, per_step=1)
    assert clients.submit(audio=True) == ["source.0", "relay.1", "sink.1"], "two requests' worth is more than a hop costs"


def test_a_session_returns_to_its_replica_until_that_is_half_a_batch_busier(clients: Clients) -> None:
    assert opened(clients, 1, session="a") == ["source.0"]
    clients.finish(1, "source.0")
    assert opened(clients, 1, session="b") == ["source.1"], "equal but for the session it holds"
    clients.finish(2, "source.1")
    for number in (3, 4):
        assert opened(clients, 1, session="b") == ["source.1"]
        clients.finish(number, "source.1")
    assert opened(clients, 2) == ["source.0", "source.1"]
    assert opened(clients, 1, session="b") == ["source.1"], "one request of a batch of four is ahead of it there"
    load(clients.bus, "source.1", queued=1, per_step=1)
    assert opened(clients, 1, session="b") == ["source.2"], "two and a step's worth of queue"
    load(clients.bus, "source.1", queued=0, per_step=1)
    clients.finish(6, "source.1")
    clients.finish(7, "source.1")
    assert opened(clients, 1, session="b") == ["source.2"], "from then on it is held there"


def test_a_session_does_not_look_for_a_process_that_was_started_again(clients: Clients) -> None:
    assert opened(clients, 1, session="a") == ["source.0"]
    clients.finish(1, "source.0")
    assert opened(clients, 1) == ["source.0"]
    bus = clients.bus
    bus.handle("boss", events.Exited("source.0"))
    again = (events.StageReplica("source", "cpu", 4),)
    bus.handle("source.0", events.Register(worker="source.0", pid=2, host="here", boot="b", replicas=again))
    bus.handle("source.0", events.Ready("source", 4))
    load(bus, "source.0", queued=1, per_step=1)
    assert opened(clients, 1, session="a") == ["source.2"], "source.1 has the request that was lost"


def test_memory_of_sessions_is_bounded() -> None:
    affinity = Affinity(max_keys=3)
    replicas = [Replica("s", Worker(f"s.{number}", pid=number), "cpu", state=ReplicaState.READY) for number in range(2)]
    for number in range(10):
        affinity.note(f"session {number}", {"s": replicas[number % 2]})
    assert len(affinity) == 3 and [affinity.held(replica) for replica in replicas] == [1, 2]
    affinity.note("session 7", {"s": replicas[0]})
    affinity.note("one more", {"s": replicas[0]})
    assert affinity.holds("session 7", replicas[0]) and not affinity.holds("session 8", replicas[0])
    affinity.note("", {"s": replicas[0]})
    assert not affinity.holds("", replicas[0]) and len(affinity) == 3
    assert len(affinity._held) <= 2
