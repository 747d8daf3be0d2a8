"""Requests that cannot be started at once: their order, their bounds, and every way out of the queue. By scripts, without I/O."""

from __future__ import annotations

import pytest

from omni_bus import events, request_table
from omni_bus.deployment import BusConfig
from omni_bus.events import RequestOptions, StageLoad
from omni_bus.waiting import AGED_S
from tests.support.bus_script import Bus, deployment, error_of

SPEECH = RequestOptions(modalities=("text", "audio"))


def one_at_a_time(**bus: int) -> Bus:
    return Bus(deployment(bus=BusConfig(max_requests=1, step_s=0.0, lost_after_s=1e6, **bus)))


def start(number: int, ticket: int | None = None) -> str:
    """A text request is opened, with its input."""
    return f"< source.0 open {number} source\n< source.0 chunk {number} client->source 0 last\n"


def finish(number: int, ticket: int) -> str:
    """It ends well; what comes behind this in a script is what its end brings about."""
    return f"""
    > source.0 chunk {number} source->client 0 last
    < c delta {ticket} source->client 0 last
    > source.0 done {number} source
    < source.0 close {number} source
    < c completed {ticket} source
    """


def test_one_too_many_waits_and_is_started_with_its_input_when_another_has_ended() -> None:
    one_at_a_time().run(
        "> c submit 1 text\n" + start(1) + "> c submit 2 text\n> c submit 3 text\n"
        + finish(1, 1) + start(2) + finish(2, 2) + start(3) + finish(3, 3)
    )  # fmt: skip


def test_input_that_comes_while_a_request_waits_is_kept_for_it() -> None:
    one_at_a_time(retries=0).run(
        "> c submit 1 text\n" + start(1) + "> c submit 2 text more\n> c append 2 1\n> c append 2 2 last\n" + finish(1, 1)
        + """
    < source.0 open 2 source
    < source.0 chunk 2 client->source 0
    < source.0 chunk 2 client->source 1
    < source.0 chunk 2 client->source 2 last
    """
        + finish(2, 2)
    )  # fmt: skip


def test_interactive_ones_come_before_batch_ones_each_as_they_arrived() -> None:
    one_at_a_time().run(
        "> c submit 1 text\n" + start(1)
        + "> c submit 2 text batch\n> c submit 3 text batch\n> c submit 4 text\n> c submit 5 text\n"
        + finish(1, 1) + start(2) + finish(2, 4) + start(3) + finish(3, 5) + start(4) + finish(4, 2) + start(5) + finish(5, 3)
    )  # fmt: skip


def test_a_batch_request_that_has_waited_long_goes_by_its_arrival() -> None:
    one_at_a_time().run(
        "> c submit 1 text\n" + start(1) + f"> c submit 2 text batch\n> tick 1\n> c submit 3 text\n> tick {AGED_S}\n"
        + finish(1, 1) + start(2) + finish(2, 2) + start(3) + finish(3, 3)
    )  # fmt: skip


def test_a_batch_request_finds_no_gap_while_an_interactive_one_waits_and_the_other_way_round_it_does() -> None:
    bus = Bus(deployment(bus=BusConfig(max_requests=1, step_s=0.0)))
    bus.run("> c submit 1 text\n" + start(1) + "> c submit 2 text batch\n", empty=False)
    bus.orchestrator.lifecycle._bus = BusConfig(max_requests=2)
    bus.run("> c submit 3 text\n" + start(2), empty=False)
    assert bus.orchestrator.lifecycle.waiting.by_priority() == {"interactive": 0, "batch": 1}


def test_past_its_bound_the_queue_refuses_and_says_when_to_come_back() -> None:
    bus = one_at_a_time(max_waiting=2)
    bus.run("> c submit 1 text\n" + start(1) + "> tick 10\n> c submit 2 text\n> c submit 3 text\n", empty=False)
    [refused] = bus.handle("c", events.Submit(4, "", RequestOptions(), 9.0), (b"p",))
    error = error_of(refused)
    assert (error.code, error.status) == ("overloaded", 503)
    assert error.retry_after_s == pytest.approx(20.0), "two are ahead, and in ten seconds not one has ended"
    assert error.message.endswith("try again in 20 s")
    bus.run("> c cancel 3\n< c cancelled 3\n> c submit 5 text", empty=False)
    assert len(bus.orchestrator.lifecycle.waiting) == 2


