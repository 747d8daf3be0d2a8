"""Attention of packed spans: our Triton kernel, and FlashAttention 3 where it is installed, against torch's; prompts of all kinds by graphs;
and how long each takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from bench.gpu_checks.engine import CUDA, SHAPES, TOLERANCE, CountingProgram, difference, graph_time, small_config
from omni_bus.stages.ar import flash_attention, spans
from omni_bus.stages.ar.attention import DecodeAttention, PagedAttention, Span
from omni_bus.stages.ar.capture import Capture
from omni_bus.stages.ar.decoder import DecoderConfig
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.ar.prompt_graphs import PromptGraphs

BLOCK = 16
KINDS = ((0, 1), (0, 40), (0, 17), (30, 33), (31, 1), (0, 2), (700, 20), (5, 150), (0, 512))  # (kept, new) positions
TIMED = {
    "64": [(0, 64)],
    "256": [(0, 256)],
    "512": [(0, 512)],
    "1024": [(0, 1024)],
    "8 x 64": [(0, 64)] * 8,
    "64 behind 1500": [(1500, 64)],
    "16 behind 1500": [(1500, 16)],
    "512 behind 4096": [(4096, 512)],
}


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, shape in SHAPES.items():
        for dtype in TOLERANCE:
            yield f"spans {name} {str(dtype)[6:]}", functools.partial(parity, shape, dtype)
    yield "prompts by graphs, kept blocks and deepstack", prompts
    yield "pieces of a prompt that are queued before the card gets to them", queued
    for name in ("thinker", "talker"):
        yield f"time of prompts: {name}", functools.partial(prompt_times, SHAPES[name])
        yield f"time of decode rows: {name}", functools.partial(decode_times, SHAPES[name])


def forms(dtype: torch.dtype, head_dim: int) -> dict[str, spans.Attend | None]:
    """None: torch's operators."""
    found: dict[str, spans.Attend | None] = {"torch": None, "triton": spans.kernel("triton")}
    if flash_attention.refusal(CUDA, dtype, head_dim) is None:
        found["flash"] = spans.kernel("flash")
    return found


