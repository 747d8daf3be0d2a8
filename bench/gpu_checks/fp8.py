"""Experts in FP8 on a GPU: quantised there and on the CPU alike, kernels against plain forms, and times beside bfloat16.

Tolerances are those of layers.py: what the weights lose is in both sides of every comparison. With Triton's interpreter
(TRITON_INTERPRET=1) `kernels` runs on a CPU, in float32 and float16; the interpreter has no products of bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from bench.gpu_checks.layers import THINKER, TINY, NoAttention, close, graph_ms, make_decoder
from bench.gpu_checks.loading import directory
from omni_bus.stages.ar.attention import ContiguousAttention
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.fp8 import dequantise, quantise, quantised_experts
from omni_bus.stages.ar.mlp import MoE, MoEConfig
from omni_bus.stages.ar.norm import RMSNorm
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.random_weights import RandomCheckpoint

REAL_LAYERS = 48
SMALL = MoEConfig(experts=8, top_k=2, intermediate=80)


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "quantised on the card as on the CPU", quantising
    yield "tiny checkpoint, quantised on its way to the card", loading
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(THINKER.mlp, MoEConfig)
        yield f"kernels, small and odd, {dtype}", functools.partial(kernels, 120, SMALL, dtype, (1, 2, 3, 8, 17, 64))
        many = (1, 2, 3, 8, 17, 64, 100, 300, 600)
        yield f"kernels, thinker, {dtype}", functools.partial(kernels, THINKER.hidden, THINKER.mlp, dtype, many)
    yield "mixture by kernels against torch alone, bfloat16", forms
    for name in ("thinker", "talker"):
        yield f"tiny decoder in float32: {name}", functools.partial(tiny_decoder, TINY[name])
    yield "time of a decode step and of a short prompt, beside bfloat16", times
    yield "time of the two products by tile", tile_times


def quantising() -> str:
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(512, 2048, generator=generator)
    for weight in (plain, plain**5, plain.bfloat16(), plain * 1e-41, torch.zeros(4, 8)):
        for ours, expected in zip(quantise(weight.cuda()), quantise(weight), strict=True):
            assert torch.equal(ours.cpu().float(), expected.float())
        codes, scales = quantise(weight.cuda())
        for dtype in (torch.float32, torch.bfloat16):
            back = dequantise(codes, scales, dtype)
            assert torch.equal(back.cpu(), dequantise(codes.cpu(), scales.cpu(), dtype))
    return "codes, scales and weights are equal bit for bit"


def loading() -> str:
    with directory("tiny", weights=True) as path:
        read, sent = (Checkpoint(path, fp8=True).tensors("thinker.", dtype=torch.bfloat16, device=at) for at in ("cpu", "cuda"))
        made = RandomCheckpoint(path, fp8=True).tensors("thinker.", dtype=torch.bfloat16, device="cuda")
        assert read.keys() == sent.keys() == made.keys()
        for name, tensor in sent.items():
            assert tensor.is_cuda and tensor.dtype == read[name].dtype == made[name].dtype
            assert torch.equal(tensor.cpu().float(), read[name].float()), name
    return f"{len(read)} tensors, bit for bit"


@torch.no_grad()
def kernels(hidden: int, moe: MoEConfig, dtype: torch.dtype, counts: Sequence[int], device: str = "cuda") -> str:
    """Each product, and the whole step form, against float32 sums with the weights that FP8 leaves."""
    from omni_bus.stages.ar import triton_moe

    generator = torch.Generator(device).manual_seed(2)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device) * scale

    (gate_up, gate_up_scale), (down, down_scale) = (
        quantise(randn(moe.experts, *shape, scale=shape[-1] ** -0.5))
        for shape in ((2 * moe.intermediate, hidden), (hidden, moe.intermediate))
    )
    norm, scales = (1 + 0.3 * randn(hidden)).to(dtype), (gate_up_scale, down_scale)
    errors = []
    for tokens in counts:
        x = randn(tokens, hidden).to(dtype)
        weights, chosen = randn(tokens, moe.experts).softmax(-1).topk(moe.top_k)
        chosen = chosen.int()
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.float()
        parts, normed_parts = (torch.zeros(tokens, moe.top_k, hidden, device=device) for _ in range(2))
        for number in range(moe.experts):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            first = dequantise(gate_up[number], gate_up_scale[number], torch.float32)
            second = dequantise(down[number], down_scale[number], torch.float32)
            for source, out in ((wide, parts), (normed, normed_parts)):
                gate, up = (source[row] @ first.T).chunk(2, dim=-1)
                out[row, slot] = (torch.nn.functional.silu(gate) * up) @ second.T
        ours = triton_moe.experts(x, chosen, gate_up, down, scales=scales)
        errors.append(close(ours, parts.view(-1, hidden).to(dtype)))
        shares = weights.to(dtype)
        total = wide + (normed_parts * shares.float()[..., None]).sum(1)
        whole = triton_moe.experts_sum(x, shares, chosen, gate_up, down, scales=scales, norm_weight=norm, eps=1e-6)
        errors.append(close(whole, total.to(dtype)))
    return f"{counts[0]} to {counts[-1]} tokens: largest error {max(errors):.1e}"


@torch.no_grad()
def forms() -> str:
    """One module, by the kernels and by torch alone with all weights brought back."""
    assert isinstance(THINKER.mlp, MoEConfig)
    with torch.device("cuda"):
        torch.manual_seed(3)
        plain = MoE(THINKER.hidden, THINKER.mlp).bfloat16().requires_grad_(False)
        for parameter in plain.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        norm = RMSNorm(THINKER.hidden, 1e-6).bfloat16().requires_grad_(False)
    with torch.device("meta"):
        module = MoE(THINKER.hidden, dataclasses.replace(THINKER.mlp, fp8=True))
    module.load_state_dict(quantised_experts(plain.state_dict()), assign=True)
    module.requires_grad_(False).pack()
    errors = []
    for tokens in (1, 2, 7, 64, 600):
        x, residual = (torch.randn(tokens, THINKER.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        ours, plainly = (module.add_norm(x, residual, norm, kernels) for kernels in ("auto", "torch"))
        # A score that differs by a rounding may choose another expert: such a token is left out, and there are few.
        near = (ours[1].float() - plainly[1].float()).norm(dim=-1) < 0.05 * plainly[1].float().norm(dim=-1)
        assert near.float().mean() > 0.95 or tokens < 20
        errors += [close(one[near], other[near]) for one, other in zip(ours, plainly, strict=True) if near.any()]
        stepped = module.step(residual, norm, "auto")
        assert stepped.isfinite().all()
    return f"largest error {max(errors):.1e}"


@torch.no_grad()
def tiny_decoder(config: DecoderConfig) -> str:
    """The same codes on the CPU and on the GPU, by kernels and plainly, for one, a few and many rows."""
    assert isinstance(config.mlp, MoEConfig)
    plain = make_decoder(config, torch.float32, "cpu")
    tensors = quantised_experts(plain.state_dict())
    config = dataclasses.replace(config, mlp=dataclasses.replace(config.mlp, fp8=True))
    here, there = (Decoder.from_tensors(config, tensors, dtype=torch.float32, device=device) for device in ("cpu", "cuda"))
    errors = []
    for rows, count in ((1, 1), (2, 1), (7, 1), (20, 1), (3, 5), (1, 40), (1, 70)):
        if count > config.max_positions:
            continue
        x = torch.randn(rows, count, config.hidden, generator=torch.Generator().manual_seed(rows))
        results = []
        for decoder, kernels in ((here, "auto"), (there, "auto"), (there, "torch")):
            device = "cpu" if decoder is here else "cuda"
            decoder.kernels = "torch" if kernels == "torch" else "auto"
            cache = ContiguousAttention(config, rows=rows, capacity=count, dtype=torch.float32, device=device)
            cache.reset(rows)
            results.append(decoder.forward_rows(x.to(device), cache).cpu())
        errors += [close(other, results[0]) for other in results[1:]]
    return f"largest error against the CPU {max(errors):.1e}"


@torch.no_grad()
def times() -> str:
    """All but attention, of eight distinct layers in one graph, told for all layers of the real model."""
    words = []
    taken: dict[str, dict[int, float]] = {}
    for label in ("bf16", "fp8"):
        decoder = make_decoder(THINKER, torch.bfloat16, "cuda")
        if label == "fp8":
            assert isinstance(THINKER.mlp, MoEConfig)
            config = dataclasses.replace(THINKER, mlp=dataclasses.replace(THINKER.mlp, fp8=True))
            tensors = quantised_experts(decoder.state_dict())
            del decoder
            decoder = Decoder.from_tensors(config, tensors, dtype=torch.bfloat16, device="cuda")
            del tensors
        taken[label] = {}
        for tokens in (1, 2, 4, 16, 64, 128, 512):
            x = torch.randn(tokens, THINKER.hidden, device="cuda", dtype=torch.bfloat16)
            step = functools.partial(decoder, x, torch.arange(tokens, device="cuda").expand(3, -1), NoAttention())
            taken[label][tokens] = graph_ms(step) / THINKER.layers * REAL_LAYERS
        del decoder
        torch.cuda.empty_cache()
    for tokens, plain in taken["bf16"].items():
        fp8 = taken["fp8"][tokens]
        print(
            f"{tokens:>4} rows, or a prompt of as many tokens: bf16 {plain:.2f} ms, fp8 {fp8:.2f} ms, {plain / fp8:.2f} times as fast"
        )
        words.append(f"{tokens}: {plain:.2f}/{fp8:.2f}")
    return f"ms for {REAL_LAYERS} layers, rows or prompt tokens: bf16/fp8; " + "; ".join(words)


@torch.no_grad()
def tile_times() -> str:
    """As layers.py does it for bfloat16: what triton_moe.tiles should choose for FP8."""
    from omni_bus.stages.ar import triton_moe
    from omni_bus.stages.ar.triton_moe import Tiles

    assert isinstance(THINKER.mlp, MoEConfig)
    moe, choice = THINKER.mlp, triton_moe.tiles
    generator = torch.Generator("cuda").manual_seed(4)

    def matrices(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise(torch.randn(moe.experts, *shape, generator=generator, device="cuda") * shape[-1] ** -0.5)

    layers = [(matrices(2 * moe.intermediate, THINKER.hidden), matrices(THINKER.hidden, moe.intermediate)) for _ in range(6)]
    first = [Tiles(32, 128, 4, 4), Tiles(32, 256, 4, 3), Tiles(32, 256, 4, 4), Tiles(64, 128, 4, 4), Tiles(64, 128, 8, 4)]
    second = [Tiles(64, 128, 4, 4), Tiles(64, 256, 4, 3), Tiles(32, 256, 4, 4), Tiles(128, 128, 4, 4), Tiles(128, 128, 8, 4)]
    words = []
    try:
        for tokens in (4, 16, 64, 128):
            x = torch.randn(tokens, THINKER.hidden, device="cuda", dtype=torch.bfloat16)
            chosen = torch.rand(tokens, moe.experts, device="cuda").topk(moe.top_k).indices.int()

            def step(x: torch.Tensor = x, chosen: torch.Tensor = chosen) -> None:
                for (gate_up, up_scale), (down, down_scale) in layers:
                    triton_moe.experts(x, chosen, gate_up, down, scales=(up_scale, down_scale))

            table: dict[str, float] = {}
            for block_m in (16, 32) if tokens >= 64 else (16,):
                tried = [(f"up {block_m} {t}", t, second[0]) for t in first]
                tried += [(f"down {block_m} {t}", first[0], t) for t in second]
                for label, one, two in tried:
                    triton_moe.tiles = lambda *_, block_m=block_m, one=one, two=two: (block_m, one, two)
                    table[label] = graph_ms(step, 9) / len(layers)
            for part in ("up", "down"):
                ranked = sorted((ms, label) for label, ms in table.items() if label.startswith(part))
                for ms, label in ranked:
                    print(f"{tokens:>3} tokens {label}: {ms * 1e3:.1f} us")
                words.append(f"{tokens} {ranked[0][1].replace('Tiles', '')} {ranked[0][0] * 1e3:.0f} us")
    finally:
        triton_moe.tiles = choice
    return "; ".join(words)
