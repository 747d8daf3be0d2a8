"""How a card is divided before anything is loaded, and what is said where it does not suffice."""

from __future__ import annotations

import dataclasses
import pathlib

import msgspec
import pytest

from omni_bus import devices, memory
from omni_bus.cli import main
from omni_bus.config import load_deployment
from omni_bus.deployment import Deployment, StageConfig
from omni_bus.errors import ConfigError
from omni_bus.memory import StageNeed, parse_size, plan
from omni_bus.spec import PipelineSpec, load_pipeline

GIB = 1 << 30


def card(monkeypatch: pytest.MonkeyPatch, gib: float, count: int = 2) -> None:
    """A machine with such cards; 0.98 of one, less 0.75 GiB a process, is there to use."""
    found = tuple(devices.CudaDevice("card", int(gib * GIB)) for _ in range(count))
    for module in (devices, memory):
        monkeypatch.setattr(module, "cuda_devices", lambda: found)


def need(weights: float, workspace: float, units: int, least: int = 1, **said: object) -> StageNeed:
    """Units of 1 GiB."""
    return StageNeed(
        weights=int(weights * GIB),
        workspace=int(workspace * GIB),
        unit="slots",
        unit_bytes=GIB,
        units=units,
        least=least,
        **said,
    )


@pytest.fixture
def placed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """Three stages, each a process of its own, on one card of 100 GiB: 95.75 GiB to use."""
    card(monkeypatch, 100)
    (tmp_path / "d.toml").write_text('[model]\npipeline = "probe"\n')
    said = load_deployment(tmp_path / "d.toml", environ={})
    stages = {name: msgspec.structs.replace(stage, devices=("cuda:0",)) for name, stage in said.stages.items()}
    return msgspec.structs.replace(said, stages=stages)


def pipeline(**needs: StageNeed) -> PipelineSpec:
    return dataclasses.replace(load_pipeline("probe"), needs=lambda deployment: needs)


def states(deployment: Deployment, **needs: StageNeed) -> dict[str, float]:
    found = plan(deployment, pipeline(**needs))
    assert not found.problems
    return {share.worker: round(share.state / GIB, 2) for share in found.shares}


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ("40GiB", 40 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("512MiB", 512 << 20),
        ("80GB", 80 * 10**9),
        ("64kib", 64 << 10),
        ("1TB", 10**12),
    ],
)
def test_sizes(said: str, size: int) -> None:
    assert parse_size(said) == size


def test_where_all_fits_each_gets_what_it_can_use(placed: Deployment) -> None:
    assert states(placed, source=need(10, 1, 5), relay=need(20, 1, 30), sink=need(1, 0, 2)) == {
        "source.0": 5,
        "relay.0": 30,
        "sink.0": 2,
    }


def test_what_is_left_is_divided_in_proportion_to_need(placed: Deployment) -> None:
    found = states(placed, source=need(40, 3, 100), relay=need(10, 2, 300), sink=need(0.75, 0, 4, least=4))
    left = 95.75 - 43 - 12 - 0.75 - 4 - 2  # of which each of the two has one unit at least
    assert found == {"source.0": round(1 + left * 99 / 398, 2), "relay.0": round(1 + left * 299 / 398, 2), "sink.0": 4}


def test_a_stage_has_the_memory_it_is_given_and_the_others_the_rest(placed: Deployment) -> None:
    assert states(placed, source=need(40, 2, 100, memory="50GiB"), relay=need(10, 2, 300), sink=need(0.75, 0, 1)) == {
        "source.0": 8,
        "relay.0": 95.75 - 50 - 12 - 1.75,
        "sink.0": 1,
    }


def test_a_key_of_the_stage_fixes_its_state(placed: Deployment) -> None:
    assert states(placed, source=need(40, 2, 100, state=7 * GIB), relay=need(10, 2, 300)) == {
        "source.0": 7,
        "relay.0": round(98 - 1.5 - 49 - 12, 2),
    }


def test_replicas_and_cards_are_counted(placed: Deployment) -> None:
    both = StageConfig(devices=("cuda:0", "cuda:1"), replicas=2)
    spread = msgspec.structs.replace(placed, stages={**placed.stages, "relay": both})
    assert states(spread, source=need(50, 1, 100), relay=need(20, 1, 50)) == {
        "source.0": round(1 + (98 - 1.5 - 72 - 2) * 99 / 148, 2),
        "relay.0": round(1 + (98 - 1.5 - 72 - 2) * 49 / 148, 2),
        "relay.1": 50,
    }


