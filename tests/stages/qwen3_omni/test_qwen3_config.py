"""config.json in both spellings, and checkpoints that cannot be served: each is refused with what is wrong and what to do."""

from __future__ import annotations

import copy
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from omni_bus.errors import CheckpointError
from omni_bus.spec import load_pipeline
from omni_bus.stages.qwen3_omni.check import check_checkpoint
from omni_bus.stages.qwen3_omni.config import parse_config, read_config
from tests.support.qwen3_omni import CASES, Expected, options
from tests.support.stage_pipeline import StagePipeline

Fields = dict[str, Any]


def old_spelling(fields: Fields) -> Fields:
    """As on the hub: rope_theta and rope_scaling, num_experts."""
    out: Fields = {}
    for key, value in fields.items():
        if key == "rope_parameters":
            rope = dict(value)
            out["rope_theta"] = rope.pop("rope_theta")
            if "mrope_section" in rope:
                out["rope_scaling"] = {**rope, "type": "default"}
        else:
            name = "num_experts" if key == "num_local_experts" else key
            out[name] = old_spelling(value) if isinstance(value, dict) else value
    return out


def new_spelling(fields: Fields) -> Fields:
    """As transformers 5 writes it: rope_parameters, num_local_experts."""
    out: Fields = {}
    for key, value in fields.items():
        if key == "rope_theta":
            out["rope_parameters"] = {**(fields.get("rope_scaling") or {"rope_type": "default"}), "rope_theta": value}
        elif key != "rope_scaling":
            name = "num_local_experts" if key == "num_experts" else key
            out[name] = new_spelling(value) if isinstance(value, dict) else value
    return out


@pytest.fixture(scope="session")
def fields(omni_checkpoint: pathlib.Path) -> Fields:
    value: Fields = json.loads((omni_checkpoint / "config.json").read_text())
    return value


def test_both_spellings_are_one_configuration(fields: Fields) -> None:
    old, new = old_spelling(fields), new_spelling(old_spelling(fields))
    assert "rope_theta" in old["talker_config"]["text_config"] and "num_experts" in old["talker_config"]["text_config"]
    assert (
        "rope_parameters" in new["talker_config"]["text_config"] and "num_local_experts" in new["talker_config"]["text_config"]
    )
    assert parse_config(old) == parse_config(new)


@pytest.mark.parametrize("spelling", [old_spelling, lambda fields: new_spelling(old_spelling(fields))])
def test_a_checkpoint_in_either_spelling_answers_alike(
    spelling: Callable[[Fields], Fields],
    fields: Fields,
    omni_checkpoint: pathlib.Path,
    tmp_path: pathlib.Path,
    greedy: Callable[[str], Expected],
) -> None:
    directory = linked(omni_checkpoint, tmp_path / "model")
    write(directory / "config.json", spelling(fields))
    check_checkpoint(str(directory))
    pipeline = StagePipeline(load_pipeline("qwen3_omni"), str(directory), ("processor", "thinker", "talker"), max_batch=1)
    trace = pipeline.submit(1, *CASES["image_audio"].chat(), options=options(max_frames=6))
    pipeline.run()
    codes = [output.tensors["codes"][0].tolist() for output in trace.chunks["talker->code2wav"] if output.payload.count]
    assert codes == greedy("image_audio").codes.T.tolist()[:5]


def test_real_models_values_are_read(fields: Fields) -> None:
    """The published configuration has no class default of transformers in common with these fields."""
    config = parse_config(fields)
    assert config.talker.speaker_ids.keys() == {"aiden", "chelsie", "ethan"}
    assert len(config.talker.suppressed_ids) == 1023 and config.talker.codec_eos not in config.talker.suppressed_ids


# ---- refusals


