# mypy: allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,var-annotated"
"""Triton kernel of linear layers for a decode step of few rows: bound by the reading of weights, so what stands before and
behind a product is done on the way. Before: RMS norm of the input; behind: bias, silu(gate)·up, the residual.

The norm needs no pass of its own: its root is one factor of the whole row, so the row goes into the product with the norm's weight
alone, its squares are summed beside it, and the root is multiplied in at the end. A warp takes whole rows of the weight, so that
nothing but the result passes between warps, and has the first blocks of them in registers before the input is there
(dependent_launch.py).
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from omni_bus.stages.ar import dependent_launch
from omni_bus.stages.ar.dependent_launch import let_next_start, wait_for_earlier

MOST_ROWS = 4


@triton.jit
def block_of(at, begin, depth, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of depth of the rows at `at`, zero behind their ends."""
    return tl.load(at + begin) if INPUTS % BLOCK_K == 0 else tl.load(at + begin, mask=begin + depth < INPUTS, other=0.0)


@triton.jit
def _few_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """TURNS times ROWS outputs of every token, a row of the weight a warp. The input is read as if every warp's row had one of its own:
    a thread then has what it multiplies without asking another."""
    let_next_start(PDL)
    lane = tl.arange(0, ROWS)
    depth = tl.arange(0, BLOCK_K)[None, :]
    first = tl.program_id(0) * (ROWS * TURNS)
    same = lane[:, None] * 0 + depth
    weights = ()
    ups = ()
    norms = ()
    for turn in tl.static_range(TURNS):
        column = first + turn * ROWS + lane
        row = tl.where(column < OUTPUTS, column, 0)
        at = weight_ptr + row[:, None] * INPUTS + depth
        for block in tl.static_range(AHEAD):
            weights += (block_of(at, block * BLOCK_K, depth, INPUTS, BLOCK_K),)
            if GATED:
                ups += (block_of(at + OUTPUTS * INPUTS, block * BLOCK_K, depth, INPUTS, BLOCK_K),)
    if NORM:
        for block in tl.static_range(AHEAD):
            norms += (block_of(norm_ptr + same, block * BLOCK_K, depth, INPUTS, BLOCK_K),)
    wait_for_earlier(PDL)
    inputs = ()
    for block in tl.static_range(AHEAD):
        for token in tl.static_range(TOKENS):
            inputs += (block_of(x_ptr + token * INPUTS + same, block * BLOCK_K, depth, INPUTS, BLOCK_K),)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    zero = tl.zeros([ROWS, BLOCK_K], dtype=tl.float32)
    for turn in tl.static_range(TURNS):
        column = first + turn * ROWS + lane
        row = tl.where(column < OUTPUTS, column, 0)
        at = weight_ptr + row[:, None] * INPUTS + depth
        products = ()
        up_products = ()
        squares = ()
        residuals = ()
        for token in tl.static_range(TOKENS):
            products += (zero,)
            up_products += (zero,)
            squares += (zero,)
            if ADD:
                residuals += (tl.load(residual_ptr + token * OUTPUTS + row).to(tl.float32),)
        for block in tl.static_range((INPUTS + BLOCK_K - 1) // BLOCK_K):
            begin = block * BLOCK_K
            if block < AHEAD:
                weight = weights[turn * AHEAD + block].to(tl.float32)
            else:
                weight = block_of(at, begin, depth, INPUTS, BLOCK_K).to(tl.float32)
            if GATED:
                if block < AHEAD:
                    up = ups[turn * AHEAD + block].to(tl.float32)
                else:
                    up = block_of(at + OUTPUTS * INPUTS, begin, depth, INPUTS, BLOCK_K).to(tl.float32)
            if NORM:
                if block < AHEAD:
                    norm = norms[block].to(tl.float32)
                else:
                    norm = block_of(norm_ptr + same, begin, depth, INPUTS, BLOCK_K).to(tl.float32)
            new_products = ()
            new_ups = ()
            new_squares = ()
            for token in tl.static_range(TOKENS):
                if block < AHEAD:
                    x = inputs[block * TOKENS + token].to(tl.float32)
                else:
                    x = block_of(x_ptr + token * INPUTS + same, begin, depth, INPUTS, BLOCK_K).to(tl.float32)
                if NORM:
                    new_squares += (squares[token] + x * x,)
                    x = x * norm
                new_products += (products[token] + weight * x,)
                if GATED:
                    new_ups += (up_products[token] + up * x,)
            products = new_products
            up_products = new_ups
            squares = new_squares
        for token in tl.static_range(TOKENS):
            out = tl.sum(products[token], 1)
            root = tl.zeros([ROWS], dtype=tl.float32) + 1.0
            if NORM:
                root = tl.rsqrt(tl.sum(squares[token], 1) / INPUTS + eps)
                out = out * root
            if GATED:
                out = out / (1.0 + tl.exp(-out)) * (tl.sum(up_products[token], 1) * root)
            if BIAS:
                out += tl.load(bias_ptr + row).to(tl.float32)
            if ADD:
                out = out.to(dtype).to(tl.float32) + residuals[token]
            tl.store(out_ptr + token * OUTPUTS + column, out.to(dtype), mask=column < OUTPUTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Of one program: its warps, the rows of the weight that each takes one after the other, and the blocks of each row that are
    fetched before the input is there."""

    warps: int
    turns: int
    ahead: int


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [N, inputs], N up to MOST_ROWS, weight [outputs, inputs] → x · weightᵀ [N, outputs]. With norm_weight [inputs]: of the
    normalised x. Gated: the weight has gates before ups, [2 * outputs, inputs], and the result is silu(gate) * up. With residual
    [N, outputs]: added."""
    rows, inputs = x.shape
    outputs = len(weight) // 2 if gated else len(weight)
    assert 1 <= rows <= MOST_ROWS and x.is_contiguous(), "this kernel is for few rows"
    assert weight.is_contiguous() and weight.shape[1] == inputs and weight.dtype == x.dtype
    assert residual is None or (residual.is_contiguous() and residual.shape == (rows, outputs))
    out = x.new_empty(rows, outputs)
    flags = (norm_weight is not None, gated, bias is not None, residual is not None)
    tensors = [weight if one is None else one for one in (norm_weight, weight, bias, residual)]
    tile, depth = tile_of(rows, inputs, outputs, gated), depth_block(inputs, 256)
    _few_rows_kernel[(triton.cdiv(outputs, tile.warps * tile.turns),)](
        x,
        *tensors,
        out,
        eps,
        rows,
        inputs,
        outputs,
        tile.warps,
        tile.turns,
        depth,
        min(tile.ahead, triton.cdiv(inputs, depth)),
        *flags,
        num_warps=tile.warps,
        **dependent_launch.options(x),
    )
    return out


def tile_of(rows: int, inputs: int, outputs: int, gated: bool) -> Tile:
    """Enough programs for every multiprocessor, and few enough registers that the next kernel's programs fit beside this one's."""
    if outputs < 1024:
        return Tile(warps=1, turns=1, ahead=8)
    if rows > 2:
        return Tile(warps=4, turns=1, ahead=4)
    turns = 2 if outputs >= 2048 and inputs <= 2048 and rows == 1 else 1
    return Tile(warps=4, turns=turns, ahead=16 // turns // (2 if gated else 1) // rows)


def depth_block(size: int, most: int) -> int:
    """The depth of a tile over a dimension of `size`: the largest power of two up to `most` that divides it, if one of at least 64
    does (`most`, where that is less); otherwise one that is masked at the end."""
    whole = min(most, size & -size)
    return whole if whole >= min(64, most) else min(most, max(16, triton.next_power_of_2(size)))
