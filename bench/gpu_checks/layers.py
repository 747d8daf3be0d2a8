"""The decoder's layers on a GPU: each Triton kernel against its plain form, whole tiny decoders against the CPU, and how fast real
sizes run in a CUDA graph.

Tolerances: float32 2e-5 of the largest value (sums of some thousand products, no TF32); bfloat16 2 % of the largest value (one
rounding is 0.4 %, and a kernel skips some that the plain form makes). Times are medians of graph replays over eight or more distinct
layers, so that no weight is found in the cache; attention itself is left out, it has its own checks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from omni_bus.stages.ar import mlp as mixtures
from omni_bus.stages.ar import ops
from omni_bus.stages.ar.attention import ContiguousAttention
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.mlp import DenseConfig, MoE, MoEConfig
from omni_bus.stages.ar.norm import RMSNorm

THINKER = DecoderConfig(
    hidden=2048,
    layers=8,
    heads=32,
    kv_heads=4,
    head_dim=128,
    mlp=MoEConfig(experts=128, top_k=8, intermediate=768),
    max_positions=4096,
    rope_theta=1e6,
    mrope_section=(24, 20, 20),
    qk_norm=True,
)
TALKER = DecoderConfig(
    hidden=1024,
    layers=20,
    heads=16,
    kv_heads=2,
    head_dim=128,
    mlp=MoEConfig(experts=128, top_k=6, intermediate=384, shared_intermediate=768),
    max_positions=4096,
    rope_theta=1e6,
    mrope_section=(24, 20, 20),
    qk_norm=True,
)
PREDICTOR = DecoderConfig(
    hidden=1024,
    layers=5,
    heads=16,
    kv_heads=8,
    head_dim=128,
    mlp=DenseConfig(intermediate=3072),
    max_positions=16,
    rope_theta=1e6,
    qk_norm=True,
)
TINY = {
    "thinker": DecoderConfig(
        hidden=48,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=MoEConfig(experts=8, top_k=2, intermediate=24),
        max_positions=64,
        mrope_section=(6, 5, 5),
        qk_norm=True,
    ),
    "talker": DecoderConfig(
        hidden=40,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=MoEConfig(experts=6, top_k=3, intermediate=24, norm_topk_prob=False, shared_intermediate=48),
        max_positions=64,
        mrope_section=(6, 5, 5),
        qk_norm=True,
    ),
    "odd shared expert": DecoderConfig(
        hidden=40,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=MoEConfig(experts=6, top_k=3, intermediate=24, norm_topk_prob=False, shared_intermediate=36),
        max_positions=64,
        qk_norm=True,
    ),
    "llama": DecoderConfig(
        hidden=48,
        layers=3,
        heads=6,
        kv_heads=2,
        head_dim=8,
        mlp=DenseConfig(intermediate=96),
        max_positions=64,
        attention_bias=True,
    ),
}


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "small operators equal their plain forms", small_operators
    yield "linear layers of few rows", few_rows
    yield "linear layers of small batches", small_batches
    yield "routing", routing
    for dtype in (torch.float32, torch.bfloat16):
        for name, config in (("thinker", THINKER), ("talker", TALKER)):
            yield f"mixture of the {name}, {dtype}", functools.partial(mixture, config, dtype)
    for name, config in TINY.items():
        yield f"tiny decoder in float32: {name}", functools.partial(tiny_decoder, config)
    for name, config, real in (("thinker", THINKER, 48), ("talker", TALKER, 20), ("code predictor", PREDICTOR, 5)):
        yield f"a decode step with dependent launches and without: {name}", functools.partial(dependent_step, config)
        yield f"time of a decode step: {name}", functools.partial(decode_time, config, real)
    yield "time of a row's linear layers by tile", one_row_tiles
    yield "time of the code predictor's linear layers by batch", small_batch_times
    yield "time of the thinker's prefill, and where grouped products take over", prefill_time
    yield "time of the mixture's two products by tile", tile_times


def close(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest error over the largest value; raises where it is more than the dtype's tolerance."""
    assert ours.shape == plain.shape and ours.dtype == plain.dtype
    assert ours.isfinite().all(), "not finite"
    error = float((ours.float() - plain.float()).abs().max() / plain.float().abs().max().clamp_min(1e-30))
    limit = 2e-5 if ours.dtype == torch.float32 else 2e-2
    assert error <= limit, f"error {error:.2e} of the largest value, more than {limit:.0e}"
    return error


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


