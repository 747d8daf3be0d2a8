"""The fixture checkpoint: deterministic, complete, and loadable by transformers in both spellings of config.json."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import shutil
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omni_bus.errors import CheckpointError, ConfigError
from omni_bus.stages.qwen3_omni import fixture, fixture_config, tokenizer
from omni_bus.stages.qwen3_omni.fixture_tensors import TensorSpec, tensor_specs

REAL_TOKENS = {"system": 8948, "user": 872, "assistant": 77091} | {
    token: 151643 + index for index, (token, _) in enumerate(tokenizer.SPECIALS)
}


def quiet(fraction: float, text: str) -> None:
    assert 0 <= fraction <= 1 and text


def write(directory: pathlib.Path, seed: int = 0, **options: Any) -> pathlib.Path:
    fixture.write(directory, "tiny", seed, quiet, **options)
    return directory


def digest(directory: pathlib.Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def in_memory_name(name: str, nested: bool) -> str:
    """transformers' own name of a tensor on disk; experts of a layer fall together.

    `nested`: its release keeps encoders and language model together in `thinker.model`; others have them beside each other, as on disk.
    """
    if nested:
        name = re.sub(r"^thinker\.(audio_tower|visual)\.", r"thinker.model.\1.", name)
        name = re.sub(r"^thinker\.model\.(embed_tokens|layers|norm)\b", r"thinker.model.language_model.\1", name)
    name = re.sub(r"\.experts\.\d+\.(gate|up)_proj\.weight$", ".experts.gate_up_proj", name)
    return re.sub(r"\.experts\.\d+\.down_proj\.weight$", ".experts.down_proj", name)


def in_memory_shapes(config: fixture_config.Config, nested: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in tensor_specs(config):
        name = in_memory_name(spec.name, nested)
        if name == spec.name or ".experts." not in name:
            shapes[name] = spec.shape
            continue
        experts = config["thinker_config" if name.startswith("thinker") else "talker_config"]["text_config"]["num_experts"]
        rows = 2 * spec.shape[0] if name.endswith("gate_up_proj") else spec.shape[0]
        shapes[name] = (experts, rows, spec.shape[1])
    return shapes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write(tmp_path_factory.mktemp("tiny"))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tiny: pathlib.Path, tmp_path: pathlib.Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again = write(tmp_path / "again")
    finally:
        torch.set_num_threads(threads)
    assert digest(again) == digest(tiny)
    assert digest(write(tmp_path / "other", seed=1)) != digest(tiny)


def test_shards_hold_the_tensors_of_the_single_file(tiny: pathlib.Path, tmp_path: pathlib.Path) -> None:
    sharded = write(tmp_path / "sharded", shard_bytes=1 << 20)
    index = json.loads((sharded / fixture.INDEX_FILE).read_text())
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 5 and set(index["weight_map"].values()) == set(files)
    assert all((sharded / name).stat().st_size < (1 << 20) + (64 << 10) for name in files)
    with safe_open(tiny / "model.safetensors", "pt") as single:
        assert index["weight_map"].keys() == set(single.keys())
        for name, file in index["weight_map"].items():
            with safe_open(sharded / file, "pt") as shard:
                assert torch.equal(shard.get_tensor(name), single.get_tensor(name)), name


@pytest.mark.parametrize("spelling", ["hub", "transformers"])
def test_transformers_loads_it_without_a_missing_or_unexpected_tensor(tmp_path: pathlib.Path, spelling: Any) -> None:
    directory = write(tmp_path / "checkpoint", spelling=spelling)
    raw = json.loads((directory / "config.json").read_text())
    assert ("rope_theta" in raw["thinker_config"]["text_config"]) == (spelling == "hub")
    model, loading = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    text = model.config.thinker_config.text_config
    assert text.rope_parameters["mrope_section"] == [6, 5, 5] and text.rope_parameters["rope_theta"] == 1_000_000
    assert model.config.talker_config.text_config.num_experts == 8
    assert model.config.code2wav_config.rope_parameters["rope_theta"] == 10_000


def test_transformers_generates_text_and_speech_from_it(tiny: pathlib.Path) -> None:
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(tiny)
    prompt = words.apply_chat_template([{"role": "user", "content": "Say hello."}], add_generation_prompt=True, tokenize=False)
    inputs = words(prompt, return_tensors="pt")
    text, waveform = model.generate(
        **inputs,
        speaker="chelsie",
        thinker_max_new_tokens=6,
        thinker_eos_token_id=model.config.im_end_token_id,
        thinker_do_sample=False,
        talker_max_new_tokens=8,
        talker_do_sample=False,
    )
    assert text.shape[1] > inputs["input_ids"].shape[1]
    assert (waveform.shape[-1] + 555) % 1920 == 0


def test_sequences_end_by_themselves_at_different_lengths(tiny: pathlib.Path) -> None:
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(tiny)
    lengths = []
    for text in ("Tell me a story.", "Hi", "What is the capital of France?", "Count to ten slowly.", "Why is the sky blue?"):
        turn = words.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        ids = words(turn, return_tensors="pt")["input_ids"]
        out = model.thinker.generate(
            input_ids=ids, max_new_tokens=32, do_sample=False, eos_token_id=model.config.im_end_token_id
        )
        lengths.append(out.shape[1] - ids.shape[1])
    assert len(set(lengths)) >= 3 and max(lengths) == 32 and sum(length < 32 for length in lengths) >= 2, lengths


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_waveform_is_loud_and_hardly_clipped(tmp_path: pathlib.Path, seed: int) -> None:
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(write(tmp_path / "c", seed=seed), dtype=torch.float32)
    codes = torch.randint(0, 256, (1, 16, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        waveform = model.code2wav(codes)
    assert 0.05 < float(waveform.std()) < 0.2
    assert abs(float(waveform.mean())) < 0.02
    assert float((waveform.abs() >= 1).float().mean()) < 1e-3


def test_feature_extractor_and_image_processor_read_their_keys(tiny: pathlib.Path) -> None:
    audio = WhisperFeatureExtractor.from_pretrained(tiny)
    assert (audio.feature_size, audio.hop_length, audio.sampling_rate, audio.dither) == (128, 160, 16_000, 0.0)
    image = Qwen2VLImageProcessorPil.from_pretrained(tiny)
    assert (image.patch_size, image.merge_size, image.temporal_patch_size) == (16, 2, 2)
    assert list(image.image_mean) == [0.5, 0.5, 0.5]


def test_full_size_has_the_names_and_shapes_of_transformers_model(tmp_path: pathlib.Path) -> None:
    config = fixture_config.full(REAL_TOKENS.__getitem__)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration._from_config(Qwen3OmniMoeConfig.from_pretrained(tmp_path))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    nested = any(name.startswith("thinker.model.language_model.") for name in expected)
    assert in_memory_shapes(config, nested) == expected
    assert sum(spec.count for spec in tensor_specs(config)) == 35_259_818_545
    assert next(model.parameters()).dtype == torch.bfloat16


def test_full_size_has_the_ids_of_the_real_configuration() -> None:
    config = fixture_config.full(REAL_TOKENS.__getitem__)
    talker = config["talker_config"]
    assert config["im_end_token_id"] == 151645 and config["tts_eos_token_id"] == 151673
    assert config["thinker_config"]["audio_token_id"] == 151675
    assert (talker["codec_pad_id"], talker["codec_bos_id"], talker["codec_eos_token_id"]) == (2148, 2149, 2150)
    assert talker["speaker_id"] == {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
    assert talker["text_config"]["vocab_size"] == 3072 and talker["text_config"]["num_experts_per_tok"] == 6


def test_a_tensor_is_the_same_alone_as_in_the_checkpoint(tiny: pathlib.Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    wanted = "talker.model.codec_embedding.weight"
    spec = next(spec for spec in tensor_specs(config) if spec.name == wanted)
    with safe_open(tiny / "model.safetensors", "pt") as file:
        stored = file.get_tensor(wanted)
    assert torch.equal(fixture.make(spec, 0, torch.float32), stored)
    assert torch.equal(fixture.make(spec, 0, torch.bfloat16), stored.bfloat16())
    speaker = config["talker_config"]["speaker_id"]["ethan"]
    assert float(stored[speaker].std()) > 3 * float(stored[0].std())


def test_it_refuses_what_it_cannot_write(tiny: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="tiny"):
        fixture.write(tmp_path / "a", "tyny", 0, quiet)
    with pytest.raises(CheckpointError, match="already"):
        fixture.write(tiny, "tiny", 0, quiet)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        fixture.write(tmp_path / "file", "tiny", 0, quiet)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100 << 20))
    with pytest.raises(CheckpointError, match=r"0\.1 GB free; the checkpoint needs 0\.3 GB"):
        fixture.write(tmp_path / "b", "tiny", 0, quiet)
    assert not (tmp_path / "b").exists()


def test_full_size_is_written_in_bfloat16_shards(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same path as for all 70 GB, over the vision tower's first 400 MB and with the tiny vocabulary."""
    real = fixture.tensor_specs
    monkeypatch.setattr(
        fixture,
        "tensor_specs",
        lambda config: (spec for spec in real(config) if re.match(r"thinker\.visual\.(p|blocks\.\d\.)", spec.name)),
    )
    monkeypatch.setattr(tokenizer, "find_rank_file", lambda: pathlib.Path("unused"))
    monkeypatch.setattr(tokenizer, "full_vocabulary", lambda path: tokenizer.tiny_vocabulary())
    said: list[float] = []
    fixture.write(tmp_path / "full", "full", 0, lambda fraction, text: said.append(fraction), shard_bytes=100 << 20)
    index = json.loads((tmp_path / "full" / fixture.INDEX_FILE).read_text())
    files = sorted((tmp_path / "full").glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert len(said) == len(files) + 1 and said == sorted(said) and said[-1] == 1.0
    sizes = 0
    for path in files:
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                tensor = shard.get_tensor(name)
                assert tensor.dtype == torch.bfloat16 and tensor.isfinite().all()
                sizes += tensor.nbytes
    assert sizes == index["metadata"]["total_size"] > 250e6
    assert json.loads((tmp_path / "full" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_zero_sum_kernel_passes_no_constant() -> None:
    kernel = fixture.make(TensorSpec(name="k", shape=(1, 4, 7), std=1.0, zero_sum=True), 0, torch.float32)
    assert float(kernel.sum(-1).abs().max()) < 1e-5 and float(kernel.std()) > 0.5