def linked(source: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """A copy of a checkpoint whose files may be replaced."""
    directory.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (directory / file.name).symlink_to(file)
        else:
            shutil.copy(file, directory / file.name)
    return directory


def write(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def edit(*path: str, value: Any) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        for key in path[:-1]:
            fields = fields[key]
        if value is None:
            del fields[path[-1]]
        else:
            fields[path[-1]] = value

    return change


TALKER_TEXT = ("talker_config", "text_config")
BAD_FIELDS: list[tuple[Callable[[Fields], None], str]] = [
    (edit("model_type", value="qwen2_5_omni"), "model_type"),
    (edit("talker_config", value=None), "talker_config"),
    (edit("thinker_config", value=[]), "thinker_config"),
    (edit("im_end_token_id", value=None), "im_end_token_id"),
    (edit("im_end_token_id", value="151645"), "im_end_token_id"),
    (edit("im_end_token_id", value=True), "im_end_token_id"),
    (edit("user_token_id", value=10**9), "vocabulary"),
    (edit("thinker_config", "text_config", "hidden_size", value=None), "thinker_config.text_config.hidden_size"),
    (edit("thinker_config", "text_config", "hidden_size", value="64"), "thinker_config.text_config.hidden_size"),
    (edit("thinker_config", "text_config", "hidden_size", value=96), "hidden_size"),
    (edit("thinker_config", "text_config", "attention_bias", value=True), "attention_bias"),
    (edit("thinker_config", "text_config", "hidden_act", value="gelu"), "hidden_act"),
    (edit("thinker_config", "text_config", "mlp_only_layers", value=[0]), "dense and sparse"),
    (edit("thinker_config", "text_config", "decoder_sparse_step", value=2), "dense and sparse"),
    (edit("thinker_config", "text_config", "num_key_value_heads", value=3), "num_key_value_heads"),
    (edit("thinker_config", "vision_config", "deepstack_visual_indexes", value=["0"]), "deepstack_visual_indexes"),
    (edit("thinker_config", "vision_config", "depth", value=None), "vision_config.depth"),
    (edit("thinker_config", "vision_config", "out_hidden_size", value=1), "out_hidden_size"),
    (edit("thinker_config", "audio_config", "d_model", value=None), "audio_config.d_model"),
    (edit("thinker_config", "audio_config", "n_window", value=100), "n_window"),
    (edit("thinker_config", "audio_config", "n_window_infer", value=850), "n_window_infer"),
    (edit("thinker_config", "position_id_per_seconds", value=None), "position_id_per_seconds"),
    (edit(*TALKER_TEXT, "vocab_size", value=3072), "codebook_size + 1024"),
    (edit(*TALKER_TEXT, "num_experts_per_tok", value=99), "num_experts_per_tok"),
    (edit(*TALKER_TEXT, "hidden_size", value=50), "hidden_size"),
    (edit("talker_config", "num_code_groups", value=32), "num_quantizers"),
    (edit("talker_config", "accept_hidden_layer", value=3), "accept_hidden_layer"),
    (edit("talker_config", "accept_hidden_layer", value=5), "accept_hidden_layer"),
    (edit("talker_config", "codec_bos_id", value=7), "last 1,024"),
    (edit("talker_config", "speaker_id", value={}), "speaker_id"),
    (edit("talker_config", "speaker_id", value={"Ethan": "x"}), "speaker_id"),
    (edit("talker_config", "thinker_hidden_size", value=65), "thinker_hidden_size"),
    (edit("talker_config", "code_predictor_config", "vocab_size", value=2048), "code_predictor_config.vocab_size"),
    (edit("code2wav_config", "codebook_size", value=None), "codebook_size"),
]


@pytest.mark.parametrize(("change", "named"), BAD_FIELDS, ids=[f"{index}-{case[1]}" for index, case in enumerate(BAD_FIELDS)])
def test_a_wrong_field_is_named(change: Callable[[Fields], None], named: str, fields: Fields) -> None:
    wrong = new_spelling(old_spelling(copy.deepcopy(fields)))
    change(wrong)
    with pytest.raises(CheckpointError) as caught:
        parse_config(wrong)
    assert named in caught.value.message and "config.json" in caught.value.message


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "yarn", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}, "rope_type"),
        ({"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 4]}, "mrope_section"),
        ({"rope_type": "default", "rope_theta": 1e6}, "mrope_section"),
        ({"rope_type": "default", "mrope_section": [6, 5, 5]}, "rope_theta"),
    ],
)
def test_rope_that_this_engine_does_not_run_is_refused(rope: Fields, named: str, fields: Fields) -> None:
    wrong = new_spelling(old_spelling(copy.deepcopy(fields)))
    wrong["thinker_config"]["text_config"]["rope_parameters"] = rope
    with pytest.raises(CheckpointError, match=named):
        parse_config(wrong)


