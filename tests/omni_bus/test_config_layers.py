"""Precedence and what defaults become: pipeline < TOML < environment < --set < --port."""

from __future__ import annotations

import pathlib

import msgspec
import pytest

from omni_bus.config import load_deployment
from omni_bus.deployment import Deployment
from omni_bus.devices import usable_cores

BASE = """
[model]
pipeline = "probe"
[api]
port = 1001
deadline_s = 11
[stages.source]
max_batch = 3
sampling = {temperature = 0.5, top_k = -1}
"""


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "deployment.toml"
    file.write_text(BASE)
    return file


def test_pipeline_defaults_fill_what_nobody_says(config: pathlib.Path) -> None:
    deployment = load_deployment(config, environ={})
    assert list(deployment.stages) == ["source", "relay", "sink"]
    assert deployment.stages["relay"].devices == ("cpu",)
    assert deployment.stages["relay"].max_batch == 16
    assert deployment.stages["relay"].options == {"tensor_bytes": 0, "step_ms": 0, "faults": False}
    assert deployment.edges["source->relay"].credits == 64
    assert deployment.stages["source"].max_batch == 3
    assert deployment.stages["source"].sampling.temperature == 0.5


def test_each_layer_wins_over_the_one_before(config: pathlib.Path) -> None:
    environ = {"OMNI_BUS_API__PORT": "1002", "OMNI_BUS_API__DEADLINE_S": "12", "PATH": "/bin"}
    assert load_deployment(config, environ={}).api.port == 1001
    assert load_deployment(config, environ=environ).api.port == 1002
    assert load_deployment(config, environ=environ, sets=["api.port=1003"]).api.port == 1003
    both = load_deployment(config, environ=environ, sets=["api.port=1003", "api.port=1004"])
    assert (both.api.port, both.api.deadline_s) == (1004, 12.0)
    assert load_deployment(config, environ=environ, sets=["api.port=1003"], port=1005).api.port == 1005


def test_tables_merge_key_by_key(config: pathlib.Path) -> None:
    sets = ["stages.source.sampling.max_tokens=7", "stages.source.sampling={top_p=0.5}"]
    sampling = load_deployment(config, environ={}, sets=sets).stages["source"].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.top_p) == (0.5, -1, 7, 0.5)


@pytest.mark.parametrize("key", ['edges."source->relay".credits', "edges.source->relay.credits"])
def test_an_edge_with_and_without_its_quotes(config: pathlib.Path, key: str) -> None:
    assert load_deployment(config, environ={}, sets=[f"{key}=2"]).edges["source->relay"].credits == 2


def test_an_edge_from_the_environment(config: pathlib.Path) -> None:
    environ = {"OMNI_BUS_EDGES__SOURCE_TO_RELAY__CREDITS": "5", "OMNI_BUS_URL": "http://elsewhere"}
    assert load_deployment(config, environ=environ).edges["source->relay"].credits == 5


def test_a_string_that_looks_like_a_number(config: pathlib.Path) -> None:
    environ = {"OMNI_BUS_MODEL__NAME": "true"}
    assert load_deployment(config, environ=environ).model.name == "true"
    assert load_deployment(config, environ={}, sets=["model.name=7"]).model_name == "7"
    assert load_deployment(config, environ={}, sets=['model.name="quoted"']).model_name == "quoted"


def test_options_of_the_stage_itself(config: pathlib.Path) -> None:
    stage = load_deployment(config, environ={}, sets=["stages.source.faults=true"]).stages["source"]
    assert stage.options == {"tensor_bytes": 0, "step_ms": 0, "faults": True}


def test_threads_are_shared_out_and_a_group_agrees(config: pathlib.Path) -> None:
    alone = load_deployment(config, environ={})
    assert {stage.threads for stage in alone.stages.values()} == {max(1, usable_cores() // 3)}
    grouped = load_deployment(
        config, environ={}, sets=["stages.source.process=front", "stages.relay.process=front", "stages.relay.threads=5"]
    )
    assert grouped.workers() == {"front.0": ("source", "relay"), "sink.0": ("sink",)}
    assert (grouped.stages["source"].threads, grouped.stages["relay"].threads) == (5, 5)
    assert grouped.stages["sink"].threads == max(1, usable_cores() // 2)


def test_local_within_one_process(config: pathlib.Path) -> None:
    sets = ["stages.source.process=front", "stages.relay.process=front", "edges.source->relay.connector=local"]
    assert load_deployment(config, environ={}, sets=sets).edges["source->relay"].connector == "local"


def test_keys_open_the_server_to_other_hosts(config: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "keys.txt").write_text("secret\n")
    config.write_text(BASE.replace("[api]", '[api]\nhost = "0.0.0.0"\napi_keys_file = "keys.txt"'))
    assert load_deployment(config, environ={}).api.api_keys_file == str(tmp_path / "keys.txt")


def test_a_model_directory_beside_the_toml(config: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    config.write_text(BASE.replace("[model]", '[model]\npath = "checkpoint"'))
    deployment = load_deployment(config, environ={})
    assert deployment.model.path == str(tmp_path / "checkpoint")
    assert deployment.model_name == "checkpoint"


def test_the_deployment_survives_its_json(config: pathlib.Path) -> None:
    deployment = load_deployment(config, environ={})
    assert msgspec.json.decode(msgspec.json.encode(deployment), type=Deployment) == deployment