def layout(wanted: Sequence[tuple[int, int]]) -> list[Span]:
    """Blocks in a random order, none twice."""
    pages = [-(-(start + count) // BLOCK) for start, count in wanted]
    order = (torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    found, begin = [], 0
    for (start, count), size in zip(wanted, pages, strict=True):
        found.append(Span(order[begin : begin + size], start, count))
        begin += size
    return found


def filled(config: DecoderConfig, wanted: Sequence[Span], dtype: torch.dtype, device: torch.device | str) -> KVCache:
    """The same contents for every device, as far as the dtype goes."""
    blocks = sum(len(span.blocks) for span in wanted)
    cache = KVCache(config, blocks=blocks, block_size=BLOCK, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(3)
    for tensor in cache.layer(0):
        values = torch.randn(tensor[BLOCK:].shape, generator=generator)
        tensor[BLOCK:] = values.to(dtype).to(device)
    return cache


def parity(shape: tuple[int, int, int], dtype: torch.dtype) -> str:
    heads, kv_heads, head_dim = shape
    config, worst = small_config(*shape), {}
    for kinds in (KINDS, KINDS[:1], KINDS[1:2], KINDS[3:4], KINDS[6:7] * 20):
        wanted = layout(kinds)
        tokens = sum(span.count for span in wanted)
        packed = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=torch.Generator().manual_seed(4)).to(dtype)
        plain = PagedAttention(config, filled(config, wanted, dtype, "cpu"))
        plain.cache._keys, plain.cache._values = plain.cache._keys.float(), plain.cache._values.float()
        plain.plan(wanted)
        expected = plain.attend(0, *torch.split(packed.float(), [heads, kv_heads, kv_heads], dim=1))
        for name, fused in forms(dtype, head_dim).items():
            paged = PagedAttention(config, filled(config, wanted, dtype, CUDA), fused)
            paged.plan(wanted)
            result = paged.attend(0, *torch.split(packed.to(CUDA), [heads, kv_heads, kv_heads], dim=1))
            error = difference(result.float().cpu(), expected)
            assert error <= TOLERANCE[dtype], f"{name}, {len(wanted)} spans: differs by {error:.2e}"
            worst[name] = max(worst.get(name, 0.0), error)
    return "error " + ", ".join(f"{name} {error:.1e}" for name, error in worst.items())


def prompts() -> str:
    """Float32: a graph that takes all these steps one after another gives what the free form gives, captured layer included."""
    program, figures = CountingProgram(8), []
    decoder, config = program.decoder, program.decoder.config
    steps = [[(0, 10)], [(0, 64)], [(30, 20), (0, 7)], [(45, 3)] * 8, [(0, 30), (60, 1), (17, 30)], [(100, 64)], [(0, 1)]]
    for name in ("triton",):
        attend = spans.kernel(name)
        caches = [KVCache(config, blocks=128, block_size=BLOCK, dtype=torch.float32, device=CUDA, captures=True) for _ in "ab"]
        generator = torch.Generator(CUDA).manual_seed(6)
        for ours, theirs in zip(caches[0].layer(0), caches[1].layer(0), strict=True):
            ours[BLOCK:-BLOCK].normal_(generator=generator)
            theirs.copy_(ours)
        for layer in range(1, config.layers):
            for ours, theirs in zip(caches[0].layer(layer), caches[1].layer(layer), strict=True):
                ours[BLOCK:-BLOCK].normal_(generator=generator)
                theirs.copy_(ours)
        decode = DecodeAttention(config, caches[0], slots=8, max_length=256, kernel=True, filling=64)
        graphs = PromptGraphs(decoder, decode, attend, capture_layer=1, max_tokens=64, max_batch=8, taps=2)
        graphs.prepare(Capture(CUDA, captures=True), lambda fraction, what: None)
        free = PagedAttention(config, caches[1])
        worst = 0.0
        for number, kinds in enumerate(steps * 2):
            wanted = [Span(one.blocks, one.start, one.count, slot) for slot, one in enumerate(layout(kinds), 1)]
            for span in wanted:
                decode.admit(span.slot, span.blocks)
            tokens = sum(span.count for span in wanted)
            embeds = torch.randn(tokens, config.hidden, device=CUDA, generator=generator)
            taps = torch.randn(2, tokens, config.hidden, device=CUDA, generator=generator) if number % 3 == 1 else None
            positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in wanted]).expand(3, -1)
            assert graphs.takes(wanted, taps)
            hidden, captured = graphs.run(embeds, positions, wanted, taps)
            free.plan(wanted)
            other, layer = decoder(embeds, positions.to(CUDA), free, deepstack=taps, capture_layer=1)
            assert captured is not None and layer is not None
            worst = max(worst, difference(hidden, other), difference(captured, layer))
            for ours, theirs in zip(caches[0].layer(2), caches[1].layer(2), strict=True):
                worst = max(worst, difference(ours[BLOCK:-BLOCK], theirs[BLOCK:-BLOCK]))
            assert worst <= 1e-4, f"step {number}: differs by {worst:.2e}"
        figures.append(f"{name} {worst:.1e}")
    return "error " + ", ".join(figures)


def queued() -> str:
    """Pieces without a token behind them are queued without a wait: each is computed with its own numbers, not with a later one's."""
    decoder = CountingProgram(8).decoder
    config, wanted = decoder.config, [Span(layout([(0, 256)])[0].blocks, start, 64, 1) for start in range(0, 256, 64)]
    caches = [KVCache(config, blocks=16, block_size=BLOCK, dtype=torch.float32, device=CUDA) for _ in "ab"]
    for cache in caches:
        for layer in range(config.layers):
            for tensor in cache.layer(layer):
                tensor.zero_()
    decode = DecodeAttention(config, caches[0], slots=1, max_length=256, kernel=True, filling=64)
    graphs = PromptGraphs(decoder, decode, spans.kernel("triton"), capture_layer=None, max_tokens=64, max_batch=1)
    graphs.prepare(Capture(CUDA, captures=True), lambda fraction, what: None)
    decode.admit(1, wanted[0].blocks)
    embeds = torch.randn(256, config.hidden, device=CUDA, generator=torch.Generator(CUDA).manual_seed(7))
    positions = torch.arange(256).expand(3, -1)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles, about half a second: all four pieces are queued behind it
    for span in wanted:
        own = slice(span.start, span.start + span.count)
        graphs.run(embeds[own], positions[:, own], [span])
    free = PagedAttention(config, caches[1])
    free.plan([Span(wanted[0].blocks, 0, 256)])
    decoder(embeds, positions.to(CUDA), free)
    worst = 0.0
    for layer in range(config.layers):
        for ours, theirs in zip(caches[0].layer(layer), caches[1].layer(layer), strict=True):
            worst = max(worst, difference(ours[BLOCK:-BLOCK], theirs[BLOCK:-BLOCK]))
    assert worst <= 1e-4, f"differs by {worst:.2e}"
    return f"error {worst:.1e}"


def prompt_times(shape: tuple[int, int, int]) -> str:
    return "µs a layer, torch / triton / flash: " + ", ".join(
        f"{name}: " + " / ".join(f"{1e6 * one:.0f}" for one in _times(shape, kinds)) for name, kinds in TIMED.items()
    )


def decode_times(shape: tuple[int, int, int]) -> str:
    """Of ours, the decode kernel, which also stores keys and values, and the one for spans."""
    heads, kv_heads, head_dim = shape
    config, figures = small_config(*shape), []
    for rows in (1, 8, 32, 64):
        for length in (512, 4096):
            wanted = layout([(length - 1, 1)] * rows)
            cache = filled(config, wanted, torch.bfloat16, CUDA)
            packed = torch.randn(rows, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16, device=CUDA)
            parts = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
            slots = torch.arange(1, rows + 1, device=CUDA)
            lengths = torch.full((rows,), length, dtype=torch.int32, device=CUDA)
            taken = []
            for fused in ("", *list(forms(torch.bfloat16, head_dim))[1:]):
                attend = spans.kernel(fused) if fused else None
                decode = DecodeAttention(config, cache, slots=rows, max_length=length, kernel=not fused, fused=attend)
                for slot, span in enumerate(wanted, 1):
                    decode.admit(slot, span.blocks)
                decode.begin(slots, lengths)
                taken.append(graph_time(functools.partial(decode.attend, 0, *parts)))
            figures.append(f"{rows}x{length}: " + " / ".join(f"{1e6 * one:.0f}" for one in taken))
    return "µs a layer, decode kernel / spans by triton / flash: " + ", ".join(figures)


def _times(shape: tuple[int, int, int], kinds: Sequence[tuple[int, int]]) -> Iterator[float]:
    heads, kv_heads, head_dim = shape
    config, wanted = small_config(*shape), layout(kinds)
    tokens = sum(span.count for span in wanted)
    cache = filled(config, wanted, torch.bfloat16, CUDA)
    packed = torch.randn(tokens, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16, device=CUDA)
    parts = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
    for fused in forms(torch.bfloat16, head_dim).values():
        paged = PagedAttention(config, cache, fused)
        paged.plan(wanted)
        yield graph_time(functools.partial(paged.attend, 0, *parts))