def _cut(directory: pathlib.Path) -> None:
    file = directory / "model.safetensors"
    data = file.read_bytes()[:-100]
    file.unlink()
    file.write_bytes(data)


def _garbage(directory: pathlib.Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)


def _shard_missing(directory: pathlib.Path) -> None:
    (directory / "model.safetensors").unlink()
    write(directory / "model.safetensors.index.json", {"weight_map": {"a": "model-00001-of-00002.safetensors"}})


def _shard_outside(directory: pathlib.Path) -> None:
    write(directory / "model.safetensors.index.json", {"weight_map": {"a": "../model.safetensors"}})


def _more_layers(directory: pathlib.Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    fields["talker_config"]["text_config"]["num_hidden_layers"] += 1
    write(directory / "config.json", fields)


def _wider(directory: pathlib.Path) -> None:
    fields = json.loads((directory / "config.json").read_text())
    fields["talker_config"]["text_config"]["intermediate_size"] += 1
    write(directory / "config.json", fields)


def _no_template(directory: pathlib.Path) -> None:
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer.pop("chat_template", None)
    write(directory / "tokenizer_config.json", tokenizer)
    (directory / "chat_template.jinja").unlink(missing_ok=True)


def _no_image_keys(directory: pathlib.Path) -> None:
    write(directory / "preprocessor_config.json", {"feature_size": 128})


def _unlink(*names: str) -> Callable[[pathlib.Path], None]:
    return lambda directory: [(directory / name).unlink() for name in names] and None


BAD_DIRECTORIES: list[tuple[str, Callable[[pathlib.Path], None], str]] = [
    ("no config", _unlink("config.json"), "config.json"),
    ("config is no JSON", lambda directory: (directory / "config.json").write_text("{") and None, "JSON"),
    ("config is a list", lambda directory: (directory / "config.json").write_text("[]") and None, "JSON object"),
    ("no tensors", _unlink("model.safetensors"), "model.safetensors"),
    ("tensors cut short", _cut, "cut short"),
    ("tensors are garbage", _garbage, "safetensors"),
    ("a shard is missing", _shard_missing, "model-00001-of-00002.safetensors"),
    ("a shard lies outside", _shard_outside, "not a file name"),
    ("fewer layers than said", _more_layers, "layers."),
    ("another width than said", _wider, "text_projection"),
    ("no tokenizer", _unlink("tokenizer.json", "vocab.json"), "tokenizer.json"),
    ("no tokenizer config", _unlink("tokenizer_config.json"), "tokenizer_config.json"),
    ("no chat template", _no_template, "chat template"),
    ("no preprocessor config", _unlink("preprocessor_config.json"), "preprocessor_config.json"),
    ("no image keys", _no_image_keys, "preprocessor_config.json"),
]


@pytest.mark.parametrize(("change", "named"), [case[1:] for case in BAD_DIRECTORIES], ids=[case[0] for case in BAD_DIRECTORIES])
def test_a_directory_that_cannot_be_served_is_refused(
    change: Callable[[pathlib.Path], None], named: str, omni_checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    directory = linked(omni_checkpoint, tmp_path / "model")
    check_checkpoint(str(directory))
    change(directory)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(str(directory))
    assert named in caught.value.message


@pytest.mark.parametrize("path", ["", "/no/such/directory", "./nowhere"])
def test_a_path_that_is_no_directory_is_refused(path: str) -> None:
    for call in (check_checkpoint, read_config):
        with pytest.raises(CheckpointError) as caught:
            call(path)
        assert "directory" in caught.value.message or "model.path" in caught.value.message


def test_checking_a_checkpoint_imports_neither_torch_nor_transformers(omni_checkpoint: pathlib.Path) -> None:
    code = (
        "import sys; from omni_bus.spec import load_pipeline; spec = load_pipeline('qwen3_omni'); "
        f"spec.check_model({str(omni_checkpoint)!r}, {{}}); spec.voices({str(omni_checkpoint)!r}); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
