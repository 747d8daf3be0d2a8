"""What can cross on the way, each race as a script: late events, losses, retries, cancels and deadlines that meet."""

from __future__ import annotations

import pytest

from omni_bus import events, request_table
from omni_bus.deployment import BusConfig, EdgeConfig
from omni_bus.events import StageReplica
from tests.support.bus_script import STAGES, Bus, deployment

OPEN = """
    > c submit 1 audio
    < source.0 open 1 source
    < relay.0 open 1 relay
    < sink.0 open 1 sink
    < source.0 chunk 1 client->source 0 last
"""
OPEN_TEXT = """
    > c submit 1 text
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0 last
"""
CANCEL = """
    < source.0 cancel 1 source
    < relay.0 cancel 1 relay
    < sink.0 cancel 1 sink
"""
LET_GO = """
    > source.0 cancelled 1 source
    > relay.0 cancelled 1 relay
    > sink.0 cancelled 1 sink
"""
FINISH_TEXT = """
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 1 source
    < source.0 close 1 source
    < c completed 1 source
"""


def test_done_that_crosses_a_cancel_does_not_end_the_request_twice() -> None:
    Bus().run(
        OPEN_TEXT
        + """
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > c cancel 1
    < source.0 cancel 1 source
    > source.0 done 1 source
    > source.0 cancelled 1 source
    < c cancelled 1
    """
    )


def test_a_cancel_that_crosses_completed_says_nothing() -> None:
    bus = Bus()
    bus.run(OPEN_TEXT + FINISH_TEXT + "> c cancel 1\n> c credit 1 source->client 1\n> c append 1 1")
    assert bus.orchestrator.lifecycle.table.ended == {"done": 1}
    assert bus.orchestrator.lifecycle.late == 3


def test_a_second_cancel_is_answered_by_the_first_one_s_end() -> None:
    Bus().run(OPEN + "> c cancel 1" + CANCEL + "> c cancel 1" + LET_GO + "< c cancelled 1\n> c cancel 1")


def test_a_cancel_of_a_ticket_that_never_was_says_nothing() -> None:
    Bus().run("> c cancel 99")


def test_what_stages_send_until_they_hear_of_the_cancel_goes_nowhere() -> None:
    Bus().run(
        OPEN
        + "> c cancel 1"
        + CANCEL
        + """
    > source.0 chunk 1 source->client 0
    > source.0 chunk 1 source->relay 0
    > relay.0 consumed 1 source->relay 1
    > relay.0 failed 1 relay stage_failed
    """
        + LET_GO
        + "< c cancelled 1"
    )


def test_what_a_client_sends_until_its_cancel_is_acknowledged_goes_nowhere() -> None:
    Bus().run(
        """
    > c submit 1 text more
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0
    > source.0 chunk 1 source->client 0
    < c delta 1 source->client 0
    > c cancel 1
    < source.0 cancel 1 source
    > c credit 1 source->client 1
    > c append 1 1 last
    > source.0 cancelled 1 source
    < c cancelled 1
    """
    )


def test_credit_that_a_stage_gives_after_it_is_done_is_not_given_twice() -> None:
    Bus().run(
        OPEN
        + """
    > source.0 chunk 1 source->relay 0
    < relay.0 chunk 1 source->relay 0
    > relay.0 chunk 1 relay->sink 0 last
    < sink.0 chunk 1 relay->sink 0 last
    > relay.0 done 1 relay
    < source.0 consumed 1 source->relay 1
    > relay.0 consumed 1 source->relay 1
    > c cancel 1
    """
        + CANCEL
        + LET_GO
        + "< c cancelled 1"
    )


def test_a_second_failure_is_not_told() -> None:
    bus = Bus()
    bus.run(
        OPEN
        + "> relay.0 failed 1 relay stage_failed\n< c failed 1 stage_failed"
        + CANCEL
        + "> sink.0 failed 1 sink stage_failed\n> c cancel 1\n> source.0 chunk 1 source->client 5"
        + LET_GO
    )
    assert bus.orchestrator.lifecycle.table.ended == {"failed:stage_failed": 1}


def test_an_acknowledgement_that_comes_twice_counts_once() -> None:
    Bus().run(
        OPEN
        + "> c cancel 1"
        + CANCEL
        + """
    > source.0 cancelled 1 source
    > source.0 cancelled 1 source
    > relay.0 cancelled 1 relay
    > sink.0 cancelled 1 sink
    < c cancelled 1
    > sink.0 cancelled 1 sink
    """
    )


