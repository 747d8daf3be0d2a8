# mypy: allow-untyped-decorators, allow-untyped-calls
"""device_sampler.sample for rows that do not fit into one program: a text model's vocabulary, 150,000 scores.

Imports triton: only reached on a GPU. A row lies in blocks of 8,192 scores, one program each. The lowest score that top_k, then top_p
leave in is searched among the scores' bits (triton_sampler.py has it for short rows): each kernel sums what lies above 15 places, the
next one adds the blocks up and keeps a sixteenth; eight turns leave one of 2^32. Chunks of 512 whose best score lies below all
places are passed over: for top_k, which begins at the k-th of the chunks' best scores, that is most of them. Sums are added in one
order, whoever else is in the batch. A last pair of kernels adds the noise and takes the best. Nothing depends on values on the host,
so that a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_bus.stages.ar import dependent_launch
from omni_bus.stages.ar.dependent_launch import let_next_start, wait_for_earlier
from omni_bus.stages.ar.triton_sampler import philox_word, threshold

BLOCK = 8192  # scores a program
_CHUNK = 512  # of them at a time, with 16 sums each
_TURNS = 8  # 16^8 = 2^32: of as many keys one is left
_LOWEST = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def _key(score):  # type: ignore[no-untyped-def]
    """int32 of the same order as float32."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _place(low, high, number):  # type: ignore[no-untyped-def]
    """Where the number-th sixteenth of the keys from low to high (int64) begins, less one: int32. Number 0 is below them all."""
    return (low + (((high - low + 1) * number) >> 4) - 1).to(tl.int32)