def test_stages_of_one_process_have_one_context(placed: Deployment) -> None:
    together = {name: msgspec.structs.replace(stage, process="all") for name, stage in placed.stages.items()}
    needs = pipeline(source=need(40, 0, 500), relay=need(1, 0, 1))
    threads = {name: msgspec.structs.replace(stage, loop="own") for name, stage in together.items()}
    of_threads = plan(msgspec.structs.replace(placed, stages=threads), needs).share("source.0", "source")
    of_turns = plan(msgspec.structs.replace(placed, stages=together), needs).share("all.0", "source")
    assert of_threads is not None and of_turns is not None and of_threads.state == of_turns.state
    found = plan(msgspec.structs.replace(placed, stages=together), pipeline(source=need(40, 0, 500)))
    assert found.share("all.0", "source") == found.shares[0] and found.shares[0].state == int(0.98 * 100 * GIB) - int(
        40.75 * GIB
    )


def test_the_buffers_of_cuda_ipc_senders_are_left_out(placed: Deployment) -> None:
    edges = {
        name: msgspec.structs.replace(edge, connector="cuda_ipc") for name, edge in placed.edges.items() if "client" not in name
    }
    forced = msgspec.structs.replace(
        placed, edges={**placed.edges, **edges}, bus=msgspec.structs.replace(placed.bus, gpu_buffer_mb=2048)
    )
    needs = {"source": need(40, 0, 500), "relay": need(10, 0, 1), "sink": need(1, 0, 1)}
    before, after = states(placed, **needs), states(forced, **needs)
    assert before["source.0"] - after["source.0"] == pytest.approx(2 * 2)  # source and relay send, sink does not


def test_what_is_short_is_told_with_its_figure(placed: Deployment) -> None:
    found = plan(placed, pipeline(source=need(80, 2, 10, least=2), relay=need(20, 1, 3)))
    (problem,) = found.problems
    assert "cuda:0 has 96.5 GiB to use and is short by 9.5 GiB" in problem
    assert "source wants 84.0 GiB, relay wants 22.0 GiB" in problem
    (problem,) = plan(placed, pipeline(source=need(30, 2, 10, least=2, memory="33GiB"))).problems
    assert "memory = 33GiB of stage source is short by 1.0 GiB" in problem


def test_a_cpu_is_not_divided(placed: Deployment) -> None:
    host = msgspec.structs.replace(placed, stages={"source": StageConfig(devices=("cpu",))})
    assert states(host, source=need(1, 0, 100)) == {"source.0": 4}


def test_a_pipeline_that_tells_no_needs_has_no_plan(placed: Deployment) -> None:
    assert plan(placed, load_pipeline("probe")).shares == ()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from omni_bus.stages.qwen3_omni import fixture

    directory = tmp_path_factory.mktemp("full") / "model"
    fixture.write(directory, "full", 0, lambda fraction, text: None, weights=False, vocabulary="tiny")
    return directory


@pytest.fixture
def full(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that serve the full size with random weights, on a machine with two cards of 139 GiB."""
    card(monkeypatch, 139)
    sets = [f"stages.{stage}.load=random" for stage in ("thinker", "talker", "code2wav")]
    return [part for said in (f"model.path={model}", *sets) for part in ("--set", said)]


@pytest.mark.parametrize("config", ["qwen3_omni", "qwen3_omni_2gpu"])
def test_check_prints_the_plan_of_the_real_model(config: str, full: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"configs/{config}.toml", *full]) == 0
    lines = capfd.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[next(i for i, line in enumerate(lines) if line.startswith("memory")) :]}
    # Keys and values of 48 layers take 96 KiB, the layer that is kept for the Talker 4.
    assert "59.1 GiB" in rows["thinker.0"] and "positions of 100.0 KiB" in rows["thinker.0"]
    assert "6.5 GiB" in rows["talker.0"] and "positions of 20.0 KiB" in rows["talker.0"]
    assert "64 of 64 slots of 3.5 MiB" in rows["code2wav.0"]
    assert ("cuda:1" in rows["talker.0"]) == (config == "qwen3_omni_2gpu")


def test_what_will_not_fit_is_told_and_not_started(
    full: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    card(monkeypatch, 60)
    for command in ("check", "up"):
        assert main([command, "configs/qwen3_omni.toml", *full]) == 2
        assert "will not fit: cuda:0 has 56.5 GiB to use and is short by " in capfd.readouterr().err


@pytest.mark.parametrize("said", ["lots", "40", "0GiB", "-1GiB", "40 gigabytes"])
def test_a_size_that_is_none_is_refused_with_its_key(said: str, full: list[str]) -> None:
    sets = [part for part in full if part != "--set"]
    with pytest.raises(ConfigError, match=r'stages\.thinker\.memory must be "auto" or a size such as "40GiB"'):
        load_deployment(pathlib.Path("configs/qwen3_omni.toml"), sets=[*sets, f"stages.thinker.memory={said}"], environ={})


@pytest.mark.parametrize("stage", ["thinker", "code2wav"])
def test_loads_have_two_names(stage: str, full: list[str]) -> None:
    sets = [part for part in full if part != "--set"]
    with pytest.raises(ConfigError, match=rf"stages\.{stage}\.load must be one of"):
        load_deployment(pathlib.Path("configs/qwen3_omni.toml"), sets=[*sets, f"stages.{stage}.load=rnadom"], environ={})