def test_a_worker_cannot_acknowledge_for_another() -> None:
    Bus().run(OPEN + "> c cancel 1" + CANCEL + "> source.0 cancelled 1 relay" + LET_GO + "< c cancelled 1")


def test_a_deadline_that_passes_while_cancelling_is_no_second_end() -> None:
    Bus().run(
        """
    > c submit 1 text deadline 5
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0 last
    > tick 4
    > c cancel 1
    < source.0 cancel 1 source
    > tick 2
    > source.0 cancelled 1 source
    < c cancelled 1
    """
    )


def test_a_client_that_goes_has_its_requests_cancelled_and_is_told_nothing() -> None:
    bus = Bus()
    bus.run(OPEN + "> c gone" + CANCEL + "> source.0 chunk 1 source->client 0" + LET_GO)
    assert bus.orchestrator.lifecycle.table.ended == {"cancelled": 1}


def test_a_client_that_goes_while_its_cancel_is_under_way_is_told_nothing() -> None:
    Bus().run(OPEN + "> c cancel 1" + CANCEL + "> c gone" + LET_GO)


# ---- a replica is lost


def test_a_replica_lost_while_cancelling_counts_as_an_acknowledgement() -> None:
    Bus().run(
        OPEN
        + "> c cancel 1"
        + CANCEL
        + """
    > source.0 cancelled 1 source
    > relay.0 cancelled 1 relay
    > boss exited sink.0
    < c cancelled 1
    """
    )


def test_a_replica_lost_while_failing_ends_the_wait() -> None:
    Bus().run(
        OPEN
        + "> sink.0 failed 1 sink stage_failed\n< c failed 1 stage_failed"
        + CANCEL
        + "> boss exited source.0\n> boss exited relay.0\n> boss exited sink.0"
    )


def test_a_replica_lost_after_output_has_left_fails_the_request() -> None:
    Bus().run(
        OPEN
        + """
    > source.0 chunk 1 source->client 0
    < c delta 1 source->client 0
    > boss exited relay.0
    < c failed 1 replica_lost
    < source.0 cancel 1 source
    < sink.0 cancel 1 sink
    > source.0 cancelled 1 source
    > sink.0 cancelled 1 sink
    """
    )


def test_a_replica_lost_fails_only_the_requests_bound_to_it() -> None:
    bus = Bus(deployment(replicas={"source": 2}, bus=BusConfig(retries=0)))
    bus.run(
        OPEN_TEXT
        + """
    > c submit 2 text
    < source.1 open 2 source
    < source.1 chunk 2 client->source 0 last
    > boss exited source.1
    < c failed 2 replica_lost
    """
        + FINISH_TEXT
    )


def test_a_replica_that_was_done_and_read_is_not_missed() -> None:
    Bus().run(
        OPEN
        + """
    > source.0 chunk 1 source->relay 0 last
    < relay.0 chunk 1 source->relay 0 last
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > relay.0 consumed 1 source->relay 1
    < source.0 consumed 1 source->relay 1
    > source.0 done 1 source
    > boss exited source.0
    > relay.0 chunk 1 relay->sink 0 last
    < sink.0 chunk 1 relay->sink 0 last
    > relay.0 done 1 relay
    > sink.0 chunk 1 sink->client 0 last
    < c delta 1 sink->client 0 last
    > sink.0 done 1 sink
    < relay.0 consumed 1 relay->sink 1
    < relay.0 close 1 relay
    < sink.0 close 1 sink
    < c completed 1 source relay sink
    """
    )


def test_a_replica_that_was_done_but_not_yet_read_is_missed() -> None:
    Bus().run(
        OPEN
        + """
    > source.0 chunk 1 source->relay 0 last
    < relay.0 chunk 1 source->relay 0 last
    > source.0 chunk 1 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 1 source
    > boss exited source.0
    < c failed 1 replica_lost
    < relay.0 cancel 1 relay
    < sink.0 cancel 1 sink
    > relay.0 cancelled 1 relay
    > sink.0 cancelled 1 sink
    """
    )


