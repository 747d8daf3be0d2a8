"""Experts in FP8: what a matrix loses, and a mixture's forms with such weights, within the bounds that e4m3 sets."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from omni_bus.errors import CheckpointError
from omni_bus.stages.ar.attention import ContiguousAttention
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.fp8 import FP8, LARGEST, Fp8Matrix, dequantise, quantise, quantised_experts
from omni_bus.stages.ar.mlp import MoE, MoEConfig, moe_plain

CONFIG = DecoderConfig(
    hidden=40,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp=MoEConfig(experts=6, top_k=3, intermediate=24, fp8=True),
    max_positions=64,
    mrope_section=(6, 5, 5),
    qk_norm=True,
)
SHARED = MoEConfig(experts=6, top_k=3, intermediate=24, norm_topk_prob=False, shared_intermediate=48, fp8=True)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bound(weight: torch.Tensor) -> torch.Tensor:
    """The most by which each weight may be off: half a step of its code, and what float32 rounds away."""
    scale = (weight.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.maximum(2**-4 * weight.abs(), 2**-10 * scale) * (1 + 1e-5)


def lost(weight: torch.Tensor) -> torch.Tensor:
    return (dequantise(*quantise(weight), torch.float32) - weight).abs()


MATRICES = {
    "normal": randn(64, 96, seed=1),
    "outliers": randn(64, 96, seed=2) ** 5,
    "channels of very different size": randn(64, 96, seed=3) * torch.logspace(-30, 30, 64)[:, None],
    "several matrices": randn(3, 16, 32, seed=4),
    "one column": randn(8, 1, seed=5),
    "all equal": torch.full((4, 8), -0.3),
    "subnormal": randn(4, 8, seed=6) * 1e-41,
    "close to overflow": randn(4, 64, seed=7).clamp(-3.0, 3.0) * 1e38,
}


@pytest.mark.parametrize("name", MATRICES)
def test_no_weight_is_further_off_than_half_a_step(name: str) -> None:
    weight = MATRICES[name]
    codes, scales = quantise(weight)
    assert codes.dtype == FP8 and codes.shape == weight.shape
    assert scales.dtype == torch.float32 and scales.shape == weight.shape[:-1]
    assert codes.float().isfinite().all() and (codes.float().abs() <= LARGEST).all()
    assert (lost(weight) <= bound(weight)).all()


def test_the_bound_is_tight_enough_to_mean_something() -> None:
    """Steps twice as wide would break it, and the largest error seen is near it."""
    weight = MATRICES["normal"]
    assert float((lost(weight) / bound(weight)).max()) > 0.9


def test_the_largest_weight_of_a_channel_keeps_its_value() -> None:
    weight = MATRICES["outliers"]
    at = weight.abs().argmax(-1, keepdim=True)
    kept = dequantise(*quantise(weight), torch.float32).gather(-1, at)
    torch.testing.assert_close(kept, weight.gather(-1, at), atol=0, rtol=3e-7)
    assert (quantise(weight)[0].float().abs().amax(-1) == LARGEST).all()


def test_a_channel_of_zeros_stays_one_beside_others() -> None:
    weight = MATRICES["normal"].clone()
    weight[5] = 0
    codes, scales = quantise(weight)
    assert not codes[5].float().any() and scales[5] > 0
    assert not dequantise(codes, scales, torch.float32)[5].any() and (lost(weight) <= bound(weight)).all()
    assert not dequantise(*quantise(torch.zeros(3, 4)), torch.bfloat16).any()


def test_what_e4m3_holds_is_held_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = codes[codes.float().isfinite()].float()  # all but two: ± 448 are among them
    weight = torch.stack([finite * 2.0**power for power in (-20, -3, 0, 7)])
    assert torch.equal(dequantise(*quantise(weight), torch.float32), weight)
    again, scales = quantise(weight)
    assert torch.equal(again.float()[2], finite) and scales.tolist() == [2.0**-20, 0.125, 1.0, 128.0]


def test_a_weight_that_is_not_a_number_is_not_hidden() -> None:
    weight = MATRICES["normal"].clone()
    weight[3, 4] = float("nan")
    assert dequantise(*quantise(weight), torch.float32)[3].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_come_back_as_the_products_in_float32(dtype: torch.dtype) -> None:
    codes, scales = quantise(MATRICES["normal"])
    back = dequantise(codes, scales, dtype)
    assert back.dtype == dtype and torch.equal(back, (codes.float() * scales[:, None]).to(dtype))


def test_a_matrix_is_filled_where_it_lies() -> None:
    codes, scales = torch.zeros(3, 64, 96, dtype=FP8), torch.zeros(3, 64)
    place = Fp8Matrix(codes[1], scales[1])
    weight = MATRICES["normal"].bfloat16()
    place.copy_(weight)
    expected = quantise(weight.float())
    assert torch.equal(codes[1].float(), expected[0].float()) and torch.equal(scales[1], expected[1])
    assert not codes[::2].float().any() and not scales[::2].any()
    assert (place.shape, place.dtype, place.nbytes) == (weight.shape, FP8, 64 * 96 + 4 * 64)


def quantised(randomise, config: MoEConfig, seed: int) -> tuple[MoE, MoE]:
    """A mixture in float32, and the same in FP8."""
    plain = randomise(MoE(40, dataclasses.replace(config, fp8=False)), seed)
    with torch.device("meta"):
        module = MoE(40, config)
    module.load_state_dict(quantised_experts(plain.state_dict()), assign=True)
    return plain, module.requires_grad_(False)


def brought_back(randomise, config: MoEConfig, seed: int) -> MoE:
    """In float32, with the weights that FP8 has left."""
    plain, module = quantised(randomise, config, seed)
    for expert in range(config.experts):
        gate_up, down = module.experts.weights_of(expert, torch.float32)
        plain.experts.gate_up_proj.data[expert], plain.experts.down_proj.data[expert] = gate_up, down
    return plain


@pytest.mark.parametrize("config", [CONFIG.mlp, SHARED], ids=["thinker", "with a shared expert"])
@pytest.mark.parametrize("tokens", [1, 5, 64, 65])
def test_a_mixture_computes_with_the_weights_that_are_left(randomise, config: MoEConfig, tokens: int) -> None:
    _, module = quantised(randomise, config, 31)
    x = randn(tokens, 40, seed=tokens)
    expected = brought_back(randomise, config, 31)(x)
    torch.testing.assert_close(module(x), expected, atol=3e-6, rtol=1e-5)
    module.pack()
    assert module._packed is not None and module._packed.shared == 0
    torch.testing.assert_close(moe_plain(x, module, module._packed), expected, atol=3e-6, rtol=1e-5)


def test_an_expert_is_off_by_no_more_than_its_weights_allow(randomise) -> None:
    plain, module = quantised(randomise, CONFIG.mlp, 32)
    x = randn(200, 40, seed=33)
    for expert in range(CONFIG.mlp.experts):
        gate_up, down = plain.experts.weights_of(expert, torch.float32)
        rough_gate_up, rough_down = module.experts.weights_of(expert, torch.float32)
        (gate, up), (gate_off, up_off) = F.linear(x, gate_up).chunk(2, -1), F.linear(x.abs(), bound(gate_up)).chunk(2, -1)
        rough_gate, rough_up = F.linear(x, rough_gate_up).chunk(2, -1)
        inner, rough_inner = F.silu(gate) * up, F.silu(rough_gate) * rough_up
        gate_off = 1.1 * gate_off  # the steepest slope of silu
        inner_off = gate_off * up.abs() + F.silu(gate).abs() * up_off + gate_off * up_off
        assert ((rough_inner - inner).abs() <= inner_off + 1e-5).all()
        off = F.linear(inner_off, down.abs()) + F.linear(inner.abs() + inner_off, bound(down))
        error = (F.linear(rough_inner, rough_down) - F.linear(inner, down)).abs()
        assert (error <= off + 1e-5).all() and float(error.max()) > 1e-3


def decoders(randomise, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    tensors = randomise(Decoder(dataclasses.replace(CONFIG, mlp=dataclasses.replace(CONFIG.mlp, fp8=False))), 34).state_dict()
    plain = Decoder.from_tensors(
        dataclasses.replace(CONFIG, mlp=dataclasses.replace(CONFIG.mlp, fp8=False)), tensors, dtype=dtype, device="cpu"
    )
    return plain, Decoder.from_tensors(CONFIG, quantised_experts(tensors), dtype=dtype, device="cpu")


def states(decoder: Decoder, x: torch.Tensor) -> torch.Tensor:
    cache = ContiguousAttention(CONFIG, rows=1, capacity=len(x), dtype=x.dtype, device="cpu")
    cache.reset(1)
    return decoder.forward_rows(x[None], cache)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_keeps_codes_and_scales_as_they_are(randomise, dtype: torch.dtype) -> None:
    plain, decoder = decoders(randomise, dtype)
    for name, tensor in decoder.state_dict().items():
        wanted = FP8 if name.endswith(("gate_up_proj", "down_proj")) else torch.float32 if name.endswith("_scale") else dtype
        assert tensor.dtype == wanted, name
        if wanted == dtype and not name.endswith("_scale"):
            assert torch.equal(tensor, plain.state_dict()[name]), name
    assert decoder.state_dict().keys() - plain.state_dict().keys() == {
        f"layers.{layer}.mlp.experts.{name}_scale" for layer in range(CONFIG.layers) for name in ("gate_up_proj", "down_proj")
    }
    x = randn(20, CONFIG.hidden, seed=35).to(dtype)
    with torch.no_grad():
        exact, rough = states(plain, x).float(), states(decoder, x).float()
    apart = float((rough - exact).norm() / exact.norm())
    assert rough.isfinite().all() and 1e-3 < apart < 0.25  # three layers of a mixture that is off by up to 2^-4 a weight


def test_a_decoder_without_its_scales_is_refused(randomise) -> None:
    _, decoder = decoders(randomise, torch.float32)
    tensors = dict(decoder.state_dict())
    del tensors["layers.1.mlp.experts.down_proj_scale"]
    with pytest.raises(CheckpointError, match=r"'layers\.1\.mlp\.experts\.down_proj_scale'"):
        Decoder.from_tensors(CONFIG, tensors, dtype=torch.float32, device="cpu")
