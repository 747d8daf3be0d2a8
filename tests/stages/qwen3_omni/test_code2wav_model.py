"""Code2Wav in pieces equals transformers' Code2Wav in one pass: PCM16 identical in float64, within 2e-5 in float32."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_bus.errors import CheckpointError
from omni_bus.stages.qwen3_omni import code2wav_config, fixture, fixture_config
from omni_bus.stages.qwen3_omni.check import check_checkpoint
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.code2wav_layers import Rows
from omni_bus.stages.qwen3_omni.code2wav_model import PREFIX, Code2Wav, to_pcm16
from omni_bus.stages.qwen3_omni.fixture_tensors import tensor_specs
from omni_bus.stages.qwen3_omni.json_fields import Section

FRAMES = 330  # more than the 300 at which the reference's own chunking starts to differ from one pass
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("code2wav")
    fixture.write(path, "tiny", 2, lambda fraction, text: None)
    return path


def parsed(config: dict[str, Any]) -> code2wav_config.Code2WavConfig:
    return code2wav_config.parse(Section(config).section("code2wav_config"))


def load(directory: pathlib.Path, dtype: torch.dtype, slots: int = 3) -> Code2Wav:
    config = json.loads((directory / "config.json").read_text())
    return Code2Wav.load(Checkpoint(directory), parsed(config), slots=slots, dtype=dtype, device=CPU)


def reference(directory: pathlib.Path, dtype: torch.dtype) -> Any:
    config = Qwen3OmniMoeConfig.from_pretrained(directory).code2wav_config
    model = Qwen3OmniMoeCode2Wav._from_config(config).eval()
    model.load_state_dict(Checkpoint(directory).tensors(PREFIX), strict=True)
    return model.to(dtype)


def one_pass(model: Any, codes: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        waveform: torch.Tensor = model(codes.T[None].long())[0, 0]
    return waveform


def random_codes(frames: int, seed: int, codebook: int = 256) -> torch.Tensor:
    return torch.randint(0, codebook, (frames, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)


def pieces_of(total: int, size: int | None, seed: int = 0) -> list[int]:
    """Pieces of `size`, or of random sizes up to 40."""
    pick = random.Random(seed)
    out: list[int] = []
    while sum(out) < total:
        out.append(min(size or pick.randint(1, 40), total - sum(out)))
    return out


def decode(model: Code2Wav, codes: torch.Tensor, pieces: list[int], slot: int = 1) -> torch.Tensor:
    out, position = [], 0
    for count in pieces:
        rows = Rows(torch.tensor([slot]), torch.tensor([position]), position == 0)
        out.append(model.decode(codes[None, position : position + count], rows)[0])
        assert out[-1].shape[0] == count * 1920 - (0 if position else 555)
        position += count
    return torch.cat(out)


def poison(model: Code2Wav) -> None:
    for layer in model._streaming():
        for state in layer.state():
            state.fill_(torch.nan)


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    return random_codes(FRAMES, 7)


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def waveform(request: pytest.FixtureRequest, directory: pathlib.Path, codes: torch.Tensor) -> torch.Tensor:
    whole = one_pass(reference(directory, request.param), codes)
    assert whole.shape == (FRAMES * 1920 - 555,) and float(whole.std()) > 0.05
    return whole


def same(streamed: torch.Tensor, whole: torch.Tensor) -> None:
    assert streamed.dtype == whole.dtype
    if whole.dtype == torch.float64:
        assert torch.equal(to_pcm16(streamed), to_pcm16(whole))
    torch.testing.assert_close(streamed, whole, rtol=0, atol=1e-12 if whole.dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("size", [1, 4, 25, None], ids=["1", "4", "25", "random"])
def test_pieces_give_the_one_pass_waveform(
    directory: pathlib.Path, codes: torch.Tensor, waveform: torch.Tensor, size: int | None
) -> None:
    model = load(directory, waveform.dtype)
    poison(model)
    same(decode(model, codes, pieces_of(FRAMES, size)), waveform)


def test_streams_at_different_positions_share_a_batch(
    directory: pathlib.Path, codes: torch.Tensor, waveform: torch.Tensor
) -> None:
    model = load(directory, waveform.dtype)
    other = random_codes(40, 8)
    alone = one_pass(reference(directory, waveform.dtype), other)
    first = decode(model, codes, [30], slot=2)
    second = decode(model, other, [3], slot=0)
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([first], [second])
    for step in range(5):
        a, b = 30 + 5 * step, 3 + 5 * step
        rows = Rows(torch.tensor([2, 0]), torch.tensor([a, b]), False)
        both = model.decode(torch.stack((codes[a : a + 5], other[b : b + 5])), rows)
        parts[0].append(both[0])
        parts[1].append(both[1])
    same(torch.cat(parts[0]), waveform[: 55 * 1920 - 555])
    same(torch.cat(parts[1]), alone[: 28 * 1920 - 555])


def test_fresh_streams_share_a_batch(directory: pathlib.Path) -> None:
    model, one = load(directory, torch.float64), reference(directory, torch.float64)
    streams = [random_codes(6, seed) for seed in (1, 2, 3)]
    slots = torch.tensor([1, 0, 2])
    out = model.decode(torch.stack([s[:2] for s in streams]), Rows(slots, torch.zeros(3, dtype=torch.int64), True))
    more = model.decode(torch.stack([s[2:] for s in streams]), Rows(slots, torch.full((3,), 2), False))
    for row, stream in enumerate(streams):
        same(torch.cat((out[row], more[row])), one_pass(one, stream))


def test_a_saved_state_goes_on_in_another_slot(directory: pathlib.Path) -> None:
    model = load(directory, torch.float64)
    codes = random_codes(12, 4)
    first = decode(model, codes, [5], slot=0)
    saved = model.state_of(0)
    poison(model)
    model.restore(2, saved)
    rest = model.decode(codes[None, 5:], Rows(torch.tensor([2]), torch.tensor([5]), False))[0]
    same(torch.cat((first, rest)), one_pass(reference(directory, torch.float64), codes))


def test_the_real_window_and_depth_stream_exactly(tmp_path: pathlib.Path) -> None:
    """72 frames of attention and 8 layers, at a small width, over more frames than the window."""
    config = fixture_config.tiny(lambda token: 1, vocab_size=64)
    config["code2wav_config"] |= {"sliding_window": 72, "num_hidden_layers": 8, "decoder_dim": 16, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = [spec for spec in tensor_specs(config) if spec.name.startswith(PREFIX)]
    save_file({spec.name: fixture.make(spec, 3, torch.float32) for spec in specs}, tmp_path / "model.safetensors")
    codes = random_codes(200, 5)
    whole = one_pass(reference(tmp_path, torch.float64), codes)
    for size in (3, 25):
        same(decode(load(tmp_path, torch.float64), codes, pieces_of(200, size)), whole)


def test_bfloat16_stays_near(directory: pathlib.Path) -> None:
    codes = random_codes(20, 6)
    exact = one_pass(reference(directory, torch.float32), codes)
    streamed = decode(load(directory, torch.bfloat16), codes, [1, 4, 15]).float()
    assert streamed.isfinite().all()
    assert float((streamed - exact).std() / exact.std()) < 0.2


def test_the_real_configuration_has_the_parameters_of_transformers(tmp_path: pathlib.Path) -> None:
    config = fixture_config.full(lambda token: 1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = Code2Wav(parsed(config))
        expected = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeConfig.from_pretrained(tmp_path).code2wav_config)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == shapes
    assert parsed(config).frame_samples == 1920


@pytest.mark.parametrize("make", [fixture_config.full, lambda token_id: fixture_config.tiny(token_id, vocab_size=64)])
def test_the_shapes_that_a_check_looks_for_are_those_of_the_model(make: Any) -> None:
    config = make(lambda token: 1)
    shapes = {spec.name: spec.shape for spec in tensor_specs(config)}
    expected = code2wav_config.expected_shapes(parsed(config))
    assert len(expected) > 10 and expected.items() <= shapes.items()


@pytest.mark.parametrize(
    "change", [{"decoder_dim": 32}, {"sliding_window": 0}, {"num_hidden_layers": 4}, {"upsample_rates": [8, 5, 4, 2]}]
)
def test_a_check_finds_what_does_not_fit_code2wav(tmp_path: pathlib.Path, change: dict[str, Any]) -> None:
    fixture.write(tmp_path, "tiny", 0, lambda fraction, text: None)
    check_checkpoint(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config["code2wav_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="code2wav"):
        check_checkpoint(str(tmp_path))


def test_both_spellings_of_the_configuration_are_read() -> None:
    config = fixture_config.tiny(lambda token: 1, vocab_size=64)
    assert parsed(config) == parsed(fixture_config.respelled(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": None}, "lacks code2wav_config.sliding_window"),
        ({"sliding_window": 1}, "sliding_window must be at least 2"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "must be at least 1"),
        ({"upsample_rates": [8, 5, 0]}, "must be at least 1"),
        ({"upsampling_ratios": [1]}, "must multiply to at least 2"),
        ({"decoder_dim": 40}, "must halve once"),
        ({"num_attention_heads": 3}, "multiple of num_key_value_heads"),
        ({"hidden_act": "gelu"}, "must be 'silu'"),
        ({"attention_bias": True}, "attention_bias must be false"),
        ({"rope_theta": None}, "lacks code2wav_config.rope_theta"),
    ],
)
def test_a_wrong_configuration_is_named(change: dict[str, Any], message: str) -> None:
    config = fixture_config.tiny(lambda token: 1, vocab_size=64)
    config["code2wav_config"] |= change
    with pytest.raises(CheckpointError, match=message):
        parsed(config)


def test_pcm16_rounds_halves_to_even_and_holds_the_range() -> None:
    values = torch.tensor([0.0, 1.0, -1.0, 0.5 / 32767, 1.5 / 32767, 2.5 / 32767, -0.5 / 32767, 1.5, -1.5], dtype=torch.float64)
    assert to_pcm16(values).tolist() == [0, 32767, -32767, 0, 2, 2, 0, 32767, -32768]
    assert to_pcm16(torch.tensor([0.25], dtype=torch.bfloat16)).tolist() == [8192]