@torch.no_grad()
def small_operators() -> str:
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.manual_seed(0)
    worst = {torch.float32: 0.0, torch.bfloat16: 0.0}
    for dtype in worst:
        errors = []
        for rows in (1, 5, 64, 300):
            for hidden in (40, 48, 1024, 2048):
                x, residual, weight = (
                    randn(rows, hidden, dtype=dtype),
                    randn(rows, hidden, dtype=dtype),
                    randn(hidden, dtype=dtype),
                )
                errors.append(close(ops.rms_norm(x, weight, 1e-6), ops.rms_norm_plain(x, weight, 1e-6)))
                ours, plain = ops.add_rms_norm(x, residual, weight, 1e-6), ops.add_rms_norm_plain(x, residual, weight, 1e-6)
                errors += [close(one, other) for one, other in zip(ours, plain, strict=True)]
                both = torch.cat([x, residual], dim=1)
                errors.append(close(ops.silu_mul(both), ops.silu_mul_plain(both)))
            for heads, kv_heads, dim, norm in ((32, 4, 128, True), (16, 2, 128, True), (16, 8, 128, True), (6, 2, 8, False)):
                qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
                angle = torch.rand(rows, 1, dim // 2, device="cuda").repeat(1, 1, 2) * 6.28
                rotary = angle.cos().to(dtype), angle.sin().to(dtype)
                q_weight, k_weight = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if norm else (None, None)
                many = ops.qk_norm_rope(qkv, q_weight, k_weight, rotary, heads=heads, kv_heads=kv_heads, eps=1e-6)
                wanted = ops.qk_norm_rope_plain(qkv, q_weight, k_weight, rotary, heads=heads, kv_heads=kv_heads, eps=1e-6)
                errors += [close(one, other) for one, other in zip(many, wanted, strict=True)]
        worst[dtype] = max(errors)
    return f"largest error: float32 {worst[torch.float32]:.1e}, bfloat16 {worst[torch.bfloat16]:.1e}"


@torch.no_grad()
def few_rows() -> str:
    from omni_bus.stages.ar import triton_linear

    return _linear_layers(triton_linear.linear, (1, 2, 3, 4), normed=True)


@torch.no_grad()
def small_batches() -> str:
    from omni_bus.stages.ar import triton_small_linear

    def ours(x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return triton_small_linear.linear_add(x, weight, bias, residual)

    return _linear_layers(ours, (2, 5, 8, 16, 17, 32, 64), normed=False)


def _linear_layers(ours_of: Callable[..., torch.Tensor], batches: tuple[int, ...], *, normed: bool) -> str:
    """Linear layers of decode steps against float32: with bias and residual and, if `normed`, with norm and gate on the way."""
    torch.manual_seed(4)
    linear = torch.nn.functional.linear
    worst = {torch.float32: 0.0, torch.bfloat16: 0.0}
    for dtype in worst:
        errors = []
        shapes = ((2048, 5120), (4096, 2048), (2048, 128), (1024, 3072), (3072, 1024), (40, 24))
        for (inputs, outputs), rows in itertools.product(shapes, batches):
            x, norm = randn(rows, inputs, dtype=dtype), randn(inputs, dtype=dtype)
            weight = randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
            bias, residual = randn(outputs, dtype=dtype), randn(rows, outputs, dtype=dtype)
            ours = ours_of(x, weight, bias=bias, residual=residual)
            errors.append(close(ours, (linear(x.float(), weight.float(), bias.float()) + residual.float()).to(dtype)))
            if not normed:
                continue
            double = randn(2 * outputs, inputs, dtype=dtype, scale=inputs**-0.5)
            plain = ops.rms_norm_plain(x.float(), norm.float(), 1e-6)
            ours = ours_of(x, weight, norm_weight=norm, eps=1e-6)
            errors.append(close(ours, linear(plain, weight.float()).to(dtype)))
            ours = ours_of(x, double, norm_weight=norm, eps=1e-6, gated=True)
            errors.append(close(ours, ops.silu_mul_plain(linear(plain, double.float())).to(dtype)))
        worst[dtype] = max(errors)
    return f"largest error: float32 {worst[torch.float32]:.1e}, bfloat16 {worst[torch.bfloat16]:.1e}"


@torch.no_grad()
def routing() -> str:
    from omni_bus.stages.ar import triton_moe

    torch.manual_seed(1)
    for experts, top_k, shared, normalise in ((128, 8, 0, True), (128, 6, 2, True), (6, 3, 2, False)):
        for tokens in (1, 2, 7, 64, 700):
            logits = randn(tokens, experts + 8, dtype=torch.float32)
            weights, chosen = triton_moe.route(logits, experts=experts, top_k=top_k, shared=shared, normalise=normalise)
            probs, numbers = torch.topk(logits[:, :experts].softmax(-1), top_k)
            if normalise:
                probs = probs / probs.sum(-1, keepdim=True)
            assert torch.equal(chosen[:, :top_k].long(), numbers), "other experts were chosen"
            close(weights[:, :top_k].contiguous(), probs)
            if shared:
                close(weights[:, top_k:].contiguous(), logits[:, experts, None].sigmoid().expand(-1, shared))
            groups = experts + shared
            for block_m in (16, 32, 64):
                pairs, numbers = triton_moe.align(chosen, groups=groups, block_m=block_m)
                used = pairs[numbers >= 0]
                real = used < chosen.numel()
                own = numbers[numbers >= 0, None].expand_as(used)[real]
                assert torch.equal(used[real].sort().values, torch.arange(chosen.numel(), device="cuda", dtype=torch.int32))
                assert torch.equal(chosen.view(-1)[used[real].long()], own), "a pair is in another expert's block"
    return "experts, weights and blocks as torch.topk and a sort give them"


def make_moe(config: DecoderConfig, dtype: torch.dtype) -> tuple[MoE, MoEConfig, RMSNorm]:
    assert isinstance(config.mlp, MoEConfig)
    with torch.device("meta"):
        module = MoE(config.hidden, config.mlp)
    values = {name: randn(*one.shape, dtype=dtype, scale=one.shape[-1] ** -0.5) for name, one in module.state_dict().items()}
    module.load_state_dict(values, assign=True)
    module.requires_grad_(False).pack()
    norm = RMSNorm(config.hidden, 1e-6).to("cuda", dtype).requires_grad_(False)
    norm.weight.copy_(randn(config.hidden, dtype=dtype))
    return module, config.mlp, norm


@torch.no_grad()
def mixture(config: DecoderConfig, dtype: torch.dtype) -> str:
    """The kernels, and the grouped products, against float32 sums over the experts that the kernels chose."""
    from omni_bus.stages.ar import triton_moe

    torch.manual_seed(2)
    module, moe, norm = make_moe(config, dtype)
    packed = module._packed
    assert packed is not None
    errors, grouped = [], []
    for tokens in (1, 2, 3, 8, 17, 64, 100, 300, 600):
        x, residual = randn(tokens, config.hidden, dtype=dtype), randn(tokens, config.hidden, dtype=dtype)
        logits = torch.nn.functional.linear(x, packed.router)
        weights, chosen = triton_moe.route(
            logits, experts=moe.experts, top_k=moe.top_k, shared=packed.shared, normalise=moe.norm_topk_prob
        )
        plain = torch.zeros(tokens, config.hidden, device="cuda")
        for number in range(len(packed.down)):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            gate, up = (x[row].float() @ packed.gate_up[number].float().T).chunk(2, dim=-1)
            part = (torch.nn.functional.silu(gate) * up) @ packed.down[number].float().T
            plain.index_add_(0, row, part * weights[row, slot, None].float())
        parts = triton_moe.experts(x, chosen, packed.gate_up, packed.down)
        errors.append(close(triton_moe.combine(parts, weights)[0], plain.to(dtype)))
        ours = triton_moe.combine(parts, weights, residual=residual, norm_weight=norm.weight, eps=norm.eps)
        wanted = ops.add_rms_norm_plain(plain.to(dtype), residual, norm.weight, norm.eps)
        errors += [close(one, other) for one, other in zip(ours, wanted, strict=True)]
        if tokens <= 64:
            gates = (packed.gate_up * norm.weight, packed.down)
            root = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.eps)).to(dtype)
            wanted_sum = x + triton_moe.combine(triton_moe.experts(root, chosen, *gates), weights)[0]
            ours_sum = triton_moe.experts_sum(
                x, weights, chosen, packed.gate_up, packed.down, norm_weight=norm.weight, eps=norm.eps
            )
            errors.append(close(ours_sum, wanted_sum))
        if dtype == torch.bfloat16:
            many, place = mixtures.grouped_experts(x, chosen, packed.gate_up, packed.down, "auto")
            grouped.append(close(triton_moe.combine(many, weights, place=place)[0], plain.to(dtype)))
    return f"1 to 600 tokens: largest error {max(errors):.1e}" + (f", grouped {max(grouped):.1e}" if grouped else "")


