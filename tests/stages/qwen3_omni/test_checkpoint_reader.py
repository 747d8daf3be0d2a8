"""The checkpoint reader: the right tensors, fused as transformers fuses them, and a clear word for everything that is broken."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

from omni_bus.errors import CheckpointError
from omni_bus.stages.qwen3_omni import checkpoint_files, fixture
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint

SINGLE, INDEX = checkpoint_files.SINGLE_FILE, checkpoint_files.INDEX_FILE


def quiet(fraction: float, text: str) -> None: ...


@pytest.fixture(scope="module", params=["single", "sharded"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp(request.param)
    fixture.write(path, "tiny", 0, quiet, shard_bytes=1 << 20 if request.param == "sharded" else 1 << 30)
    return path


def under(state: dict[str, torch.Tensor], *prefixes: str) -> dict[str, torch.Tensor]:
    """What lies under the first of the prefixes that has anything: releases of transformers nest the Thinker's parts differently."""
    prefix = next(prefix for prefix in prefixes if any(name.startswith(prefix) for name in state))
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def test_every_stage_equals_what_transformers_loads(directory: pathlib.Path) -> None:
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    state, checkpoint = model.state_dict(), Checkpoint(directory)
    for prefix, expected in (
        ("talker.", model.talker.state_dict()),
        ("code2wav.", model.code2wav.state_dict()),
        ("thinker.visual.", under(state, "thinker.model.visual.", "thinker.visual.")),
        ("thinker.audio_tower.", under(state, "thinker.model.audio_tower.", "thinker.audio_tower.")),
        ("thinker.model.", under(state, "thinker.model.language_model.", "thinker.model.")),
    ):
        read = checkpoint.tensors(prefix)
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_it_loads_modules_from_the_meta_device(directory: pathlib.Path) -> None:
    config = Qwen3OmniMoeConfig.from_pretrained(directory)
    with torch.device("meta"):
        talker = Qwen3OmniMoeTalkerForConditionalGeneration._from_config(config.talker_config)
    Checkpoint(directory).load_into(talker, "talker.", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in talker.parameters()} == {torch.bfloat16}
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in talker.parameters())
    expected = (
        load_file(directory / SINGLE)["talker.model.layers.1.mlp.experts.5.up_proj.weight"]
        if (directory / SINGLE).exists()
        else None
    )
    if expected is not None:
        fused = talker.model.layers[1].mlp.experts.gate_up_proj[5]
        assert torch.equal(fused[expected.shape[0] :], expected.bfloat16())


def test_only_the_shards_of_a_prefix_are_opened(tmp_path: pathlib.Path) -> None:
    fixture.write(tmp_path, "tiny", 0, quiet, shard_bytes=1 << 20)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    wanted = {file for name, file in weight_map.items() if name.startswith("code2wav.")}
    for path in tmp_path.glob("*.safetensors"):
        if path.name not in wanted:
            path.write_bytes(b"broken")
    assert Checkpoint(tmp_path).tensors("code2wav.")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Checkpoint(tmp_path).tensors("thinker.")


def test_names_can_be_mapped_and_left_out(directory: pathlib.Path) -> None:
    norm = nn.Module()
    norm.register_parameter("scale", nn.Parameter(torch.zeros(64)))
    Checkpoint(directory).load_into(norm, "thinker.model.norm.", rename={"weight": "scale"}.get)
    assert float(norm.scale.mean()) > 0.8
    with pytest.raises(CheckpointError, match="tensor scale under"):
        Checkpoint(directory).load_into(norm, "thinker.model.norm.")


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[pathlib.Path], None]:
    def edit(path: pathlib.Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(path / SINGLE).items()}
        change(tensors)
        (path / SINGLE).unlink()
        save_file(tensors, path / SINGLE)

    return edit


def _write(name: str, content: bytes) -> Callable[[pathlib.Path], None]:
    def edit(path: pathlib.Path) -> None:
        (path / SINGLE).unlink(missing_ok=True)
        (path / name).write_bytes(content)

    return edit


def _cut(path: pathlib.Path) -> None:
    with (path / SINGLE).open("r+b") as stream:
        stream.truncate((path / SINGLE).stat().st_size - 100)


def _index(weight_map: Any) -> Callable[[pathlib.Path], None]:
    def edit(path: pathlib.Path) -> None:
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return edit


