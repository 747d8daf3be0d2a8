"""Which workers a deployment has once it is scaled, and why one more is refused: by the plan alone, nothing is started."""

from __future__ import annotations

import dataclasses
import pathlib

import msgspec
import pytest

from omni_bus import devices, memory, scaling
from omni_bus.config import load_deployment
from omni_bus.deployment import Deployment
from omni_bus.errors import ConfigError
from omni_bus.memory import StageNeed
from omni_bus.scaling import free_number, group_of, groups, no_room, numbers_of, replicas_of, with_held, with_numbers
from omni_bus.spec import PipelineSpec, load_pipeline

GIB = 1 << 30


def need(weights: int, units: int, **said: object) -> StageNeed:
    """Units of 1 GiB."""
    return StageNeed(weights=weights * GIB, workspace=0, unit="slots", unit_bytes=GIB, units=units, least=1, **said)


def pipeline(**needs: StageNeed) -> PipelineSpec:
    return dataclasses.replace(load_pipeline("probe"), needs=lambda deployment: needs)


@pytest.fixture
def plain(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """The probe pipeline on a machine with two cards of 100 GiB."""
    for module in (devices, memory):
        monkeypatch.setattr(module, "cuda_devices", lambda: (devices.CudaDevice("card", 100 * GIB),) * 2)
    (tmp_path / "d.toml").write_text('[model]\npipeline = "probe"\n')
    return load_deployment(tmp_path / "d.toml", environ={})


def on(deployment: Deployment, *places: str, process: str = "") -> Deployment:
    source = msgspec.structs.replace(deployment.stages["source"], devices=places, process=process)
    return msgspec.structs.replace(deployment, stages={**deployment.stages, "source": source})


def test_workers_by_number(plain: Deployment) -> None:
    scaled = with_numbers(plain, "source", (0, 2, 5))
    assert [name for name in scaled.workers() if name.startswith("source")] == ["source.0", "source.2", "source.5"]
    assert scaled.stages["source"].replicas == 3 and numbers_of(scaled, "relay") == (0,)
    assert [free_number(scaled, "source"), free_number(plain, "source")] == [1, 1]
    assert msgspec.json.decode(msgspec.json.encode(scaled), type=Deployment) == scaled


def test_a_spare_is_on_the_devices_of_the_one_it_replaces(plain: Deployment) -> None:
    two = with_numbers(on(plain, "cuda:0", "cuda:1"), "source", (0, 1))
    assert free_number(two, "source", like=0) == 2 and free_number(two, "source", like=1) == 3
    [replica] = replicas_of(with_numbers(two, "source", (0, 3)), "source.3")["source.3"]
    assert replica.device == "cuda:1"


def test_stages_of_one_process_are_one_group(plain: Deployment) -> None:
    stages = {name: msgspec.structs.replace(stage, process="all") for name, stage in plain.stages.items()}
    grouped = msgspec.structs.replace(plain, stages=stages)
    assert groups(grouped) == ["all"] and group_of(grouped, "relay") == "all"
    more = with_numbers(grouped, "all", (0, 1))
    assert {stage.replicas for stage in more.stages.values()} == {2} and list(more.workers()) == ["all.0", "all.1"]
    assert [replica.stage for replica in replicas_of(more, "all.1")["all.1"]] == ["source", "relay", "sink"]
    with pytest.raises(ConfigError, match='there is no stage "all"'):
        group_of(grouped, "all")


def test_a_card_that_was_divided_already_has_no_room(plain: Deployment) -> None:
    greedy = pipeline(source=need(10, units=200))
    assert "source.0 has taken the memory of cuda:0" in str(no_room(on(plain, "cuda:0"), greedy, "source", [1]))
    assert no_room(on(plain, "cuda:0", "cuda:1"), greedy, "source", [1]) is None
    assert "cuda:0" in str(no_room(on(plain, "cuda:0", "cuda:1"), greedy, "source", [1, 2]))


def test_a_card_with_memory_to_spare_takes_as_many_as_fit(plain: Deployment) -> None:
    modest = pipeline(source=need(20, units=5))
    assert no_room(on(plain, "cuda:0"), modest, "source", [1, 2, 3]) is None
    assert "will not fit: cuda:0" in str(no_room(on(plain, "cuda:0"), modest, "source", [1, 2, 3, 4]))


def held(deployment: Deployment) -> dict[str, float]:
    """GiB by worker, of the probe's stages."""
    return {worker: round(sum(kept.values()) / GIB, 2) for worker, kept in deployment.held.items()}


def test_those_that_run_keep_their_memory_and_new_ones_divide_the_rest(plain: Deployment) -> None:
    modest = pipeline(source=need(20, units=5))
    one = with_held(on(plain, "cuda:0"), modest)
    assert held(one) == {"source.0": 5}
    four = with_held(with_numbers(one, "source", range(4)), modest)
    left = 98 - 4 * 0.75 - 80 - 5
    assert held(four) == {"source.0": 5, **{f"source.{number}": round(left / 3, 2) for number in (1, 2, 3)}}
    assert not memory.plan(four, modest).problems


def test_what_a_stage_gave_back_is_there_for_another(plain: Deployment) -> None:
    """The stages that ran beside it hold no more than they took when it was there: that does not count as taken."""
    stages = {name: msgspec.structs.replace(stage, devices=("cuda:0",)) for name, stage in plain.stages.items()}
    needs = pipeline(source=need(20, units=400), relay=need(10, units=4), sink=need(10, units=4))
    began = with_held(with_numbers(msgspec.structs.replace(plain, stages=stages), "relay", range(3)), needs)
    assert "has taken the memory of cuda:0" in str(no_room(began, needs, "sink", [1]))
    fewer = with_held(with_numbers(began, "relay", [0]), needs)
    assert held(fewer) == {worker: kept for worker, kept in held(began).items() if worker not in ("relay.1", "relay.2")}
    assert no_room(fewer, needs, "sink", [1]) is None
    more = with_held(with_numbers(fewer, "sink", [0, 1]), needs)
    assert held(more)["source.0"] == held(began)["source.0"] and held(more)["sink.1"] == 4
    assert not memory.plan(more, needs).problems
    assert memory.plan(more, needs).share("sink.1", "sink").state == more.held["sink.1"]["sink"], "as its process will plan"


def test_a_worker_that_starts_anew_takes_what_is_free_by_then(plain: Deployment) -> None:
    stages = {name: msgspec.structs.replace(stage, devices=("cuda:0",)) for name, stage in plain.stages.items()}
    needs = pipeline(source=need(20, units=400), relay=need(20, units=4))
    both = with_held(msgspec.structs.replace(plain, stages=stages), needs)
    three = with_held(with_numbers(with_held(with_numbers(both, "relay", []), needs), "relay", [0]), needs)
    assert held(three)["source.0"] == held(both)["source.0"]
    alone = with_numbers(three, "relay", [])
    assert held(with_held(alone, needs)) == {"source.0": held(both)["source.0"]}
    assert held(with_held(alone, needs, anew="source.0"))["source.0"] > 20 + held(both)["source.0"]


def test_a_spare_has_no_less_memory_than_the_one_it_replaces(plain: Deployment) -> None:
    modest = pipeline(source=need(30, units=20))
    one = with_held(on(plain, "cuda:0"), modest)
    assert held(one) == {"source.0": 20}
    assert no_room(one, modest, "source", [1]) is None
    assert no_room(one, modest, "source", [1], like=0) == (
        "cuda:0 has 16.5 GiB left for the requests of one more, and source.0 has 20.0 GiB"
    )
    small = pipeline(source=need(30, units=10))
    assert no_room(with_held(on(plain, "cuda:0"), small), small, "source", [1], like=0) is None


def test_what_is_not_known_of_a_stage_is_not_guessed(plain: Deployment) -> None:
    nothing = pipeline()
    assert "what another needs is not known" in str(no_room(on(plain, "cuda:0"), nothing, "source", [1]))
    assert no_room(on(plain, "cuda:0", "cuda:1"), nothing, "source", [1]) is None
    assert no_room(plain, nothing, "source", range(1, 9)) is None, "on the CPU it is the system that says so"


def test_weights_on_the_cpu_must_fit_into_what_is_available(plain: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scaling.available_memory() > 0
    monkeypatch.setattr(scaling, "available_memory", lambda: 25 * GIB)
    assert no_room(plain, pipeline(source=need(10, units=1)), "source", [1, 2]) is None
    reason = no_room(plain, pipeline(source=need(10, units=1)), "source", [1, 2, 3])
    assert reason == "it needs 30.0 GiB of memory, and 25.0 GiB is available"


def test_stages_with_loops_of_their_own_are_workers_of_one_process(plain: Deployment) -> None:
    stages = {name: msgspec.structs.replace(stage, process="all", loop="own") for name, stage in plain.stages.items()}
    threaded = msgspec.structs.replace(plain, stages=stages)
    assert threaded.processes() == {"all.0": {"source.0": ("source",), "relay.0": ("relay",), "sink.0": ("sink",)}}
    two = with_numbers(threaded, "all", (0, 3))
    assert numbers_of(two, "all") == (0, 3) and [*two.processes()["all.3"]] == ["source.3", "relay.3", "sink.3"]
    assert {worker: one.stage for worker, (one,) in replicas_of(two, "all.3").items()} == {
        "source.3": "source",
        "relay.3": "relay",
        "sink.3": "sink",
    }
    together = {name: msgspec.structs.replace(stage, loop="shared") for name, stage in stages.items()}
    assert not two.take_turns("source", "relay") and msgspec.structs.replace(plain, stages=together).take_turns(
        "source", "relay"
    )


def test_a_spare_of_threads_has_no_less_memory_than_what_it_replaces(plain: Deployment) -> None:
    stages = {
        name: msgspec.structs.replace(stage, process="all", loop="own", devices=("cuda:0",))
        for name, stage in plain.stages.items()
    }
    needs = pipeline(source=need(5, 10), relay=need(5, 10), sink=need(1, 1))
    began = with_held(msgspec.structs.replace(plain, stages=stages), needs)
    assert set(began.held) == {"source.0", "relay.0", "sink.0"}
    assert no_room(began, needs, "all", [1], like=0) is None
    larger = pipeline(source=need(5, 60), relay=need(5, 10), sink=need(1, 1))
    began = with_held(msgspec.structs.replace(plain, stages=stages), larger)
    reason = no_room(began, larger, "all", [1], like=0)
    assert reason is not None and "source.0" in reason
