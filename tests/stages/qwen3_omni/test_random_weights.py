"""load = "random": the fixture's tensors without its files, fused where the stages want them fused, and the same answers."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch

from omni_bus.deployment import StageConfig
from omni_bus.errors import CheckpointError
from omni_bus.spec import load_pipeline
from omni_bus.stages.contract import StageContext
from omni_bus.stages.qwen3_omni import checkpoint, fixture, fixture_config
from omni_bus.stages.qwen3_omni.check import check_checkpoint
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.line_end import token_id_of_line_end
from omni_bus.stages.qwen3_omni.random_weights import RandomCheckpoint, draw
from omni_bus.stages.qwen3_omni.weights import WEIGHTS_SHARE, open_checkpoint
from tests.support.qwen3_omni import CASES, options
from tests.support.stage_pipeline import StagePipeline, Trace

STAGES = ("processor", "thinker", "talker", "code2wav")
RANDOM = frozenset({"thinker", "talker", "code2wav"})


def quiet(fraction: float, text: str) -> None: ...


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """With its tensors; of the seed that random weights have."""
    directory = tmp_path_factory.mktemp("written") / "tiny"
    fixture.write(directory, "tiny", 0, quiet)
    return directory


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Without them."""
    directory = tmp_path_factory.mktemp("bare") / "tiny"
    fixture.write(directory, "tiny", 0, quiet, weights=False)
    return directory


def test_without_weights_all_other_files_are_the_same(written: pathlib.Path, bare: pathlib.Path) -> None:
    files = {path.name for path in bare.iterdir()}
    assert files == {path.name for path in written.iterdir()} - {"model.safetensors"}
    assert all((bare / name).read_bytes() == (written / name).read_bytes() for name in files)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["thinker.", "talker.", "code2wav."])
def test_on_a_cpu_they_are_the_fixtures_tensors(
    prefix: str, dtype: torch.dtype, written: pathlib.Path, bare: pathlib.Path
) -> None:
    read, made = Checkpoint(written), RandomCheckpoint(bare)
    expected, tensors = read.tensors(prefix, dtype=dtype), made.tensors(prefix, dtype=dtype)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert made.bytes(prefix, dtype) == read.bytes(prefix, dtype) == sum(tensor.nbytes for tensor in tensors.values())