CONV = "code2wav.decoder.0.conv.weight"
GATE, UP, DOWN = (f"talker.model.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down"))
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
BROKEN: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "no weights": (lambda path: (path / SINGLE).unlink(), "holds neither"),
    "cut short": (_cut, "is cut short"),
    "empty file": (_write(SINGLE, b""), "not a safetensors file"),
    "not safetensors": (_write(SINGLE, b"PK\x03\x04" + b"\0" * 64), "not a safetensors file"),
    "header not JSON": (_write(SINGLE, struct.pack("<Q", 4) + b"{{{{"), "malformed safetensors header"),
    "header a list": (_write(SINGLE, struct.pack("<Q", 2) + b"[]"), "malformed safetensors header"),
    "header without offsets": (_write(SINGLE, struct.pack("<Q", 8) + b'{"a":{}}'), "malformed safetensors header"),
    "shape against bytes": (_write(SINGLE, struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 8), r"4 bytes for shape \[2\]"),
    "tensor missing": (_edit_tensors(lambda t: t.pop(CONV)), "lacks tensor decoder.0.conv.weight"),
    "many tensors missing": (
        _edit_tensors(lambda t: [t.pop(n) for n in list(t) if n.startswith("code2wav.upsample")]),
        "and 21 more",
    ),
    "stage missing": (_edit_tensors(lambda t: [t.pop(n) for n in list(t) if n.startswith("code2wav.")]), "no tensor under"),
    "wrong shape": (
        _edit_tensors(lambda t: t.update({CONV: t[CONV][:, :, :5].contiguous()})),
        rf"{CONV} has shape \[64, 64, 5\]; config.json asks for \[64, 64, 7\]",
    ),
    "unknown tensor": (_edit_tensors(lambda t: t.update({"code2wav.extra": torch.zeros(1)})), "has tensor extra"),
    "expert matrix missing": (_edit_tensors(lambda t: t.pop(UP)), f"lacks tensor {UP}"),
    "expert misshapen": (_edit_tensors(lambda t: t.update({DOWN: t[DOWN].T.contiguous()})), rf"{DOWN} has shape \[24, 48\]"),
    "first expert a vector": (
        _edit_tensors(lambda t: t.update({GATE.replace(".3.", ".0."): torch.zeros(5)})),
        "a matrix is expected",
    ),
    "index not JSON": (_write(INDEX, b"{"), "is not JSON"),
    "index not UTF-8": (_write(INDEX, b"\xff\xfe\xff"), "is not JSON"),
    "index a list": (_write(INDEX, b"[]"), "must hold a JSON object"),
    "index without map": (_write(INDEX, b"{}"), "has no weight_map"),
    "index names a path": (_index({CONV: "../model.safetensors"}), "not a file name"),
    "index names a number": (_index({CONV: 7}), "not a file name"),
    "shard missing": (_index({CONV: "model-00001-of-00002.safetensors"}), "is missing, but"),
    "shard lacks its tensor": (_index({CONV: SINGLE, "code2wav.x": SINGLE}), "lacks tensor code2wav.x"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(tmp_path: pathlib.Path, case: str) -> None:
    fixture.write(tmp_path, "tiny", 0, quiet)
    breakage, message = BROKEN[case]
    breakage(tmp_path)
    config = Qwen3OmniMoeConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        code2wav = Qwen3OmniMoeCode2Wav._from_config(config.code2wav_config)
    with pytest.raises(CheckpointError, match=message):
        checkpoint = Checkpoint(tmp_path)
        checkpoint.load_into(code2wav, "code2wav.")
        checkpoint.tensors("talker.")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "no checkpoint is named"),
        ("/no/such/directory", "there is no directory /no/such/directory"),
        ("./missing", "there is no directory"),
        ("one-word", "there is no directory"),
        ("a/b/c", "there is no directory"),
        ("omni-bus/not there!", "neither a directory nor a hub id"),
        ("omni-bus/never-fetched", "hub cannot be reached; name a directory"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(
    path: str, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(path)


def test_a_hub_id_is_read_from_the_local_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--omni-bus--tiny"
    fixture.write(repository / "snapshots" / "abc", "tiny", 0, quiet)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpoint("omni-bus/tiny")
    assert checkpoint.directory == repository / "snapshots" / "abc"
    assert checkpoint.files.json("config.json")["model_type"] == "qwen3_omni_moe"


def test_a_file_is_not_a_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpoint(tmp_path / "model.bin")