def make_decoder(config: DecoderConfig, dtype: torch.dtype, device: str) -> Decoder:
    with torch.device("meta"):
        wanted = Decoder(config).state_dict()
    generator = torch.Generator(device).manual_seed(3)
    tensors = {}
    for name, one in wanted.items():
        noise = torch.randn(one.shape, generator=generator, device=device, dtype=dtype)
        tensors[name] = 1 + 0.3 * noise if one.dim() == 1 else noise.mul_(one.shape[-1] ** -0.5)
    return Decoder.from_tensors(config, tensors, dtype=dtype, device=device)


@torch.no_grad()
def tiny_decoder(config: DecoderConfig) -> str:
    """The same weights on the CPU and on the GPU, by kernels and plainly, for one, a few and many rows."""
    here = make_decoder(config, torch.float32, "cpu")
    there = Decoder.from_tensors(config, dict(here.state_dict()), dtype=torch.float32, device="cuda")
    errors = []
    for rows, count in ((1, 1), (2, 1), (7, 1), (20, 1), (3, 5), (1, 40)):
        x = torch.randn(rows * count, config.hidden, generator=torch.Generator().manual_seed(rows))
        positions = torch.stack([torch.arange(rows * count), torch.arange(rows * count) * 2, torch.arange(rows * count) + 3])
        deepstack = torch.randn(2, rows * count, config.hidden, generator=torch.Generator().manual_seed(count))
        results = []
        for decoder, kernels in ((here, "auto"), (there, "auto"), (there, "torch")):
            device = "cpu" if decoder is here else "cuda"
            decoder.kernels = "torch" if kernels == "torch" else "auto"
            cache = ContiguousAttention(config, rows=rows, capacity=count, dtype=torch.float32, device=device)
            cache.reset(rows)
            cache.extend(count)
            hidden, captured = decoder(
                x.to(device), positions.to(device), cache, deepstack=deepstack.to(device), capture_layer=config.layers - 1
            )
            assert captured is not None
            results.append((hidden.cpu(), captured.cpu()))
        there.kernels = "auto"
        for other in results[1:]:
            errors += [close(one, wanted) for one, wanted in zip(other, results[0], strict=True)]
    return f"largest error against the CPU {max(errors):.1e}"