def test_a_worker_that_registers_again_has_lost_what_it_held() -> None:
    bus = Bus(deployment(bus=BusConfig(retries=0)))
    bus.run(OPEN_TEXT, empty=False)
    out = bus.handle(
        "source.0",
        events.Register(worker="source.0", pid=2, host="", boot="", replicas=(StageReplica("source", "cpu", 1),)),
    )
    assert [event.error.code for _, event, _ in out if isinstance(event, events.RequestFailed)] == ["replica_lost"]
    (status,) = [r for r in bus.orchestrator.registry.statuses() if r.worker == "source.0"]
    assert (status.state, status.restarts, status.pid) == ("loading", 1, 2)
    bus.check_empty()


def test_a_worker_whose_connection_is_gone_is_lost() -> None:
    bus = Bus(deployment(bus=BusConfig(retries=0)))
    bus.run(OPEN_TEXT + "> source.0 gone\n< c failed 1 replica_lost\n> c submit 2 text\n< c failed 2 no_ready_replica")


def test_a_silent_worker_is_lost_and_told_to_leave() -> None:
    bus = Bus(deployment(bus=BusConfig(lost_after_s=20, step_s=0, retries=0)))
    bus.run(
        OPEN_TEXT
        + """
    > tick 15
    > relay.0 heartbeat
    > sink.0 heartbeat
    > tick 5
    < source.0 shutdown
    < c failed 1 replica_lost
    > source.0 chunk 1 source->client 0
    > source.0 heartbeat
    """
    )


def test_a_worker_in_a_long_step_is_slow_and_not_lost() -> None:
    """The watchdog ends a step that hangs after `step_s`; only when that has not happened either is the worker given up."""
    bus = Bus(deployment(bus=BusConfig(lost_after_s=20, step_s=60, retries=0)))
    bus.run(
        OPEN_TEXT
        + """
    > tick 75
    > relay.0 heartbeat
    > sink.0 heartbeat
    > tick 5
    < source.0 shutdown
    < c failed 1 replica_lost
    """
    )


def test_a_worker_that_loads_weights_may_be_silent() -> None:
    bus = Bus(ready=False)
    register = events.Register(worker="sink.0", pid=1, host="", boot="", replicas=(StageReplica("sink", "cpu", 1),))
    bus.handle("sink.0", register)
    bus.run("> tick 1000\n> sink.0 ready sink\n> tick 19.9\n> tick 0.2\n< sink.0 shutdown")


def test_a_worker_that_does_not_acknowledge_a_cancel_is_lost_and_told_to_leave() -> None:
    bus = Bus(deployment(bus=BusConfig(lost_after_s=20, step_s=0)))
    bus.run(
        OPEN
        + "> c cancel 1"
        + CANCEL
        + """
    > source.0 cancelled 1 source
    > sink.0 cancelled 1 sink
    > tick 19
    > source.0 heartbeat
    > relay.0 heartbeat
    > sink.0 heartbeat
    > tick 2
    < relay.0 shutdown
    < c cancelled 1
    """
    )


# ---- retries


def test_a_request_without_output_runs_again_on_another_replica_and_stale_chunks_go_nowhere() -> None:
    bus = Bus(deployment(replicas={"relay": 2}))
    bus.run(
        OPEN
        + """
    > source.0 chunk 1 source->relay 0
    < relay.0 chunk 1 source->relay 0
    > boss exited relay.0
    < source.0 cancel 1 source
    < sink.0 cancel 1 sink
    < source.0 open 2 source
    < relay.1 open 2 relay
    < sink.0 open 2 sink
    < source.0 chunk 2 client->source 0 last
    > source.0 chunk 1 source->relay 1
    > source.0 chunk 1 source->client 0
    > source.0 chunk 2 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 cancelled 1 source
    > sink.0 cancelled 1 sink
    > source.0 chunk 2 source->relay 0 last
    < relay.1 chunk 2 source->relay 0 last
    > source.0 done 2 source
    > relay.1 chunk 2 relay->sink 0 last
    < sink.0 chunk 2 relay->sink 0 last
    > relay.1 done 2 relay
    < source.0 consumed 2 source->relay 1
    > sink.0 chunk 2 sink->client 0 last
    < c delta 1 sink->client 0 last
    > sink.0 done 2 sink
    < relay.1 consumed 2 relay->sink 1
    < source.0 close 2 source
    < relay.1 close 2 relay
    < sink.0 close 2 sink
    < c completed 1 source relay sink
    """
    )
    assert bus.orchestrator.lifecycle.table.ended == {"done": 1}


