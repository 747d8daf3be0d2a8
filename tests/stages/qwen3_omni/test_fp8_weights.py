"""stages.thinker.weights = "fp8": what is loaded, what the memory plan reckons, who is refused, and the answers, which are
transformers' own of a checkpoint that holds the weights that FP8 leaves."""

from __future__ import annotations

import json
import pathlib
import types

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_bus.cli import main
from omni_bus.config import load_deployment
from omni_bus.deployment import StageConfig
from omni_bus.errors import CheckpointError, ConfigError
from omni_bus.spec import load_pipeline
from omni_bus.stages.ar.fp8 import FP8, dequantise, quantise, quantised_experts
from omni_bus.stages.contract import StageContext
from omni_bus.stages.qwen3_omni import checkpoint, fixture
from omni_bus.stages.qwen3_omni.check import check_checkpoint
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.checkpoint_files import EXPERT
from omni_bus.stages.qwen3_omni.needs import stage_needs
from omni_bus.stages.qwen3_omni.random_weights import RandomCheckpoint
from omni_bus.stages.qwen3_omni.weights import open_checkpoint
from tests.stages.qwen3_omni.test_qwen3_parity import check
from tests.support.qwen3_omni import CASES, Reference, options
from tests.support.stage_pipeline import StagePipeline

TINY = pathlib.Path(__file__).parents[3] / "configs" / "qwen3_omni_tiny.toml"
SPEC = load_pipeline("qwen3_omni")
STAGES = ("processor", "thinker", "talker")
NAMES = ("text_system", "image_audio", "history")


def quiet(fraction: float, text: str) -> None: ...


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Of the seed that random weights have."""
    directory = tmp_path_factory.mktemp("written") / "tiny"
    fixture.write(directory, "tiny", 0, quiet)
    return directory


@pytest.fixture(scope="module")
def rounded(omni_checkpoint: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """omni_checkpoint with the Thinker's experts as FP8 leaves them, in float32."""
    directory = tmp_path_factory.mktemp("rounded") / "tiny"
    directory.mkdir()
    for path in omni_checkpoint.iterdir():
        if path.suffix != ".safetensors":
            (directory / path.name).write_bytes(path.read_bytes())
    tensors = load_file(omni_checkpoint / "model.safetensors")
    experts = [name for name in tensors if name.startswith("thinker.") and EXPERT.fullmatch(name)]
    assert len(experts) == 5 * 8 * 3
    for name in experts:
        left = dequantise(*quantise(tensors[name]), torch.float32)
        assert not torch.equal(left, tensors[name])
        tensors[name] = left
    save_file(tensors, directory / "model.safetensors")
    return directory


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.float(), other.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Checkpoint, RandomCheckpoint])
def test_experts_are_quantised_as_they_are_read_and_nothing_else_is(
    kind: type[Checkpoint], dtype: torch.dtype, written: pathlib.Path
) -> None:
    source = kind(written, fp8=True)
    tensors = source.tensors("thinker.", dtype=dtype)
    # From the file's own float32, not from what the stage's dtype would have made of it.
    exact, plain = (Checkpoint(written).tensors("thinker.", dtype=one) for one in (torch.float32, dtype))
    expected = plain | {name: one for name, one in quantised_experts(exact).items() if ".experts." in name}
    assert tensors.keys() == expected.keys() and any(one.dtype == FP8 for one in tensors.values())
    assert all(same(tensors[name], expected[name]) for name in expected)
    assert source.bytes("thinker.", dtype) == sum(tensor.nbytes for tensor in tensors.values())


