"""The forms that a GPU runs, in torch on the CPU: joined weights and the mixture without a word to the host equal the plain modules."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from omni_bus.stages.ar import ops
from omni_bus.stages.ar.attention import ContiguousAttention
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.mlp import DenseConfig, MoE, MoEConfig, moe_plain

LLAMA = DecoderConfig(
    hidden=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=8,
    mlp=DenseConfig(intermediate=96),
    max_positions=64,
    attention_bias=True,
)
TALKER = DecoderConfig(
    hidden=40,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp=MoEConfig(experts=6, top_k=3, intermediate=24, norm_topk_prob=False, shared_intermediate=48),
    max_positions=64,
    mrope_section=(6, 5, 5),
    qk_norm=True,
)
ODD = dataclasses.replace(
    TALKER, mlp=MoEConfig(experts=6, top_k=3, intermediate=24, norm_topk_prob=True, shared_intermediate=36)
)


def close(ours: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(ours, plain, atol=3e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def make_decoder(randomise):
    def make(config: DecoderConfig) -> Decoder:
        decoder = randomise(Decoder(config), 21)
        return Decoder.from_tensors(config, dict(decoder.state_dict()), dtype=torch.float32, device="cpu")

    return make


@pytest.mark.parametrize(
    "config", [LLAMA, TALKER, ODD], ids=["dense with biases", "shared expert cut up", "shared expert apart"]
)
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (3, 7), (5, 16)])
def test_a_packed_decoder_equals_the_plain_one_and_keeps_its_tensors(make_decoder, config, rows, count):
    plain, packed = make_decoder(config), make_decoder(config)
    packed.pack()
    assert plain.state_dict().keys() == packed.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, packed.state_dict()[name]), name
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows * count, config.hidden, generator=generator)
    taps = torch.randn(2, rows * count, config.hidden, generator=generator)
    positions = torch.stack([torch.arange(rows * count), torch.arange(rows * count) * 2, torch.arange(rows * count) + 3])
    results = []
    for decoder in (plain, packed):
        cache = ContiguousAttention(config, rows=rows, capacity=count, dtype=torch.float32, device="cpu")
        cache.reset(rows)
        cache.extend(count)
        results.append(decoder(x, positions, cache, deepstack=taps, capture_layer=2))
    close(results[1][0], results[0][0])
    close(results[1][1], results[0][1])


def test_packing_shares_memory_with_the_parameters(make_decoder):
    decoder = make_decoder(TALKER)
    decoder.pack()
    layer = decoder.layers[0]
    for parameter, joined in (
        (layer.self_attn.v_proj.weight, layer.self_attn._qkv),
        (layer.mlp.experts.gate_up_proj, layer.mlp._packed.gate_up),
        (layer.mlp.experts.down_proj, layer.mlp._packed.down),
    ):
        assert parameter.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()


@pytest.mark.parametrize("tokens", [1, 5, 64, 65])
def test_the_mixture_without_the_host_equals_each_expert_in_turn(randomise, tokens):
    for config in (TALKER.mlp, ODD.mlp, MoEConfig(experts=16, top_k=4, intermediate=32)):
        module = randomise(MoE(40, config), 22)
        x = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(tokens))
        plain = module(x)
        module.pack()
        close(moe_plain(x, module, module._packed), plain)


def test_router_rows_behind_the_experts_are_the_shared_gate_and_padding(randomise):
    module = randomise(MoE(40, TALKER.mlp), 23)
    module.pack()
    router = module._packed.router
    assert len(router) == 8 and torch.equal(router[6:7], module.shared_expert_gate.weight) and not router[7].any()


def test_plain_operators_are_their_formulas():
    generator = torch.Generator().manual_seed(24)
    x, residual, weight = (torch.randn(*shape, generator=generator) for shape in ((5, 16), (5, 16), (16,)))
    normal, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normal, F.rms_norm(x + residual, (16,), weight, 1e-5))
    close(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x, (16,), weight, 1e-5))
    close(ops.silu_mul(torch.cat([x, residual], dim=1)), x * torch.sigmoid(x) * residual)
    qkv, q_weight, k_weight = (torch.randn(*shape, generator=generator) for shape in ((5, 32), (4,), (4,)))
    angle = torch.rand(5, 1, 2, generator=generator).repeat(1, 1, 2)
    query, key, value = ops.qk_norm_rope(qkv, q_weight, k_weight, (angle.cos(), angle.sin()), heads=4, kv_heads=2, eps=1e-5)
    for out, begin, gain in ((query, 0, q_weight), (key, 16, k_weight)):
        heads = F.rms_norm(qkv[:, begin : begin + 4 * out.shape[1]].view(5, -1, 4), (4,), gain, 1e-5)
        turned = torch.view_as_complex(heads.view(5, -1, 2, 2).transpose(2, 3).contiguous()) * torch.exp(1j * angle[..., :2])
        close(out, torch.view_as_real(turned).transpose(2, 3).reshape(out.shape))
    assert torch.equal(value, qkv[:, 24:].view(5, 2, 4))
