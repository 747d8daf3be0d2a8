# mypy: allow-untyped-decorators, allow-untyped-calls
"""device_sampler.sample in one Triton kernel: one program a row, the row in registers, thresholds by search instead of a sort.

Imports triton: only reached on a GPU. A score's bits, mapped to integers of the same order, are searched for the lowest score that
top_k, then top_p leave in: at most 16 turns of sums over the row each, mostly a few, where a sort of 4,096 scores takes 78 exchanges.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_bus.stages.ar import dependent_launch
from omni_bus.stages.ar.dependent_launch import let_next_start, wait_for_earlier


@triton.jit
def _add_each(a, b, c, x, y, z):  # type: ignore[no-untyped-def]  # triton reads annotations as code
    return a + x, b + y, c + z


@triton.jit
def threshold(key, weight, bound, low, high):  # type: ignore[no-untyped-def]
    """The lowest key t from `low` to `high` for which the weight above t is less than `bound`: three sums at once, each turn a quarter.
    Nothing lies above `high`."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        span = high - low
        first = low + (span >> 2)
        second = low + (span >> 1)
        third = low + ((3 * span) >> 2)
        above_first, above_second, above_third = tl.reduce(
            (
                tl.where(key > first.to(tl.int32), weight, 0.0),
                tl.where(key > second.to(tl.int32), weight, 0.0),
                tl.where(key > third.to(tl.int32), weight, 0.0),
            ),
            0,
            _add_each,
        )
        in_first = above_first < bound
        in_second = above_second < bound
        in_third = above_third < bound
        high = tl.where(in_first, first, tl.where(in_second, second, tl.where(in_third, third, high)))
        low = tl.where(in_first, low, tl.where(in_second, first + 1, tl.where(in_third, second + 1, third + 1)))
    return high.to(tl.int32)


@triton.jit
def philox_word(columns, seed, draw, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint32 [BLOCK], as device_sampler.philox has it."""
    zero = tl.zeros((BLOCK,), dtype=tl.uint32)
    word, _, _, _ = tl.philox(
        seed,
        columns.to(tl.uint32),
        zero + (draw & 0xFFFFFFFF).to(tl.uint32),
        zero + ((draw >> 32) & 0xFFFFFFFF).to(tl.uint32),
        zero,
    )
    return word


@triton.jit
def noise(columns, seed, draw, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gumbel's, float32 [BLOCK], as device_sampler.gumbel has it."""
    uniform = ((philox_word(columns, seed, draw, BLOCK) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(tl.maximum(-tl.log(uniform), 1e-20))


@triton.jit
def drawn(score, gumbel, inside, heat, k, p, BFLOAT16: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The column drawn from one row of scores, float32 [BLOCK], -inf where not `inside`; BFLOAT16: they were of that dtype."""
    if heat > 0:
        score = tl.div_rn(score, heat) + 0.0  # -0 and 0 are one score
        bits = score.to(tl.int32, bitcast=True)
        key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
        if BFLOAT16:
            key = tl.where(heat == 1.0, key >> 16, key)  # the lower half says nothing: half the turns
        most = tl.max(key, 0)
        # Of the best of 64 parts of the row the least: 64 scores are no lower. Where top_k is no more, the search begins there, near
        # its end.
        PARTS: tl.constexpr = 64 if BLOCK >= 128 else 1
        if (k > 0) & (k <= PARTS):
            least = tl.min(tl.max(tl.reshape(key, (PARTS, BLOCK // PARTS), can_reorder=True), 1), 0)
        else:
            least = tl.min(key, 0)
        if k > 0:
            ones = tl.where(inside, 1.0, 0.0)
            least = threshold(key, ones, k.to(tl.float32), least, most)
            score = tl.where(key >= least, score, float("-inf"))
        if p < 1:
            mass = tl.exp(score - tl.max(score, 0))
            nucleus = threshold(key, mass, p * tl.sum(mass, 0), least, most)
            score = tl.where(key >= nucleus, score, float("-inf"))
        score = score + gumbel
    return tl.argmax(tl.where(inside, score, float("-inf")), 0).to(tl.int64)


@triton.jit
def _sample(  # type: ignore[no-untyped-def]
    scores,
    seeds,
    draws,
    temperature,
    top_k,
    top_p,
    out,
    stride,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < vocab
    score = tl.load(scores + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperature + row)
    gumbel = tl.zeros((BLOCK,), dtype=tl.float32)
    if heat > 0:
        gumbel = noise(columns, tl.load(seeds + row), tl.load(draws + row), BLOCK)
    is_bfloat16: tl.constexpr = scores.dtype.element_ty == tl.bfloat16
    best = drawn(score, gumbel, inside, heat, tl.load(top_k + row), tl.load(top_p + row), is_bfloat16, BLOCK)
    tl.store(out + row, best)


@triton.jit
def _adjust(  # type: ignore[no-untyped-def]
    scores, seen, slots, penalty, banned, ending, no_eos, out, stride, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    score = tl.load(scores + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(penalty + row)
    punished = tl.where(score < 0, score * factor, tl.div_rn(score, tl.zeros_like(score) + factor))
    slot = tl.load(slots + row)
    was_seen = tl.load(seen + slot * vocab + column, mask=inside, other=0) != 0
    score = tl.where(was_seen, punished, score)
    never = tl.load(banned + column, mask=inside, other=0) != 0
    ends = (tl.load(ending + column, mask=inside, other=0) != 0) & (tl.load(no_eos + row) != 0)
    tl.store(out + row * vocab + column, tl.where(never | ends, float("-inf"), score), mask=inside)


def adjust(
    scores: torch.Tensor,
    seen: torch.Tensor,
    slots: torch.Tensor,
    penalty: torch.Tensor,
    banned: torch.Tensor,
    ending: torch.Tensor,
    no_eos: torch.Tensor,
) -> torch.Tensor:
    """As device_sampler.adjust; all but `scores` contiguous."""
    rows, vocab = scores.shape
    assert scores.stride(1) == 1 and seen.is_contiguous()
    out = torch.empty(rows, vocab, dtype=torch.float32, device=scores.device)
    flags = [one.view(torch.int8) for one in (banned, ending, no_eos)]
    block = 1024
    _adjust[(rows, triton.cdiv(vocab, block))](
        scores,
        seen.view(torch.int8),
        slots,
        penalty,
        *flags,
        out,
        scores.stride(0),
        vocab,
        BLOCK=block,
        num_warps=4,
        **dependent_launch.options(scores),
    )
    return out


def sample(
    scores: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """As device_sampler.sample, for rows of up to 4,096 scores of any floating dtype, contiguous within a row."""
    rows, vocab = scores.shape
    assert scores.stride(1) == 1
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    block = triton.next_power_of_2(vocab)
    _sample[(rows,)](
        scores,
        seeds,
        draws,
        temperature,
        top_k,
        top_p,
        out,
        scores.stride(0),
        vocab,
        BLOCK=block,
        num_warps=warps_of(block),
        **dependent_launch.options(scores),
    )
    return out


def warps_of(block: int) -> int:
    """Warps of a program that draws from a row of `block` scores: the row alone keeps a multiprocessor busy."""
    return min(8, max(1, block // 256))