def test_no_more_than_a_matrix_is_in_hand_at_a_time(written: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(weight.numel())
        return quantise(weight)

    monkeypatch.setattr("omni_bus.stages.ar.fp8.quantise", watched)
    for kind in (Checkpoint, RandomCheckpoint):
        kind(written, fp8=True).tensors("thinker.", dtype=torch.bfloat16)
    assert seen == [64 * 32] * (2 * 5 * 8 * 3)


def test_runs_of_any_size_are_quantised_alike(written: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Checkpoint(written, fp8=True).tensors("thinker.model.")
    for threads, size in ((1, 1 << 40), (8, 1)):
        monkeypatch.setattr(checkpoint, "THREADS", threads)
        monkeypatch.setattr(checkpoint, "RUN_BYTES", size)
        read = Checkpoint(written, fp8=True).tensors("thinker.model.")
        assert read.keys() == expected.keys() and all(same(read[name], expected[name]) for name in expected)


def context(path: pathlib.Path, *, device: str = "cpu", stage: str = "thinker", **said: object) -> StageContext:
    return StageContext(
        stage=stage,
        pipeline=SPEC,
        model_path=str(path),
        device=device,
        config=StageConfig(devices=(device,), options=said),
        edges={},
        progress=quiet,
    )


def test_only_the_stage_that_says_so_is_quantised(written: pathlib.Path) -> None:
    assert open_checkpoint(context(written, weights="fp8"), "thinker.").fp8
    assert open_checkpoint(context(written, weights="fp8", load="random"), "thinker.").fp8
    assert not open_checkpoint(context(written), "thinker.").fp8
    assert not open_checkpoint(context(written, stage="talker"), "talker.").fp8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_plan_knows_the_smaller_weights(written: pathlib.Path, dtype: str) -> None:
    sets = [f"model.path={written}", f"stages.thinker.dtype={dtype}"]
    plain = stage_needs(load_deployment(TINY, sets=sets, environ={}))
    found = stage_needs(load_deployment(TINY, sets=[*sets, "stages.thinker.weights=fp8"], environ={}))
    kind: torch.dtype = getattr(torch, dtype)
    assert found["thinker"].weights == Checkpoint(written, fp8=True).bytes("thinker.", kind) < plain["thinker"].weights
    assert {name: need for name, need in found.items() if name != "thinker"} == {
        name: need for name, need in plain.items() if name != "thinker"
    }


def test_check_shows_the_full_size_with_half_the_weights(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixture.write(tmp_path, "full", 0, quiet, weights=False, vocabulary="tiny")
    sets = [f"model.path={tmp_path}", "stages.thinker.dtype=bfloat16"]
    sets += [f"stages.{stage}.load=random" for stage in ("thinker", "talker", "code2wav")]
    shown = {}
    for weights in ("model", "fp8"):
        said = [argument for one in [*sets, f"stages.thinker.weights={weights}"] for argument in ("--set", one)]
        main(["check", str(TINY), *said])  # 2 where this machine could not hold it
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("thinker.0 ")]
        shown[weights] = float(line.split()[2])
    # 48 layers x 128 experts x 3 x 2048 x 768 weights: 27 GiB, less the scales of 48 x 128 x 3584 channels.
    assert shown["model"] - shown["fp8"] == pytest.approx(26.9, abs=0.15)


def refusal(*sets: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_deployment(TINY, sets=sets, environ={})
    [line] = str(refused.value).splitlines()
    return line


def test_what_is_no_such_form_of_weights_is_refused(written: pathlib.Path) -> None:
    path = f"model.path={written}"
    assert 'stages.thinker.weights must be one of "model", "fp8"' in refusal(path, "stages.thinker.weights=int4")
    for stage in ("talker", "code2wav", "processor"):
        assert f"stages.{stage}.weights: unknown key" in refusal(path, f"stages.{stage}.weights=fp8")


def test_a_thinker_without_experts_is_refused_before_anything_starts(written: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["thinker_config"]["text_config"] |= {"num_experts": 0, "num_experts_per_tok": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = r'stages\.thinker\.weights = "fp8" is for the matrices of experts.*take weights = "model"'
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(str(tmp_path), fp8=True)
    said = refusal(f"model.path={tmp_path}", "stages.thinker.weights=fp8")
    assert 'weights = "fp8" is for the matrices of experts' in said


@pytest.mark.parametrize("has", [(8, 0), (7, 5), (8, 9), (9, 0)])
def test_a_card_that_cannot_convert_fp8_is_refused(
    has: tuple[int, int], written: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", types.SimpleNamespace(get_device_capability=lambda device: has))
    open_checkpoint(context(written, device="cuda:0"), "thinker.")
    open_checkpoint(context(written, device="cuda:0", weights="fp8", kernels="torch"), "thinker.")
    if has >= (8, 9):
        open_checkpoint(context(written, device="cuda:0", weights="fp8"), "thinker.")
        return
    with pytest.raises(ConfigError, match=r'stages\.thinker\.weights = "fp8" needs a GPU .* 8\.9 .*cuda:0 has') as refused:
        open_checkpoint(context(written, device="cuda:0", weights="fp8"), "thinker.")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("graphs", ["auto", "plain"])
def test_answers_are_transformers_of_the_weights_that_are_left(
    graphs: str, omni_checkpoint: pathlib.Path, rounded: pathlib.Path
) -> None:
    torch.set_num_threads(1)
    said = {"thinker": {"weights": "fp8", "graphs": graphs}}
    pipeline = StagePipeline(SPEC, str(omni_checkpoint), STAGES, options=said, max_batch=4)
    reference = Reference(rounded, pipeline)
    traces = [pipeline.submit(index, *CASES[name].chat(), options=options()) for index, name in enumerate(NAMES)]
    pipeline.run()
    for name, trace in zip(NAMES, traces, strict=True):
        check(trace, reference.generate(CASES[name]))


def test_made_at_load_they_answer_as_read(written: pathlib.Path) -> None:
    texts = []
    for load in ("checkpoint", "random"):
        said = {"thinker": {"weights": "fp8", "load": load}}
        pipeline = StagePipeline(SPEC, str(written), ("processor", "thinker"), options=said, dtype="bfloat16")
        trace = pipeline.submit(0, *CASES["image_audio"].chat(), options=options(max_text=16))
        pipeline.run()
        assert trace.error is None
        texts.append(trace.payloads("thinker->client"))
    assert texts[0] == texts[1] and texts[0]
