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
from omni_bus.scaling import free_number, group_of, groups, no_room, numbers_of, replicas_of, with_numbers
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
    assert [replica.device for replica in replicas_of(two, "source", 3)] == ["cuda:1"]


def test_stages_of_one_process_are_one_group(plain: Deployment) -> None:
    stages = {name: msgspec.structs.replace(stage, process="all") for name, stage in plain.stages.items()}
    grouped = msgspec.structs.replace(plain, stages=stages)
    assert groups(grouped) == ["all"] and group_of(grouped, "relay") == "all"
    more = with_numbers(grouped, "all", (0, 1))
    assert {stage.replicas for stage in more.stages.values()} == {2} and list(more.workers()) == ["all.0", "all.1"]
    assert [replica.stage for replica in replicas_of(more, "all", 1)] == ["source", "relay", "sink"]
    with pytest.raises(ConfigError, match='there is no stage "all"'):
        group_of(grouped, "all")


def test_a_card_that_was_divided_already_has_no_room(plain: Deployment) -> None:
    greedy = pipeline(source=need(10, units=200))
    assert "source.0 has taken the memory of cuda:0" in str(no_room(on(plain, "cuda:0"), greedy, "source", [1]))
    assert no_room(on(plain, "cuda:0", "cuda:1"), greedy, "source", [1]) is None
    assert "cuda:0" in str(no_room(on(plain, "cuda:0", "cuda:1"), greedy, "source", [1, 2]))


def test_a_card_with_memory_to_spare_takes_as_many_as_fit(plain: Deployment) -> None:
    modest = pipeline(source=need(20, units=5))
    assert no_room(on(plain, "cuda:0"), modest, "source", [1, 2]) is None
    assert "cuda:0" in str(no_room(on(plain, "cuda:0"), modest, "source", [1, 2, 3]))


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