QUEUED = (
    OPEN_TEXT
    + """
    > boss exited source.0
"""
)


def test_a_retry_waits_for_a_replica() -> None:
    bus = Bus()
    bus.run(QUEUED, empty=False)
    assert bus.orchestrator.lifecycle.table.states()["queued"] == 1
    register = events.Register(worker="source.0", pid=2, host="", boot="", replicas=(StageReplica("source", "cpu", 1),))
    bus.handle("source.0", register)
    bus.run(
        """
    > source.0 ready source
    < source.0 open 2 source
    < source.0 chunk 2 client->source 0 last
    > source.0 chunk 2 source->client 0 last
    < c delta 1 source->client 0 last
    > source.0 done 2 source
    < source.0 close 2 source
    < c completed 1 source
    """
    )


def test_a_retry_that_waits_past_its_deadline_fails() -> None:
    Bus().run(
        """
    > c submit 1 text deadline 5
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0 last
    > boss exited source.0
    > tick 6
    < c failed 1 deadline_exceeded
    """
    )


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        ("c cancel 1", "< c cancelled 1"),
        ("c gone", ""),
        ("c junk", "< c failed 1 protocol_violation"),
        ("c append 1 1", "< c failed 1 protocol_violation"),
    ],
    ids=["it_is_cancelled", "its_client_goes", "its_client_breaks_the_protocol", "input_comes_after_the_last"],
)
def test_a_retry_that_waits_ends_at_once_when(step: str, answer: str) -> None:
    Bus().run(QUEUED + f"> {step}\n{answer}")


def test_a_retry_that_waits_ends_with_a_stop() -> None:
    Bus().run(
        QUEUED
        + """
    > boss stop 0
    < relay.0 drain
    < sink.0 drain
    < c failed 1 shutting_down
    < relay.0 shutdown
    < sink.0 shutdown
    < c shutdown
    < boss shutdown
    """
    )


def test_retries_end() -> None:
    bus = Bus(deployment(replicas={"source": 3}, bus=BusConfig(retries=1)))
    bus.run(
        OPEN_TEXT
        + """
    > boss exited source.0
    < source.1 open 2 source
    < source.1 chunk 2 client->source 0 last
    > boss exited source.1
    < c failed 1 replica_lost
    """
    )


def test_streamed_input_runs_again_whole_and_credit_is_given_once() -> None:
    bus = Bus(deployment(replicas={"source": 2}))
    bus.run(
        """
    > c submit 1 text more
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0
    > c append 1 1
    < source.0 chunk 1 client->source 1
    > source.0 consumed 1 client->source 1
    < c credit 1 client->source 1
    > boss exited source.0
    < source.1 open 2 source
    < source.1 chunk 2 client->source 0
    < source.1 chunk 2 client->source 1
    > source.1 consumed 2 client->source 1
    > source.1 consumed 2 client->source 1
    < c credit 1 client->source 1
    > c append 1 2 last
    < source.1 chunk 2 client->source 2 last
    > source.1 chunk 2 source->client 0 last
    < c delta 1 source->client 0 last
    > source.1 done 2 source
    < source.1 close 2 source
    < c completed 1 source
    """
    )


def test_input_that_is_appended_while_a_retry_waits_is_not_lost() -> None:
    bus = Bus()
    bus.run(
        """
    > c submit 1 text more
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0
    > boss exited source.0
    > c append 1 1 last
    """,
        empty=False,
    )
    register = events.Register(worker="source.0", pid=2, host="", boot="", replicas=(StageReplica("source", "cpu", 1),))
    bus.handle("source.0", register)
    bus.run(
        """
    > source.0 ready source
    < source.0 open 2 source
    < source.0 chunk 2 client->source 0
    < source.0 chunk 2 client->source 1 last
    > c cancel 1
    < source.0 cancel 2 source
    > source.0 cancelled 2 source
    < c cancelled 1
    """
    )


def test_input_beyond_what_is_kept_cannot_run_again() -> None:
    """Five chunks, four credits: the first had been consumed, so the client was within its rights."""
    bus = Bus(deployment(replicas={"source": 2}))
    appended = "".join(f"> c append 1 {n}\n< source.0 chunk 1 client->source {n}\n" for n in range(1, 5))
    bus.run(
        """
    > c submit 1 text more
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0
    > source.0 consumed 1 client->source 1
    < c credit 1 client->source 1
    """
        + appended
        + "> boss exited source.0\n< c failed 1 replica_lost"
    )


