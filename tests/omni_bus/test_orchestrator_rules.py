"""The bus's rules, each as a script: order, one end, acknowledged cancel, credits, ids, deadlines, isolation."""

from __future__ import annotations

import pytest

from omni_bus import events
from omni_bus.deployment import BusConfig, EdgeConfig
from omni_bus.events import RequestOptions, StageReplica, TensorRef
from tests.support.bus_script import Bus, deployment, error_of, with_tensor

OPEN_TEXT = """
    > c submit 1 text
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0 last
"""
OPEN_AUDIO = """
    > c submit 1 audio
    < source.0 open 1 source
    < relay.0 open 1 relay
    < sink.0 open 1 sink
    < source.0 chunk 1 client->source 0 last
"""
CANCEL_AUDIO = """
    < source.0 cancel 1 source
    < relay.0 cancel 1 relay
    < sink.0 cancel 1 sink
"""
LET_GO = """
    > source.0 cancelled 1 source
    > relay.0 cancelled 1 relay
    > sink.0 cancelled 1 sink
"""


def test_a_text_request_runs_through_its_one_stage() -> None:
    Bus().run(
        OPEN_TEXT
        + """
    > source.0 chunk 1 source->client 0
    < c delta 1 source->client 0
    > c credit 1 source->client 1
    < source.0 consumed 1 source->client 1
    > source.0 consumed 1 client->source 1
    > source.0 chunk 1 source->client 1 last
    < c delta 1 source->client 1 last
    > source.0 done 1 source
    < source.0 close 1 source
    < c completed 1 source
    """
    )


def test_a_request_is_done_when_every_active_stage_is() -> None:
    Bus().run(
        OPEN_AUDIO
        + """
    > source.0 chunk 1 source->relay 0 last
    < relay.0 chunk 1 source->relay 0 last
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 1 source
    > relay.0 consumed 1 source->relay 1
    < source.0 consumed 1 source->relay 1
    > relay.0 chunk 1 relay->sink 0 last
    < sink.0 chunk 1 relay->sink 0 last
    > relay.0 done 1 relay
    > sink.0 chunk 1 sink->client 0 last
    < c delta 1 sink->client 0 last
    > sink.0 done 1 sink
    < relay.0 consumed 1 relay->sink 1
    < source.0 close 1 source
    < relay.0 close 1 relay
    < sink.0 close 1 sink
    < c completed 1 source relay sink
    """
    )


