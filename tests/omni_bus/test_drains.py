"""A worker is drained: nothing new, what runs finishes in its time, then it leaves; and new workers come. By scripts, without I/O."""

from __future__ import annotations

import pytest

from tests.support.bus_script import Bus, deployment


def states(bus: Bus) -> dict[str, str]:
    return {replica.worker: replica.state for replica in bus.orchestrator.registry.statuses() if replica.stage == "source"}


def submit(number: int, worker: str) -> str:
    return f"> c submit {number} text\n< {worker} open {number} source\n< {worker} chunk {number} client->source 0 last\n"


@pytest.fixture
def bus() -> Bus:
    return Bus(deployment(replicas={"source": 2}))


def test_it_gets_nothing_new_finishes_and_leaves(bus: Bus) -> None:
    bus.run(submit(1, "source.0"), empty=False)
    bus.run("> boss drain source.0 10\n< source.0 drain", empty=False)
    assert states(bus) == {"source.0": "draining", "source.1": "ready"}
    bus.run(submit(2, "source.1") + submit(3, "source.1"), empty=False)
    bus.run(
        "> source.0 chunk 1 source->client 0 last\n< c delta 1 source->client 0 last\n"
        "> source.0 done 1 source\n< source.0 close 1 source\n< c completed 1 source\n< source.0 shutdown\n"
        "> source.0 heartbeat\n> boss exited source.0",
        empty=False,
    )
    assert states(bus) == {"source.1": "ready"}, "it is forgotten, and missed by nobody"
    assert bus.orchestrator.registry.missing() == ()


def test_an_idle_one_leaves_at_once(bus: Bus) -> None:
    bus.run("> boss drain source.1 10\n< source.1 drain\n< source.1 shutdown\n> boss exited source.1")
    assert states(bus) == {"source.0": "ready"}


def test_what_outlives_its_time_runs_again_elsewhere_or_fails_by_name(bus: Bus) -> None:
    bus.run(
        submit(1, "source.0")
        + submit(2, "source.1")
        + submit(3, "source.0")
        + "> source.0 chunk 1 source->client 0\n< c delta 1 source->client 0\n"
        + "> boss drain source.0 5\n< source.0 drain\n> tick 4.9",
        empty=False,
    )
    assert bus.orchestrator.next_tick() <= bus.now + 0.11
    bus.run(
        "> tick 0.2\n< source.0 shutdown\n< c failed 1 replica_lost\n< source.1 open 4 source\n"
        "< source.1 chunk 4 client->source 0 last",
        empty=False,
    )
    assert states(bus) == {"source.1": "ready"}


def test_a_second_drain_can_only_make_it_sooner(bus: Bus) -> None:
    bus.run(
        submit(1, "source.0") + "> boss drain source.0 5\n< source.0 drain\n> boss drain source.0 50\n< source.0 drain",
        empty=False,
    )
    bus.run(
        "> source.0 chunk 1 source->client 0\n< c delta 1 source->client 0\n> tick 5.1\n< source.0 shutdown\n< c failed 1 replica_lost"
    )


def test_one_that_still_loads_is_sent_away_and_one_that_is_down_is_forgotten(bus: Bus) -> None:
    bus.run("> boss expect source.2 source", empty=False)
    assert states(bus)["source.2"] == "starting"
    bus.run("> boss drain source.2 10\n> boss exited source.1\n> boss drain source.1 10")
    assert states(bus) == {"source.0": "ready"}


def test_a_new_one_takes_work_once_it_is_ready_and_not_before(bus: Bus) -> None:
    bus.run(
        "> boss expect source.2 source\n" + submit(1, "source.0") + submit(2, "source.1") + submit(3, "source.0"), empty=False
    )
    bus.run("> source.2 start\n" + submit(4, "source.2") + submit(5, "source.1"), empty=False)
    assert states(bus) == {"source.0": "ready", "source.1": "ready", "source.2": "ready"}


def test_a_new_one_that_dies_is_known_as_lost(bus: Bus) -> None:
    bus.run("> boss expect source.2 source\n> source.2 start\n> boss exited source.2")
    assert states(bus)["source.2"] == "lost"


@pytest.mark.parametrize("script", ["expect source.0 source", "expect source.7 nowhere", "drain source.7 10"])
def test_what_cannot_be_changes_nothing(bus: Bus, script: str) -> None:
    bus.run(f"> boss {script}")
    assert states(bus) == {"source.0": "ready", "source.1": "ready"}


@pytest.mark.parametrize("script", ["expect source.2 source", "drain source.0 10"])
def test_clients_and_workers_have_no_say(bus: Bus, script: str) -> None:
    bus.run(f"> c {script}\n> source.1 {script}\n< source.1 shutdown")
    assert states(bus) == {"source.0": "ready", "source.1": "lost"}


def test_the_stop_of_the_server_goes_over_a_drain(bus: Bus) -> None:
    bus.run(submit(1, "source.0") + "> boss drain source.0 50\n< source.0 drain", empty=False)
    everyone = ["source.0", "source.1", "relay.0", "sink.0"]
    bus.run("> boss stop 1\n" + "\n".join(f"< {peer} drain" for peer in everyone), empty=False)
    bus.run("> tick 1.1\n< c failed 1 shutting_down\n< source.0 cancel 1 source", empty=False)
    bus.run(
        "> source.0 cancelled 1 source\n< source.0 shutdown\n"
        + "\n".join(f"< {peer} shutdown" for peer in [*everyone, "c", "boss"])
    )
    assert bus.orchestrator.stopped