class NoAttention:
    """In place of attention, which is not what is timed here."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query


@contextlib.contextmanager
def dependent_launches(on: bool) -> Iterator[None]:
    """Whether kernels that are launched, or captured, here may start before the one in front of them has ended."""
    from omni_bus.stages.ar import dependent_launch

    before, dependent_launch.enabled = dependent_launch.enabled, on
    try:
        yield
    finally:
        dependent_launch.enabled = before


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def graph_ms(step: Callable[[], object], replays: int = 15) -> float:
    """The median time of a replay of `step`, captured once."""
    return replay_ms(captured(step).replay, replays)


REPLAYS = 256
NO_ROWS = range(0)  # of ops.SMALL_ROWS: none goes by that kernel


@torch.no_grad()
def dependent_step(config: DecoderConfig) -> str:
    """Replay after replay on other inputs, without a pause between them: the same bits whether kernels start early or not. A kernel
    that read too early, or wrote what another still read, would show here."""
    decoder = make_decoder(config, torch.bfloat16, "cuda")
    for rows in (1, 2, 4, 8, 64):
        many = randn(REPLAYS, rows, config.hidden)
        x = torch.empty(rows, config.hidden, dtype=torch.bfloat16, device="cuda")
        positions = torch.arange(rows, device="cuda").expand(3, -1)
        results = []
        for on in (True, False):
            out = torch.empty_like(x)

            def step(x: torch.Tensor = x, out: torch.Tensor = out, positions: torch.Tensor = positions) -> None:
                out.copy_(decoder(x, positions, NoAttention())[0])

            with dependent_launches(on):
                graph = captured(step)
            collected = torch.empty_like(many)
            for index in range(REPLAYS):
                x.copy_(many[index])
                graph.replay()
                collected[index].copy_(out)
            torch.cuda.synchronize()
            results.append(collected)
        wrong = int((results[0] != results[1]).flatten(1).any(1).sum())
        assert results[0].isfinite().all(), f"{rows} rows: not finite"
        assert not wrong, f"{rows} rows: {wrong} of {REPLAYS} replays differ"
    return f"1, 2, 4, 8 and 64 rows, {REPLAYS} replays each: equal"


def replay_ms(step: Callable[[], object], replays: int = 15) -> float:
    times: list[float] = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def layer_bytes(config: DecoderConfig, tokens: int) -> float:
    """Weights of a layer that `tokens` tokens with random choices are expected to touch, in bytes of bfloat16."""
    attention = config.hidden * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    if isinstance(config.mlp, DenseConfig):
        return 2.0 * (attention + 3 * config.hidden * config.mlp.intermediate)
    moe = config.mlp
    touched = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** tokens)
    inner = touched * moe.intermediate + moe.shared_intermediate
    return 2.0 * (attention + 3 * config.hidden * inner + config.hidden * moe.experts)


@torch.no_grad()
def decode_time(config: DecoderConfig, real_layers: int) -> str:
    decoder = make_decoder(config, torch.bfloat16, "cuda")
    words = []
    for rows in (1, 2, 4, 8, 16, 32, 64):
        x = randn(rows, config.hidden)
        positions = torch.arange(rows, device="cuda").expand(3, -1)
        times = []
        for on in (False, True):
            with dependent_launches(on):
                times.append(graph_ms(functools.partial(decoder, x, positions, NoAttention())) / config.layers)
        plain, each = times
        ordinary = ""
        if rows <= ops.STEP_ROWS:
            most = ops.STEP_ROWS, ops.FEW_ROWS, ops.SMALL_ROWS
            ops.STEP_ROWS, ops.FEW_ROWS, ops.SMALL_ROWS = 0, 0, NO_ROWS
            try:
                other = graph_ms(functools.partial(decoder, x, positions, NoAttention())) / config.layers
            finally:
                ops.STEP_ROWS, ops.FEW_ROWS, ops.SMALL_ROWS = most
            ordinary = f", {other * 1e3:.1f} with ordinary products"
        rate = layer_bytes(config, rows) / each / 1e9
        print(
            f"{rows:>3} rows: {each * 1e3:.1f} us a layer ({plain * 1e3:.1f} with no kernel started early{ordinary}), "
            f"{each * real_layers:.2f} ms for {real_layers} layers, "
            f"{rate:.2f} TB/s of weights"
        )
        words.append(f"{rows}: {each * real_layers:.2f} ({plain * real_layers:.2f}) ms, {rate:.1f} TB/s")
    return f"{real_layers} layers; " + "; ".join(words)


@torch.no_grad()
def prefill_time() -> str:
    decoder = make_decoder(THINKER, torch.bfloat16, "cuda")
    bound = mixtures.GROUPED_ABOVE
    words = []
    try:
        for tokens in (64, 96, 128, 256, 512, 1024, 2048):
            x = randn(tokens, THINKER.hidden)
            step = functools.partial(decoder, x, torch.arange(tokens, device="cuda").expand(3, -1), NoAttention())
            times = []
            for mixtures.GROUPED_ABOVE in (1 << 30, 0):
                times.append(graph_ms(step, 7) / THINKER.layers * 48)
            mixtures.GROUPED_ABOVE = bound
            step()
            eager = replay_ms(step, 5) / THINKER.layers * 48
            print(
                f"{tokens:>5} tokens, 48 layers: kernels {times[0]:.1f} ms, grouped {times[1]:.1f} ms, not captured {eager:.1f} ms"
            )
            words.append(f"{tokens}: {times[0]:.1f}/{times[1]:.1f}/{eager:.1f}")
    finally:
        mixtures.GROUPED_ABOVE = bound
    return "ms for 48 layers, kernels/grouped/not captured; " + "; ".join(words)


@torch.no_grad()
def one_row_tiles() -> str:
    """A decoder of one row with every tile in a list for one of its linear layers: what triton_linear.tile_of should choose."""
    from omni_bus.stages.ar import triton_linear
    from omni_bus.stages.ar.triton_linear import Tile

    choice = triton_linear.tile_of
    tiles = [Tile(4, 1, 16), Tile(4, 2, 16), Tile(4, 1, 4), Tile(4, 2, 4), Tile(4, 1, 0), Tile(2, 1, 16), Tile(2, 2, 16)]
    tiles += [Tile(8, 1, 16), Tile(1, 2, 16)]
    words = []
    try:
        for name, config in (("predictor", PREDICTOR), ("talker", TALKER)):
            decoder = make_decoder(config, torch.bfloat16, "cuda")
            x, positions = randn(1, config.hidden), torch.zeros(3, 1, dtype=torch.int64, device="cuda")
            step = functools.partial(decoder, x, positions, NoAttention())
            shapes: list[Any] = []

            def noted(*shape: Any, shapes: list[Any] = shapes) -> Tile:
                shapes.append(shape)
                return choice(*shape)

            triton_linear.tile_of = noted
            step()
            for wanted in dict.fromkeys(shapes):
                table = {}
                for tile in tiles:
                    triton_linear.tile_of = lambda *shape, tile=tile, wanted=wanted: tile if shape == wanted else choice(*shape)
                    table[tile] = graph_ms(step, 9) / config.layers * 1e3
                chosen = choice(*wanted)
                ranked = sorted((us, str(tile)[4:]) for tile, us in table.items())
                for us, label in ranked:
                    print(f"{name} {wanted} {label}: {us:.2f} us a layer")
                triton_linear.tile_of = choice
                now = graph_ms(step, 9) / config.layers * 1e3
                words.append(f"{name} {wanted} {ranked[0][1]} {ranked[0][0]:.1f} us, now {str(chosen)[4:]} {now:.1f}")
    finally:
        triton_linear.tile_of = choice
    return "; ".join(words)


@torch.no_grad()
def small_batch_times() -> str:
    """Each kind of layer of the code predictor as ordinary products with what stands beside them, by the kernel for few rows and by that
    for small batches: what ops.FEW_ROWS and ops.SMALL_ROWS should be."""
    words = []
    bounds = {"ordinary": (0, NO_ROWS), "few": (4, NO_ROWS), "small": (0, range(1, 65))}
    before = ops.FEW_ROWS, ops.SMALL_ROWS
    try:
        for inputs, outputs, gated in ((1024, 4096, False), (1024, 3072, True), (2048, 1024, False), (3072, 1024, False)):
            weights = [randn(outputs * (2 if gated else 1), inputs, scale=inputs**-0.5) for _ in range(12)]
            norm = randn(inputs)
            for rows in (1, 2, 4, 8, 16, 32, 64):
                x, residual = randn(rows, inputs), randn(rows, outputs)
                if outputs > 1024:
                    each = [functools.partial(ops.norm_linear, x, norm, 1e-6, weight, gated=gated) for weight in weights]
                else:
                    each = [functools.partial(ops.linear_add, x, weight, None, residual) for weight in weights]

                times = {}
                for name, (ops.FEW_ROWS, ops.SMALL_ROWS) in bounds.items():
                    if name == "ordinary" or (rows <= 4 if name == "few" else outputs == 1024):
                        times[name] = graph_ms(functools.partial(run_all, each)) / len(each) * 1e3
                said = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
                print(f"{inputs} to {outputs}{' gated' if gated else ''}, {rows} rows: {said} us")
                words.append(f"{inputs}-{outputs} {rows}: {min(times, key=lambda name: times[name])}")
    finally:
        ops.FEW_ROWS, ops.SMALL_ROWS = before
    return "; ".join(words)


@torch.no_grad()
def tile_times() -> str:
    """Every tile in a list, at the batches of decoding and of a short prompt: what triton_moe.tiles should choose."""
    from omni_bus.stages.ar import triton_moe
    from omni_bus.stages.ar.triton_moe import Tiles

    choice = triton_moe.tiles
    first = [Tiles(16, 256, 4, 4), Tiles(32, 128, 4, 3), Tiles(32, 128, 4, 4), Tiles(32, 256, 4, 3), Tiles(64, 64, 4, 5)]
    first += [Tiles(64, 128, 4, 3), Tiles(64, 128, 8, 3)]
    second = [Tiles(32, 256, 4, 3), Tiles(64, 64, 4, 5), Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 4), Tiles(64, 256, 4, 3)]
    second += [Tiles(128, 64, 4, 4), Tiles(128, 128, 8, 3)]
    words = []
    try:
        for name, config in (("thinker", THINKER), ("talker", TALKER)):
            packed = [one for one in (make_moe(config, torch.bfloat16)[0]._packed for _ in range(4)) if one is not None]
            assert isinstance(config.mlp, MoEConfig)

            def all_layers(x: torch.Tensor, chosen: torch.Tensor, packed: Sequence[mixtures._Packed] = tuple(packed)) -> None:
                for one in packed:
                    triton_moe.experts(x, chosen, one.gate_up, one.down)

            for tokens in (4, 16, 64, 128):
                x = randn(tokens, config.hidden)
                chosen = torch.rand(tokens, config.mlp.experts, device="cuda").topk(config.mlp.top_k).indices.int()
                table: dict[str, float] = {}
                for label, one, two in [(f"up {t}", t, second[3]) for t in first] + [
                    (f"down {t}", first[2], t) for t in second
                ]:
                    triton_moe.tiles = lambda *_, one=one, two=two: (16, one, two)
                    table[label] = graph_ms(functools.partial(all_layers, x, chosen), 9) / len(packed)
                for part in ("up", "down"):
                    ranked = sorted((ms, label) for label, ms in table.items() if label.startswith(part))
                    for ms, label in ranked:
                        print(f"{name} {tokens:>3} tokens {label}: {ms * 1e3:.1f} us")
                    words.append(f"{name} {tokens} {ranked[0][1].replace('Tiles', '')} {ranked[0][0] * 1e3:.0f} us")
    finally:
        triton_moe.tiles = choice
    return "; ".join(words)