VIOLATIONS = {
    "a_gap": ("> source.0 chunk 1 source->relay 1", "sequence_gap"),
    "a_duplicate": (
        "> source.0 chunk 1 source->relay 0\n< relay.0 chunk 1 source->relay 0\n> source.0 chunk 1 source->relay 0",
        "sequence_duplicate",
    ),
    "a_chunk_after_the_last": (
        "> source.0 chunk 1 source->relay 0 last\n< relay.0 chunk 1 source->relay 0 last\n> source.0 chunk 1 source->relay 1",
        "protocol_violation",
    ),
    "an_unknown_edge": ("> source.0 chunk 1 source->nowhere 0", "protocol_violation"),
    "a_chunk_on_an_edge_of_another_stage": ("> source.0 chunk 1 relay->sink 0", "protocol_violation"),
    "a_chunk_on_the_entry_edge": ("> source.0 chunk 1 client->source 1", "protocol_violation"),
    "done_for_another_stage": ("> source.0 done 1 relay", "protocol_violation"),
    "done_before_the_last_chunk": ("> source.0 done 1 source", "protocol_violation"),
    "an_acknowledgement_nobody_asked_for": ("> source.0 cancelled 1 source", "protocol_violation"),
    "more_consumed_than_came": ("> relay.0 consumed 1 source->relay 1", "protocol_violation"),
    "none_consumed": ("> relay.0 consumed 1 source->relay 0", "protocol_violation"),
    "consumed_by_another_stage": ("> sink.0 consumed 1 source->relay 1", "protocol_violation"),
    "consumed_on_an_unknown_edge": ("> sink.0 consumed 1 nowhere 1", "protocol_violation"),
    "more_consumed_by_the_client_than_came": ("> c credit 1 source->client 1", "protocol_violation"),
    "consumed_by_the_client_between_stages": ("> c credit 1 source->relay 1", "protocol_violation"),
    "input_after_the_last": ("> c append 1 1", "protocol_violation"),
    "a_ticket_used_twice": ("> c submit 1 text", "protocol_violation"),
    "a_failure_of_a_stage": ("> relay.0 failed 1 relay undecodable_media", "undecodable_media"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_fails_the_request_and_nothing_else(name: str) -> None:
    steps, code = VIOLATIONS[name]
    bus = Bus()
    bus.run(OPEN_AUDIO + steps + f"\n< c failed 1 {code}" + CANCEL_AUDIO + LET_GO)
    assert bus.orchestrator.lifecycle.table.ended == {f"failed:{code}": 1}
    bus.run(
        """
    > c submit 2 text
    < source.0 open 2 source
    < source.0 chunk 2 client->source 0 last
    > source.0 chunk 2 source->client 0 last
    < c delta 2 source->client 0 last
    > source.0 done 2 source
    < source.0 close 2 source
    < c completed 2 source
    """
    )


def test_done_twice_fails_the_request() -> None:
    Bus().run(
        OPEN_AUDIO
        + """
    > source.0 chunk 1 source->relay 0 last
    < relay.0 chunk 1 source->relay 0 last
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 1 source
    > source.0 done 1 source
    < c failed 1 protocol_violation
    """
        + CANCEL_AUDIO
        + LET_GO
    )


def test_a_producer_beyond_its_credits_fails_its_request() -> None:
    sent = "".join(f"> source.0 chunk 1 source->client {n}\n< c delta 1 source->client {n}\n" for n in range(4))
    Bus().run(
        OPEN_TEXT
        + sent
        + """
    > source.0 chunk 1 source->client 4
    < c failed 1 protocol_violation
    < source.0 cancel 1 source
    > source.0 cancelled 1 source
    """
    )


def test_credit_that_comes_back_may_be_used_again() -> None:
    sent = "".join(f"> source.0 chunk 1 source->client {n}\n< c delta 1 source->client {n}\n" for n in range(4))
    Bus().run(
        OPEN_TEXT
        + sent
        + """
    > c credit 1 source->client 3
    < source.0 consumed 1 source->client 3
    > source.0 chunk 1 source->client 4
    < c delta 1 source->client 4
    > source.0 chunk 1 source->client 5
    < c delta 1 source->client 5
    > source.0 chunk 1 source->client 6 last
    < c delta 1 source->client 6 last
    > source.0 done 1 source
    < source.0 close 1 source
    < c completed 1 source
    """
    )


def test_streamed_input_is_forwarded_in_order_and_gives_the_client_credit() -> None:
    Bus().run(
        """
    > c submit 1 text more
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0
    > c append 1 1
    < source.0 chunk 1 client->source 1
    > source.0 consumed 1 client->source 2
    < c credit 1 client->source 2
    > c append 1 2 last
    < source.0 chunk 1 client->source 2 last
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 1 source
    < source.0 close 1 source
    < c completed 1 source
    """
    )


@pytest.mark.parametrize(("step", "code"), [("2", "sequence_gap"), ("0", "sequence_duplicate")], ids=["a_gap", "a_duplicate"])
def test_streamed_input_out_of_order_fails_the_request(step: str, code: str) -> None:
    Bus().run(
        f"""
    > c submit 1 text more
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0
    > c append 1 {step}
    < c failed 1 {code}
    < source.0 cancel 1 source
    > source.0 cancelled 1 source
    """
    )


def test_a_client_that_sends_beyond_its_credits_fails_its_request() -> None:
    sent = "".join(f"> c append 1 {n}\n< source.0 chunk 1 client->source {n}\n" for n in range(1, 4))
    Bus().run(
        """
    > c submit 1 text more
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0
    """
        + sent
        + """
    > c append 1 4
    < c failed 1 protocol_violation
    < source.0 cancel 1 source
    > source.0 cancelled 1 source
    """
    )


def test_a_stage_that_is_done_early_has_what_it_left_unread_handed_back() -> None:
    """relay stops reading: the chunk it has, and the one that comes later, both go back to source as credit."""
    Bus().run(
        OPEN_AUDIO
        + """
    > source.0 chunk 1 source->relay 0
    < relay.0 chunk 1 source->relay 0
    > relay.0 chunk 1 relay->sink 0 last
    < sink.0 chunk 1 relay->sink 0 last
    > relay.0 done 1 relay
    < source.0 consumed 1 source->relay 1
    > source.0 chunk 1 source->relay 1 last
    < source.0 consumed 1 source->relay 1
    > c cancel 1
    """
        + CANCEL_AUDIO
        + LET_GO
        + "< c cancelled 1"
    )


def test_a_cancel_is_answered_when_every_stage_has_acknowledged_it() -> None:
    bus = Bus()
    bus.run(OPEN_AUDIO + "> c cancel 1" + CANCEL_AUDIO + LET_GO + "< c cancelled 1")
    assert bus.orchestrator.lifecycle.table.ended == {"cancelled": 1}


def test_a_stage_that_is_done_acknowledges_a_cancel_too() -> None:
    """It may still hold tensors that the next stage has not read."""
    Bus().run(
        OPEN_AUDIO
        + """
    > source.0 chunk 1 source->relay 0 last
    < relay.0 chunk 1 source->relay 0 last
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 1 source
    > c cancel 1
    """
        + CANCEL_AUDIO
        + LET_GO
        + "< c cancelled 1"
    )


def test_a_deadline_fails_that_request_only() -> None:
    bus = Bus()
    bus.run(
        """
    > c submit 1 text deadline 5
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0 last
    > c submit 2 text deadline 50
    < source.0 open 2 source
    < source.0 chunk 2 client->source 0 last
    > tick 4.9
    > tick 0.2
    < c failed 1 deadline_exceeded
    < source.0 cancel 1 source
    > source.0 cancelled 1 source
    > source.0 chunk 2 source->client 0 last
    < c delta 2 source->client 0 last
    > source.0 done 2 source
    < source.0 close 2 source
    < c completed 2 source
    """
    )


def test_the_next_tick_is_the_first_deadline() -> None:
    bus = Bus()
    bus.run("> c submit 1 text deadline 5\n" + OPEN_TEXT.split("\n", 2)[2], empty=False)
    assert bus.orchestrator.next_tick() == bus.now + 5


def test_internal_ids_have_nothing_to_do_with_tickets_and_do_not_start_where_they_did() -> None:
    ids = set()
    for _ in range(3):
        bus = Bus()
        bus.run("> c submit 7 text\n" + OPEN_TEXT.split("\n", 2)[2], empty=False)
        ids.add(bus.request_id(1))
    assert len(ids) == 3 and 7 not in ids


def test_a_label_reaches_the_log_only_and_only_tame() -> None:
    bus = Bus()
    options = RequestOptions(modalities=("text",))
    out = bus.handle("c", events.Submit(1, "../../x\n\x1b[31m" + "y" * 500, options, 9.0), (b"p",))
    assert all("label" not in type(event).__struct_fields__ for _, event, _ in out)
    bus.run("> source.0 failed 1 source stage_failed\n< c failed 1 stage_failed\n< source.0 cancel 1 source", empty=False)
    bus.run("> source.0 cancelled 1 source")
    line = bus.log[-1]
    assert "label=______x___31m" in line and "failed:stage_failed" in line
    assert line.isprintable() and len(line) < 200


# ---- admission


def test_a_request_too_many_is_refused_as_overloaded() -> None:
    bus = Bus(deployment(bus=BusConfig(max_requests=1, max_waiting=0)))
    bus.run(
        OPEN_TEXT
        + """
    > c submit 2 text
    < c failed 2 overloaded
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 1 source
    < source.0 close 1 source
    < c completed 1 source
    """
    )
    assert bus.orchestrator.lifecycle.table.ended == {"done": 1, "failed:overloaded": 1}


def test_a_request_for_a_stage_without_a_ready_replica_is_refused_and_others_are_not() -> None:
    bus = Bus()
    out = bus.handle("boss", events.Exited("sink.0"))
    assert out == []
    out = bus.handle("c", events.Submit(1, "", RequestOptions(modalities=("text", "audio")), 9.0), (b"p",))
    error = error_of(out[0])
    assert (error.code, error.status) == ("no_ready_replica", 503) and "sink" in error.message
    bus.run("> c submit 2 text\n< source.0 open 1 source\n< source.0 chunk 1 client->source 0 last", empty=False)


BAD_SUBMITS = {
    "an_unknown_modality": (RequestOptions(modalities=("smell",)), 9.0, (), (b"p",), "invalid_request"),
    "no_modality": (RequestOptions(modalities=()), 9.0, (), (b"p",), "invalid_request"),
    "a_deadline_of_zero": (RequestOptions(), 0.0, (), (b"p",), "invalid_request"),
    "a_deadline_that_is_no_number": (RequestOptions(), float("nan"), (), (b"p",), "invalid_request"),
    "an_endless_deadline": (RequestOptions(), float("inf"), (), (b"p",), "invalid_request"),
    "no_payload": (RequestOptions(), 9.0, (), (), "protocol_violation"),
    "a_tensor_without_its_frame": (
        RequestOptions(), 9.0, (TensorRef("x", "inline", "uint8", (1,), 1, offset=1),), (b"p",), "protocol_violation"
    ),
    "a_tensor_shorter_than_it_says": (
        RequestOptions(), 9.0, (TensorRef("x", "inline", "uint8", (2,), 2, offset=1),), (b"p", b"x"), "protocol_violation"
    ),
    "a_tensor_in_somebody_s_memory": (
        RequestOptions(), 9.0, (TensorRef("x", "shm", "uint8", (1,), 1, "seg"),), (b"p", b"x"), "protocol_violation"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SUBMITS)
def test_is_refused_before_any_stage_hears_of_it(name: str) -> None:
    options, deadline, refs, frames, code = BAD_SUBMITS[name]
    bus = Bus()
    out = bus.handle("c", events.Submit(1, "", options, deadline, refs), frames)
    assert [(peer, error_of((peer, event, ())).code) for peer, event, _ in out] == [(b"c", code)]
    bus.check_empty()


def test_the_client_learns_the_credits_of_its_edges_when_it_greets() -> None:
    bus = Bus(deployment(edges={"client->source": EdgeConfig(credits=2)}))
    (message,) = bus.handle("d", events.Hello("client"))
    assert message[1] == events.Welcome({"client->source": 2, "source->client": 4, "sink->client": 4})


# ---- isolation of peers


def test_junk_from_a_client_fails_its_requests_and_nobody_else_s() -> None:
    bus = Bus()
    bus.handle("d", events.Hello("client"))
    bus.run(
        OPEN_TEXT
        + """
    > d submit 1 text
    < source.0 open 2 source
    < source.0 chunk 2 client->source 0 last
    > c junk
    < c failed 1 protocol_violation
    < source.0 cancel 1 source
    > source.0 cancelled 1 source
    > source.0 chunk 2 source->client 0 last
    < d delta 1 source->client 0 last
    > source.0 done 2 source
    < source.0 close 2 source
    < d completed 1 source
    """
    )


@pytest.mark.parametrize("word", ["done 1 source", "exited source.0", "stop 1", "heartbeat"])
def test_what_is_not_for_a_client_to_send_hurts_that_client_only(word: str) -> None:
    bus = Bus()
    bus.run(OPEN_TEXT + f"> c {word}\n< c failed 1 protocol_violation\n< source.0 cancel 1 source", empty=False)
    assert bus.orchestrator.registry.missing() == () and not bus.orchestrator.stopped


@pytest.mark.parametrize("word", ["submit 1 text", "cancel 1", "stop 0", "ready nowhere", "junk"])
def test_what_is_not_for_a_worker_to_send_costs_that_worker_its_place(word: str) -> None:
    bus = Bus(deployment(replicas={"source": 2}))
    bus.run(f"> source.1 {word}\n< source.1 shutdown")
    assert [r.worker for r in bus.orchestrator.registry.statuses() if r.state == "lost"] == ["source.1"]
    bus.run("> c submit 1 text\n< source.0 open 1 source\n< source.0 chunk 1 client->source 0 last", empty=False)


def test_a_worker_that_does_not_hold_a_request_cannot_harm_it() -> None:
    bus = Bus(deployment(replicas={"source": 2}))
    bus.run(
        OPEN_TEXT
        + """
    > source.1 chunk 1 source->client 0
    > source.1 done 1 source
    > source.1 failed 1 source stage_failed
    > source.1 cancelled 1 source
    > source.1 consumed 1 client->source 1
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 1 source
    < source.0 close 1 source
    < c completed 1 source
    """
    )
    assert sum("meddled" in line for line in bus.log) == 5


def test_a_stranger_is_not_answered_or_told_that_it_has_to_greet() -> None:
    Bus().run(
        """
    > nobody heartbeat
    > nobody submit 1 text
    < nobody failed 1 protocol_violation
    > nobody junk
    """
    )


def test_a_worker_of_an_earlier_broker_may_register_when_it_sees_that_it_has_to() -> None:
    bus = Bus(ready=False)
    bus.run("> source.0 heartbeat\n> source.0 cancelled 7 source")
    register = events.Register(worker="source.0", pid=1, host="", boot="", replicas=(StageReplica("source", "cpu", 1),))
    assert not [event for _, event, _ in bus.handle("source.0", register) if isinstance(event, events.Shutdown)]
    bus.run("> source.0 ready source")
    assert "source" not in bus.orchestrator.registry.missing()


def test_a_worker_cannot_register_under_another_name_or_with_foreign_stages() -> None:
    bus = Bus()
    for worker, stage in (("source.0", "source"), ("other.0", "nowhere")):
        register = events.Register(worker=worker, pid=1, host="", boot="", replicas=(StageReplica(stage, "cpu", 1),))
        assert [type(event) for _, event, _ in bus.handle("other.0", register)] == [events.Shutdown]
    assert bus.orchestrator.registry.missing() == ()


# ---- tensors of what has ended


@pytest.mark.parametrize(("connector", "answers"), [("shm", [events.Consumed(999, "source->relay", 1)]), ("inline", [])])
def test_a_tensor_that_comes_after_the_end_is_handed_back(connector: str, answers: list[events.Event]) -> None:
    bus = Bus()
    out = bus.handle("source.0", with_tensor("source->relay", 999, 0, connector), (b"p",))
    assert [event for _, event, _ in out] == answers
    assert bus.orchestrator.lifecycle.late == 1


# ---- stop


def test_a_stop_refuses_what_is_new_waits_for_what_runs_and_tells_all() -> None:
    bus = Bus()
    drain = "< source.0 drain\n< relay.0 drain\n< sink.0 drain\n"
    shutdown = "< source.0 shutdown\n< relay.0 shutdown\n< sink.0 shutdown\n< c shutdown\n< boss shutdown\n"
    bus.run(
        OPEN_TEXT
        + "> boss stop 2\n"
        + drain
        + """
    > c submit 2 text
    < c failed 2 shutting_down
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 1 source
    < source.0 close 1 source
    < c completed 1 source
    """
        + shutdown
        + "> boss stop 0\n> tick 3"
    )
    assert bus.orchestrator.stopped
    assert bus.orchestrator.next_tick() > bus.now, "nothing is left to do for the clock"


def test_a_stop_fails_what_outlives_its_grace_and_does_not_wait_for_ever() -> None:
    drain = "< source.0 drain\n< relay.0 drain\n< sink.0 drain\n"
    shutdown = "< source.0 shutdown\n< relay.0 shutdown\n< sink.0 shutdown\n< c shutdown\n< boss shutdown\n"
    bus = Bus()
    bus.run(
        OPEN_TEXT
        + "> boss stop 2\n"
        + drain
        + "> tick 1.9\n> tick 0.2\n< c failed 1 shutting_down\n< source.0 cancel 1 source\n> tick 1.1\n"
        + shutdown,
        empty=False,
    )
    assert bus.orchestrator.stopped


def test_bytes_of_the_entry_edge_are_counted_here_where_no_worker_sends() -> None:
    bus = Bus()

    def sent() -> dict[str, int]:
        (answer,) = [event for _, event, _ in bus.handle("c", events.StatusQuery(1)) if isinstance(event, events.Status)]
        return answer.edge_bytes

    assert sent() == {"client->source|inline": 0}
    ref = TensorRef("media0", "inline", "uint8", (7,), 7, offset=1)
    bus.handle("c", events.Submit(1, "", RequestOptions(), 9.0, (ref,), last=False), (b"12345", b"1234567"))
    assert sent() == {"client->source|inline": 12}
    bus.handle("c", events.Append(1, 1, (), last=True), (b"123",))
    assert sent() == {"client->source|inline": 15}
    bus.handle("c", events.Submit(2, "", RequestOptions(modalities=("smell",)), 9.0), (b"never forwarded",))
    assert sent() == {"client->source|inline": 15}