def test_an_interactive_request_takes_the_place_of_the_youngest_batch_one() -> None:
    one_at_a_time(max_waiting=2).run(
        "> c submit 1 text\n" + start(1) + """
    > c submit 2 text batch
    > c submit 3 text batch
    > c submit 4 text batch
    < c failed 4 overloaded
    > c submit 5 text
    < c failed 3 overloaded
    > c submit 6 text
    < c failed 2 overloaded
    > c submit 7 text
    < c failed 7 overloaded
    """
        + finish(1, 1) + start(2) + finish(2, 5) + start(3) + finish(3, 6)
    )  # fmt: skip


def test_a_deadline_holds_for_one_that_waits() -> None:
    bus = one_at_a_time()
    bus.run("> c submit 1 text\n" + start(1) + "> c submit 2 text deadline 3\n> tick 2.9\n", empty=False)
    assert bus.orchestrator.next_tick() == pytest.approx(1003.0)
    bus.run("> tick 0.2\n< c failed 2 deadline_exceeded\n" + finish(1, 1))


def test_a_client_who_cancels_or_goes_leaves_the_queue() -> None:
    bus = one_at_a_time()
    bus.handle("d", events.Hello("client"))
    bus.run(
        "> c submit 1 text\n" + start(1)
        + "> c submit 2 text\n> d submit 1 text\n> c submit 3 text\n> c cancel 2\n< c cancelled 2\n> d gone\n"
        + finish(1, 1) + start(2) + finish(2, 3)
    )  # fmt: skip


def test_a_request_that_is_run_again_does_not_queue_behind_others() -> None:
    bus = one_at_a_time()
    bus.run(
        "> c submit 1 text\n" + start(1) + """
    > c submit 2 text
    > boss exited source.0
    > c submit 3 text
    < c failed 3 no_ready_replica
    """,
        empty=False,
    )  # fmt: skip
    bus.handle("source.0", events.Register(worker="source.0", pid=2, host="h", boot="b", replicas=(_one("source"),)))
    bus.run("> source.0 ready source\n" + start(2) + finish(2, 1) + start(3) + finish(3, 2))


def _one(stage: str) -> events.StageReplica:
    return events.StageReplica(stage, "cpu", 4)


def test_a_stop_refuses_those_that_have_not_begun() -> None:
    bus = one_at_a_time()
    out = bus.run("> c submit 1 text\n" + start(1) + "> c submit 2 text\n", empty=False)
    del out
    told = bus.handle("boss", events.StopServing(30.0))
    assert [(event.ticket, event.error.code) for _, event, _ in told if isinstance(event, events.RequestFailed)] == [
        (2, "shutting_down")
    ]


def test_input_of_the_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "KEPT_BYTES", 10)
    bus = one_at_a_time()
    bus.run(
        "> c submit 1 text\n" + start(1) + """
    > source.0 chunk 1 source->client 0
    < c delta 1 source->client 0
    > c submit 2 text
    > c submit 3 text
    < c failed 3 overloaded
    """,
        empty=False,
    )  # fmt: skip


# ---- speech, by what the stages can carry


def load(bus: Bus, worker: str, **figures: float | None) -> list[str]:
    """Push a load; returns where requests were opened thereupon."""
    pushed = events.Heartbeat((StageLoad(stage=worker.rpartition(".")[0], **figures),))  # type: ignore[arg-type]
    return [peer.decode() for peer, event, _ in bus.handle(worker, pushed) if isinstance(event, events.Open)]