# ---- placement


def test_the_least_loaded_replica_is_picked_and_done_stages_do_not_count() -> None:
    bus = Bus(deployment(replicas={"source": 2}))
    bus.run(
        """
    > c submit 1 text
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0 last
    > c submit 2 text
    < source.1 open 2 source
    < source.1 chunk 2 client->source 0 last
    > source.1 failed 2 source stage_failed
    < c failed 2 stage_failed
    < source.1 cancel 2 source
    > source.1 cancelled 2 source
    > c submit 3 text
    < source.1 open 3 source
    < source.1 chunk 3 client->source 0 last
    """,
        empty=False,
    )


def connectors(bus: Bus) -> dict[str, str]:
    options = events.RequestOptions(modalities=("text", "audio"))
    out = bus.handle("c", events.Submit(1, "", options, 9.0), (b"p",))
    return {route.edge: route.connector for _, event, _ in out if isinstance(event, events.Open) for route in event.outputs}


def test_a_connector_is_chosen_from_where_both_ends_run() -> None:
    assert connectors(Bus()) == {
        "source->relay": "shm", "source->client": "inline", "relay->sink": "shm", "sink->client": "inline"
    }  # fmt: skip
    assert connectors(Bus(deployment(process="all")))["source->relay"] == "local"
    for host, boot in (("elsewhere", "b"), ("here", "after a reboot")):
        bus = Bus(ready=False)
        for stage in STAGES:
            bus.start(f"{stage}.0", **({"host": host, "boot": boot} if stage == "relay" else {}))
        assert connectors(bus)["source->relay"] == "inline"


@pytest.mark.parametrize("connector", ["inline", "shm"])
def test_a_connector_can_be_forced(connector: str) -> None:
    plan = deployment(process="all", edges={"source->relay": EdgeConfig(credits=4, connector=connector)})
    assert connectors(Bus(plan))["source->relay"] == connector
    assert connectors(Bus(plan))["relay->sink"] == "local"


def test_a_forced_connector_that_does_not_reach_leaves_no_replica() -> None:
    plan = deployment(edges={"source->relay": EdgeConfig(credits=4, connector="local")})
    Bus(plan).run("> c submit 1 audio\n< c failed 1 no_ready_replica")
    plan = deployment(edges={"source->relay": EdgeConfig(credits=4, connector="shm")})
    bus = Bus(plan, ready=False)
    for stage in STAGES:
        bus.start(f"{stage}.0", host="elsewhere" if stage == "relay" else "here")
    bus.run("> c submit 1 audio\n< c failed 1 no_ready_replica")


@pytest.mark.parametrize(("device", "process"), [("cuda:0", ""), ("cuda:1", ""), ("cuda:0", "all")])
def test_cuda_ipc_joins_gpus_of_one_host(device: str, process: str) -> None:
    plan = deployment(process=process, edges={"source->relay": EdgeConfig(credits=4, connector="cuda_ipc")})
    bus = Bus(plan, ready=False)
    for worker in plan.workers():
        bus.start(worker, device=device if worker == "relay.0" else "cuda:0")
    assert connectors(bus)["source->relay"] == "cuda_ipc"


@pytest.mark.parametrize(("device", "host"), [("cpu", "here"), ("cuda:0", "elsewhere")])
def test_cuda_ipc_reaches_no_cpu_and_no_other_host(device: str, host: str) -> None:
    bus = Bus(deployment(edges={"source->relay": EdgeConfig(credits=4, connector="cuda_ipc")}), ready=False)
    for stage in STAGES:
        bus.start(f"{stage}.0", **({"device": device, "host": host} if stage == "relay" else {"device": "cuda:0"}))
    bus.run("> c submit 1 audio\n< c failed 1 no_ready_replica")


def test_stages_of_one_process_are_bound_in_one_process() -> None:
    bus = Bus(deployment(process="all", replicas=dict.fromkeys(STAGES, 2)))
    bus.run(
        """
    > c submit 1 audio
    < all.0 open 1 source
    < all.0 open 1 relay
    < all.0 open 1 sink
    < all.0 chunk 1 client->source 0 last
    > c submit 2 audio
    < all.1 open 2 source
    < all.1 open 2 relay
    < all.1 open 2 sink
    < all.1 chunk 2 client->source 0 last
    """,
        empty=False,
    )