@triton.jit
def _scale(  # type: ignore[no-untyped-def]
    scores, temperature, scaled, maxima, stride, vocab, blocks, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """scores / temperature, and every chunk's highest. Rows without a temperature stay as they are."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    CHUNKS: tl.constexpr = BLOCK // CHUNK
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = tl.arange(0, CHUNKS)
    column = block * BLOCK + chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    score = tl.load(scores + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperature + row)
    heat = tl.where(heat > 0, heat, 1.0)
    score = tl.div_rn(score, tl.zeros_like(score) + heat) + 0.0  # -0 and 0 are one score
    tl.store(scaled + row * vocab + column, score, mask=column < vocab)
    tl.store(maxima + (row * blocks + block) * CHUNKS + chunk, tl.max(score, 1))


@triton.jit
def _told(sums, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What all blocks have above their places 0 … 15: float32 [16]."""
    each, number = tl.arange(0, BLOCKS), tl.arange(0, 16)
    return tl.sum(tl.load(sums + each[:, None] * 16 + number[None, :], mask=(each < blocks)[:, None], other=0.0), 0)


@triton.jit
def _search(low, high, above, limit):  # type: ignore[no-untyped-def]
    """low and high of the sixteenth with the lowest key above which there is less than `limit`, of what lies `above` the places."""
    number = tl.arange(0, 16)
    # Above a higher place lies no more: those above which there is less are the last ones.
    first = 16 - tl.sum(tl.where((above < limit) & (number > 0), 1, 0), 0)
    new_high = tl.where(first < 16, _place(low, high, first).to(tl.int64), high)
    return _place(low, high, first - 1).to(tl.int64) + 1, new_high


@triton.jit
def _nucleus(low, high, sums, rows, row, turn, p, blocks, TURNS: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`_search` for top_p behind a turn. Of the first turn of top_p number 0 is the mass of all that top_k leaves in."""
    all_above = _told(sums + (TURNS * rows + row) * blocks * 16, blocks, BLOCKS)
    mass = tl.sum(tl.where(tl.arange(0, 16) == 0, all_above, 0.0), 0)
    return _search(low, high, _told(sums + (turn * rows + row) * blocks * 16, blocks, BLOCKS), p * mass)


@triton.jit(do_not_specialize=["turn"])
def _narrow(  # type: ignore[no-untyped-def]
    scaled,
    maxima,
    temperature,
    top_k,
    top_p,
    bounds,  # int64 [turns, rows, 3]: low, high, and the lowest key that top_k leaves in
    tops,  # float32 [rows]: the best score
    sums,  # float32 [turns, rows, blocks, 16]
    turn,
    vocab,
    blocks,
    TURNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Turn 0 … TURNS-1 for top_k, TURNS … 2*TURNS-1 for top_p: where the row stands, and what lies above this turn's places."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    CHUNKS: tl.constexpr = BLOCK // CHUNK
    row, block, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    for_mass = turn >= TURNS
    if (heat > 0) & ((k > 0) | (p < 1)):
        low, high, least = tl.full((), _LOWEST, tl.int64), tl.full((), _LOWEST, tl.int64), tl.full((), _LOWEST, tl.int64)
        most = tl.zeros((), dtype=tl.float32)
        if turn == 0:
            each = tl.arange(0, BLOCKS * CHUNKS)
            there = each < blocks * CHUNKS
            best = tl.load(maxima + row * blocks * CHUNKS + each, mask=there, other=float("-inf"))
            most = tl.max(best, 0)
            high = _key(most).to(tl.int64)
            if block == 0:
                tl.store(tops + row, most)
            if (k > 0) & (k <= blocks * CHUNKS):  # as many scores are no lower
                low = threshold(_key(best), tl.where(there, 1.0, 0.0), k.to(tl.float32), low, high).to(tl.int64)
        else:
            most = tl.load(tops + row)
            before = bounds + ((turn - 1) * rows + row) * 3
            low, high, least = tl.load(before), tl.load(before + 1), tl.load(before + 2)
            if turn <= TURNS:
                if (k > 0) & (low < high):
                    above = _told(sums + ((turn - 1) * rows + row) * blocks * 16, blocks, BLOCKS)
                    low, high = _search(low, high, above, k.to(tl.float32))
            else:
                if (p < 1) & (low < high):
                    low, high = _nucleus(low, high, sums, rows, row, turn - 1, p, blocks, TURNS, BLOCKS)
        if turn == TURNS:
            if k > 0:
                least = high
            low, high = least, _key(most).to(tl.int64)
        if block == 0:
            here = bounds + (turn * rows + row) * 3
            tl.store(here, low)
            tl.store(here + 1, high)
            tl.store(here + 2, least)
        if (low < high) & ((for_mass & (p < 1)) | ((turn < TURNS) & (k > 0))):
            number = tl.arange(0, 16)
            places = _place(low, high, number)
            whole = (number == 0) & (turn == TURNS)
            total = tl.zeros((CHUNK, 16), dtype=tl.float32)
            for chunk in range(CHUNKS):
                highest = tl.load(maxima + (row * blocks + block) * CHUNKS + chunk)
                if _key(highest).to(tl.int64) >= low:
                    column = block * BLOCK + chunk * CHUNK + tl.arange(0, CHUNK)
                    score = tl.load(scaled + row * vocab + column, mask=column < vocab, other=float("-inf"))
                    key = _key(score)
                    weight = tl.where(column < vocab, 1.0, 0.0)
                    if for_mass:
                        weight = tl.where(key.to(tl.int64) >= least, tl.exp(score - most), 0.0)
                    total += tl.where((key[:, None] > places[None, :]) | whole[None, :], weight[:, None], 0.0)
            tl.store(sums + ((turn * rows + row) * blocks + block) * 16 + number, tl.sum(total, 0))


@triton.jit
def _best_of_block(  # type: ignore[no-untyped-def]
    scaled,
    seeds,
    draws,
    temperature,
    top_k,
    top_p,
    bounds,
    sums,
    best,  # float32 [rows, blocks]
    where,  # int32 [rows, blocks]
    vocab,
    blocks,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every block's best score with its noise, among those that stay in, and its column."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    LAST: tl.constexpr = 2 * TURNS - 1
    row, block, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scaled + row * vocab + column, mask=column < vocab, other=float("-inf"))
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    if heat > 0:
        least = tl.full((), _LOWEST, tl.int64)
        if (k > 0) | (p < 1):
            before = bounds + (LAST * rows + row) * 3
            low, high, least = tl.load(before), tl.load(before + 1), tl.load(before + 2)
            if p < 1:
                if low < high:
                    low, high = _nucleus(low, high, sums, rows, row, LAST, p, blocks, TURNS, BLOCKS)
                least = tl.maximum(least, high)
        noisy = score + fine_noise(column, tl.load(seeds + row), tl.load(draws + row), BLOCK)
        score = tl.where((_key(score).to(tl.int64) >= least) & (column < vocab), noisy, float("-inf"))
    tl.store(best + row * blocks + block, tl.max(score, 0))
    tl.store(where + row * blocks + block, block * BLOCK + tl.argmax(score, 0))


@triton.jit
def fine_noise(columns, seed, draw, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gumbel's, float32 [BLOCK], as device_sampler.fine_gumbel has it."""
    word = philox_word(columns, seed, draw, BLOCK)
    tail = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)  # 2^-32; 1 - 2^-24
    near = tail * (1.0 + tail * (0.5 + tail * (0.3333333333333333 + tail * 0.25)))
    return -tl.log(tl.where(tail < 0.00390625, near, -tl.log(1.0 - tail)))


@triton.jit
def _best(best, where, out, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCKS)
    inside = each < blocks
    block = tl.argmax(tl.load(best + row * blocks + each, mask=inside, other=float("-inf")), 0)  # of equal ones the first
    tl.store(out + row, tl.load(where + row * blocks + block).to(tl.int64))


def sample(
    scores: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """As device_sampler.sample, for rows of any length and floating dtype, contiguous within a row."""
    rows, vocab = scores.shape
    assert scores.stride(1) == 1
    blocks, turns = triton.cdiv(vocab, BLOCK), 2 * _TURNS

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=scores.device)

    scaled, maxima, best = empty(rows, vocab), empty(rows, blocks, BLOCK // _CHUNK), empty(rows, blocks)
    where, out = empty(rows, blocks, dtype=torch.int32), empty(rows, dtype=torch.int64)
    bounds, tops, sums = empty(turns, rows, 3, dtype=torch.int64), empty(rows), empty(turns, rows, blocks, 16)
    grid, start = (rows, blocks), {"num_warps": 8, **dependent_launch.options(scores)}
    knobs, sizes = (temperature, top_k, top_p), {"TURNS": _TURNS, "BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(blocks)}
    _scale[grid](scores, temperature, scaled, maxima, scores.stride(0), vocab, blocks, CHUNK=_CHUNK, BLOCK=BLOCK, **start)
    for turn in range(turns):
        _narrow[grid](scaled, maxima, *knobs, bounds, tops, sums, turn, vocab, blocks, CHUNK=_CHUNK, **sizes, **start)
    _best_of_block[grid](scaled, seeds, draws, *knobs, bounds, sums, best, where, vocab, blocks, **sizes, **start)
    _best[(rows,)](best, where, out, blocks, BLOCKS=sizes["BLOCKS"], **start)
    return out