def test_both_spellings_of_the_configuration_make_them_alike(bare: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = fixture_config.respelled(json.loads((bare / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected, tensors = RandomCheckpoint(bare).tensors("talker."), RandomCheckpoint(tmp_path).tensors("talker.")
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_what_the_configuration_does_not_call_for_is_named(bare: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor under 'speaker\.'"):
        RandomCheckpoint(bare).tensors("speaker.")


def test_a_draw_does_not_depend_on_what_was_drawn_before(bare: pathlib.Path) -> None:
    spec = next(iter(RandomCheckpoint(bare)._specs.values()))
    generator = torch.Generator()
    first = draw(spec, 0, generator)
    draw(spec, 1, generator)
    assert torch.equal(draw(spec, 0, generator), first)


def answer(pipeline: StagePipeline, request_id: int) -> Trace:
    payload, tensors = CASES["image_audio"].chat()
    trace = pipeline.submit(request_id, payload, tensors, options=options(max_text=12, max_frames=8, seed=3))
    pipeline.run()
    assert trace.error is None
    return trace


def samples(trace: Trace) -> torch.Tensor:
    chunks = [output.tensors["pcm"] for output in trace.chunks["code2wav->client"] if output.tensors]
    return torch.cat(chunks)


def test_a_model_without_files_answers_as_the_one_with_them(written: pathlib.Path, bare: pathlib.Path) -> None:
    spec = load_pipeline("qwen3_omni")
    expected = answer(StagePipeline(spec, str(written), STAGES), 1)
    stages = {name: {"load": "random"} for name in RANDOM}
    trace = answer(StagePipeline(spec, str(bare), STAGES, options=stages), 1)
    assert trace.payloads("thinker->client") == expected.payloads("thinker->client")
    assert trace.usage == expected.usage and trace.usage["code2wav"]["samples"] > 0
    assert trace.payloads("talker->code2wav") == expected.payloads("talker->code2wav")
    for one, other in zip(trace.chunks["talker->code2wav"], expected.chunks["talker->code2wav"], strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    # In float32 a sample may round otherwise with the pieces it is decoded in, and with how its weights are aligned in memory.
    made, read = (samples(one) for one in (trace, expected))
    assert int((made.int() - read.int()).abs().max()) <= 1


def test_tensors_are_asked_for_only_where_a_stage_reads_them(written: pathlib.Path, bare: pathlib.Path) -> None:
    check_checkpoint(str(bare), random=RANDOM)
    for stage in RANDOM:
        with pytest.raises(CheckpointError, match="holds neither"):
            check_checkpoint(str(bare), random=RANDOM - {stage})
    check_checkpoint(str(written), random=frozenset({"talker"}))
    check = load_pipeline("qwen3_omni").check_model
    read, made = (StageConfig(devices=("cpu",), options={"load": load}) for load in ("checkpoint", "random"))
    check(str(bare), {"thinker": made, "talker": made, "code2wav": made})
    with pytest.raises(CheckpointError):
        check(str(bare), {"thinker": made, "talker": made, "code2wav": read})


def test_the_tokenizer_is_asked_for_all_the_same(bare: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for path in bare.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        check_checkpoint(str(tmp_path), random=RANDOM)


@pytest.mark.parametrize("load", ["checkpoint", "random"])
def test_progress_is_told_by_bytes(load: str, written: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "RUN_BYTES", 64 << 10)
    monkeypatch.setattr("omni_bus.stages.qwen3_omni.random_weights.REPORT_BYTES", 64 << 10)
    said: list[tuple[float, str]] = []
    ctx = StageContext(
        stage="talker",
        pipeline=load_pipeline("qwen3_omni"),
        model_path=str(written),
        device="cpu",
        config=StageConfig(devices=("cpu",), options={"load": load}),
        edges={},
        progress=lambda fraction, detail: said.append((fraction, detail)),
    )
    tensors = open_checkpoint(ctx, "talker.").tensors("talker.")
    fractions = [fraction for fraction, _ in said]
    assert len(said) > 5 and fractions == sorted(fractions) and fractions[-1] == pytest.approx(WEIGHTS_SHARE)
    assert all("of 0.0 GB" in detail for _, detail in said) and tensors


def test_runs_are_read_by_threads_in_any_number(written: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Checkpoint(written).tensors("thinker.", dtype=torch.bfloat16)
    for threads, size in ((1, 1 << 40), (8, 1)):
        monkeypatch.setattr(checkpoint, "THREADS", threads)
        monkeypatch.setattr(checkpoint, "RUN_BYTES", size)
        read = Checkpoint(written).tensors("thinker.", dtype=torch.bfloat16)
        assert read.keys() == expected.keys() and all(torch.equal(read[name], expected[name]) for name in expected)


def test_the_full_size_has_the_real_ids_with_the_tiny_tokenizer_too(tmp_path: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    fixture.write(tmp_path, "full", 0, quiet, weights=False, vocabulary="tiny")
    config = json.loads((tmp_path / "config.json").read_text())
    words = AutoTokenizer.from_pretrained(tmp_path)
    assert config["im_end_token_id"] == words.convert_tokens_to_ids("<|im_end|>") == 151645
    assert config["thinker_config"]["audio_token_id"] == 151675
    assert config["assistant_token_id"] == words.convert_tokens_to_ids("assistant")
    assert words("user ~300", add_special_tokens=False)["input_ids"] == [words.convert_tokens_to_ids("user"), *b" ~300"]
    assert words.decode([104, 300, 151642]) == "h~300~151642"  # whatever is drawn is text
    check_checkpoint(str(tmp_path), random=RANDOM)


def test_the_line_end_is_found_without_transformers(bare: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(bare)("\n", add_special_tokens=False)["input_ids"]
    assert [token_id_of_line_end(bare)] == expected
    (tmp_path / "vocab.json").write_bytes((bare / "vocab.json").read_bytes())
    assert [token_id_of_line_end(tmp_path)] == expected
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no token for the line end"):
        token_id_of_line_end(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        token_id_of_line_end(tmp_path)


@pytest.mark.parametrize("stage", ["talker", "code2wav"])
def test_speech_stages_load_without_transformers(stage: str, bare: pathlib.Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parents[3])!r})
from omni_bus.spec import load_pipeline
from tests.support.stage_pipeline import StagePipeline
StagePipeline(load_pipeline("qwen3_omni"), {str(bare)!r}, ({stage!r},), options={{{stage!r}: {{"load": "random"}}}})
assert not [name for name in sys.modules if name.startswith("transformers")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
