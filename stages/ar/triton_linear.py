# mypy: allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of linear layers for a decode step of one row: bound by the reading of weights, so what stands before and behind
a product is done on the way. Before: RMS norm of the input; behind: bias, silu(gate)·up, the residual.

The norm needs no pass of its own: its root is one factor of the whole row, so the row goes into the product with the norm's weight
alone, its squares are summed beside it, and the root is multiplied in at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _one_row_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(column < OUTPUTS, column, 0)
    depth = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + row[:, None] * INPUTS + depth[None, :]
    products = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    for begin in tl.static_range(0, INPUTS, BLOCK_K):
        inside = begin + depth < INPUTS
        if INPUTS % BLOCK_K == 0:
            weight = tl.load(weight_at + begin)
            x = tl.load(x_ptr + begin + depth).to(tl.float32)
        else:
            weight = tl.load(weight_at + begin, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptr + begin + depth, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + begin + depth, mask=inside, other=0.0).to(tl.float32)
        products += weight.to(tl.float32) * x[None, :]
        if GATED:
            if INPUTS % BLOCK_K == 0:
                up_weight = tl.load(weight_at + OUTPUTS * INPUTS + begin)
            else:
                up_weight = tl.load(weight_at + OUTPUTS * INPUTS + begin, mask=inside[None, :], other=0.0)
            ups += up_weight.to(tl.float32) * x[None, :]
    out = tl.sum(products, 1)
    root = 1.0
    if NORM:
        root = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        out = out * root
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * (tl.sum(ups, 1) * root)
    if BIAS:
        out += tl.load(bias_ptr + row).to(tl.float32)
    if ADD:
        out = out.to(out_ptr.dtype.element_ty).to(tl.float32) + tl.load(residual_ptr + row).to(tl.float32)
    tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=column < OUTPUTS)


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
    """x [1, inputs], weight [outputs, inputs] → x · weightᵀ [1, outputs]. With norm_weight [inputs]: of the normalised x. Gated: the
    weight has gates before ups, [2 * outputs, inputs], and the result is silu(gate) * up. With residual [1, outputs]: added."""
    inputs = x.shape[1]
    outputs = len(weight) // 2 if gated else len(weight)
    assert x.shape == (1, inputs) and x.is_contiguous(), "this kernel is for one row"
    assert weight.is_contiguous() and weight.shape[1] == inputs and weight.dtype == x.dtype
    assert residual is None or (residual.is_contiguous() and residual.shape == (1, outputs))
    out = x.new_empty(1, outputs)
    flags = (norm_weight is not None, gated, bias is not None, residual is not None)
    tensors = [weight if one is None else one for one in (norm_weight, weight, bias, residual)]
    columns = 8 if outputs >= 2048 else 4 if outputs >= 1024 else 2
    _one_row_kernel[(triton.cdiv(outputs, columns),)](
        x, *tensors, out, eps, inputs, outputs, columns, depth_block(inputs, 512), *flags, num_warps=4
    )
    return out


def depth_block(size: int, most: int) -> int:
    """The depth of a tile over a dimension of `size`: the largest power of two up to `most` that divides it, if one of at least 64
    does (`most`, where that is less); otherwise one that is masked at the end."""
    whole = min(most, size & -size)
    return whole if whole >= min(64, most) else min(most, max(16, triton.next_power_of_2(size)))