class Speakers:
    """Clients who want speech; each is numbered by its ticket."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.tickets = 0

    def ask(self, options: RequestOptions = SPEECH) -> list[str]:
        self.tickets += 1
        sent = self.bus.handle("c", events.Submit(self.tickets, "", options, 300.0), (b"p",))
        return [peer.decode() for peer, event, _ in sent if isinstance(event, events.Open)]

    def waiting(self) -> int:
        return len(self.bus.orchestrator.lifecycle.waiting)


def test_speech_waits_until_no_listener_does_and_text_passes_it_by() -> None:
    bus = Bus()
    speakers = Speakers(bus)
    assert speakers.ask() == ["source.0", "relay.0", "sink.0"]
    load(bus, "sink.0", lead_s=-0.1)
    assert speakers.ask() == []
    assert speakers.ask() == []
    assert speakers.ask(RequestOptions()) == ["source.0"]
    assert speakers.waiting() == 2
    assert load(bus, "relay.0") == []
    assert load(bus, "sink.0", lead_s=-0.2) == []
    assert load(bus, "sink.0", lead_s=0.5) == ["source.0", "relay.0", "sink.0"] * 2
    assert speakers.waiting() == 0


def test_of_two_replicas_the_one_that_has_room_is_taken() -> None:
    bus = Bus(deployment(replicas={"sink": 2}))
    speakers = Speakers(bus)
    assert [speakers.ask()[2] for _ in range(2)] == ["sink.0", "sink.1"]
    load(bus, "sink.0", lead_s=-0.1)
    assert speakers.ask()[2] == "sink.1"
    load(bus, "sink.1", lead_s=-0.1)
    assert speakers.ask() == []
    assert load(bus, "sink.0", lead_s=0.3)[2] == "sink.0"


def test_until_it_was_measured_a_replica_is_given_its_capacity() -> None:
    speakers = Speakers(Bus())
    assert [len(speakers.ask()) for _ in range(6)] == [3, 3, 3, 3, 0, 0]


def test_a_replica_that_comes_up_takes_those_who_wait() -> None:
    bus = Bus(deployment(replicas={"source": 2, "relay": 2, "sink": 2}), ready=False)
    for stage in ("source", "relay", "sink"):
        bus.start(f"{stage}.0")
    speakers = Speakers(bus)
    for _ in range(7):
        speakers.ask()
    assert speakers.waiting() == 3
    for stage in ("source", "relay", "sink"):
        bus.start(f"{stage}.1")
    assert speakers.waiting() == 0


def test_the_end_of_a_stream_makes_room_for_the_next() -> None:
    bus = Bus()
    speakers = Speakers(bus)
    for _ in range(5):
        speakers.ask()
    bus.run("> c cancel 1\n< source.0 cancel 1 source\n< relay.0 cancel 1 relay\n< sink.0 cancel 1 sink", empty=False)
    bus.run("> source.0 cancelled 1 source\n> relay.0 cancelled 1 relay", empty=False)
    assert speakers.waiting() == 1, "its slots are not free before every stage has let go"
    bus.handle("sink.0", events.Cancelled(bus.request_id(1), "sink"))
    assert speakers.waiting() == 0


def test_status_tells_who_waits_and_what_a_stage_can_carry() -> None:
    bus = Bus()
    speakers = Speakers(bus)
    for _ in range(5):
        speakers.ask()
    speakers.ask(RequestOptions(modalities=("audio",), priority="batch"))
    [(_, status, _)] = bus.handle("c", events.StatusQuery(9))
    assert isinstance(status, events.Status)
    assert status.waiting == {"interactive": 1, "batch": 1}
    assert status.retry_after_s >= 1.0
    assert {replica.stage: (replica.streams, replica.predicted_rtf) for replica in status.replicas} == {
        "source": (4, None),
        "relay": (4, None),
        "sink": (4, None),
    }
    load(bus, "sink.0")
    bus.now += 8.0
    load(bus, "sink.0", busy_s=2.0, audio_s=40.0)
    [(_, status, _)] = bus.handle("c", events.StatusQuery(10))
    assert isinstance(status, events.Status)
    assert status.replicas[2].predicted_rtf == pytest.approx(5 * 2.0 / 40.0, rel=0.1)