def test_of_equally_loaded_replicas_the_one_in_a_process_chosen_already_is_bound() -> None:
    """The text request makes source busier in the first process, so that source is bound in the second, and the others with it."""
    bus = Bus(deployment(process="all", replicas=dict.fromkeys(STAGES, 2)))
    bus.run(
        """
    > c submit 1 text
    < all.0 open 1 source
    < all.0 chunk 1 client->source 0 last
    > c submit 2 audio
    < all.1 open 2 source
    < all.1 open 2 relay
    < all.1 open 2 sink
    < all.1 chunk 2 client->source 0 last
    """,
        empty=False,
    )


# ---- what is kept


def test_nothing_is_kept_of_requests_that_ended_long_before_their_deadline() -> None:
    bus = Bus()
    table = bus.orchestrator.lifecycle.table
    for ticket in range(1, 1001):
        bus.run(
            f"> c submit {ticket} text\n< source.0 open {ticket} source\n< source.0 chunk {ticket} client->source 0 last\n"
            + f"> c cancel {ticket}\n< source.0 cancel {ticket} source\n> source.0 cancelled {ticket} source\n"
            + f"< c cancelled {ticket}",
            empty=False,
        )
        assert len(table._alarms) <= 70
    bus.check_empty()


def test_input_beyond_the_bound_over_all_requests_cannot_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of seven bytes each where ten may be kept: the first runs again, the second does not."""
    monkeypatch.setattr(request_table, "KEPT_BYTES", 10)
    bus = Bus(deployment(replicas={"source": 2}))
    bus.run(
        """
    > c submit 1 text
    < source.0 open 1 source
    < source.0 chunk 1 client->source 0 last
    > c submit 2 text
    < source.1 open 2 source
    < source.1 chunk 2 client->source 0 last
    > boss exited source.1
    < c failed 2 replica_lost
    > boss exited source.0
    > c cancel 1
    < c cancelled 1
    """
    )


def test_an_attached_worker_is_forgotten_when_it_is_lost_and_one_of_the_deployment_is_not() -> None:
    bus = Bus()
    register = events.Register(worker="extra", pid=1, host="h", boot="b", replicas=(StageReplica("source", "cpu", 4),))
    bus.handle("extra", register)
    assert len(bus.orchestrator.registry.statuses()) == 4
    bus.run("> boss exited extra\n> boss exited sink.0")
    assert [(r.worker, r.state) for r in bus.orchestrator.registry.statuses()] == [
        ("source.0", "ready"),
        ("relay.0", "ready"),
        ("sink.0", "lost"),
    ]


def test_outcomes_are_counted_by_a_bounded_number_of_codes() -> None:
    bus = Bus()
    for ticket in range(1, 101):
        bus.run(
            f"> c submit {ticket} text\n< source.0 open {ticket} source\n< source.0 chunk {ticket} client->source 0 last\n"
            + f"> source.0 failed {ticket} source code{ticket}\n< c failed {ticket} code{ticket}\n"
            + f"< source.0 cancel {ticket} source\n> source.0 cancelled {ticket} source"
        )
    ended = bus.orchestrator.lifecycle.table.ended
    assert len(ended) == 65 and sum(ended.values()) == 100 and ended["failed:other"] == 36


def test_a_watcher_is_told_of_every_change_of_a_replica() -> None:
    bus = Bus(ready=False)
    bus.handle("boss", events.StatusQuery(7, watch=True))
    seen = []
    register = events.Register(worker="sink.0", pid=1, host="", boot="", replicas=(StageReplica("sink", "cpu", 1),))
    for event in (register, events.Load("sink", 0.5, "weights"), events.Ready("sink", 1), events.Heartbeat(())):
        for peer, status, _ in bus.handle("sink.0", event):
            assert peer == b"boss" and isinstance(status, events.Status) and status.query == 7
            (sink,) = [replica for replica in status.replicas if replica.stage == "sink"]
            seen.append((sink.state, sink.progress, sink.detail))
    for _, status, _ in bus.handle("boss", events.Exited("sink.0")):
        assert isinstance(status, events.Status)
        seen.append((status.replicas[-1].state, status.replicas[-1].progress, ""))
    assert seen == [("loading", 0.0, ""), ("loading", 0.5, "weights"), ("ready", 1.0, ""), ("lost", 0.0, "")]
