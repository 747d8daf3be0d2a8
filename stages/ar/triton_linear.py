# mypy: allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of linear layers for the few rows of a decode step: bound by the reading of weights, so what stands before and behind
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


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    token = tl.arange(0, BLOCK_M)
    real = token < rows
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(column < OUTPUTS, column, 0)
    depth = tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x_at = x_ptr + token[:, None] * INPUTS + depth[None, :]
    weight_at = weight_ptr + row[None, :] * INPUTS + depth[:, None]
    out = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for begin in range(0, INPUTS, BLOCK_K):
        inside = begin + depth < INPUTS
        if INPUTS % BLOCK_K == 0:
            x = tl.load(x_at + begin, mask=real[:, None], other=0.0)
            weight = tl.load(weight_at + begin)
        else:
            x = tl.load(x_at + begin, mask=real[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_at + begin, mask=inside[:, None], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            x = (wide * tl.load(norm_ptr + begin + depth, mask=inside, other=0.0).to(tl.float32)[None, :]).to(dtype)
        out = tl.dot(x, weight, out, input_precision="ieee")
        if GATED:
            if INPUTS % BLOCK_K == 0:
                up_weight = tl.load(weight_at + OUTPUTS * INPUTS + begin)
            else:
                up_weight = tl.load(weight_at + OUTPUTS * INPUTS + begin, mask=inside[:, None], other=0.0)
            up = tl.dot(x, up_weight, up, input_precision="ieee")
    if NORM:
        root = tl.rsqrt(squares / INPUTS + eps)[:, None]
        out = out * root
        up = up * root
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * up
    if BIAS:
        out += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    at = token[:, None] * OUTPUTS + column[None, :]
    mask = real[:, None] & (column < OUTPUTS)[None, :]
    if ADD:
        out = out.to(dtype).to(tl.float32) + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(dtype), mask=mask)


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
    """x [N, inputs], weight [outputs, inputs] → x · weightᵀ [N, outputs]. With norm_weight [inputs]: of the normalised x. Gated: the
    weight has gates before ups, [2 * outputs, inputs], and the result is silu(gate) * up. With residual [N, outputs]: added."""
    rows, inputs = x.shape
    outputs = len(weight) // 2 if gated else len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == inputs and weight.dtype == x.dtype
    assert residual is None or (residual.is_contiguous() and residual.shape == (rows, outputs))
    out = x.new_empty(rows, outputs)
    flags = (norm_weight is not None, gated, bias is not None, residual is not None)
    tensors = [weight if one is None else one for one in (norm_weight, weight, bias, residual)]
    if rows == 1:
        columns = 8 if outputs >= 2048 else 4 if outputs >= 1024 else 2
        _one_row_kernel[(triton.cdiv(outputs, columns),)](
            x, *tensors, out, eps, inputs, outputs, columns, depth_block(inputs, 512), *flags, num_warps=4
        )
        return out
    block_m = max(16, triton.next_power_of_2(rows))
    assert block_m <= 128, "more rows than one block of this kernel holds"
    if x.dtype == torch.float32:
        columns, depth, stages = 16, 32, 2
    elif block_m == 16:
        columns, depth, stages = (16, 256, 3) if gated else (16, 256, 5) if outputs < 4096 else (32, 128, 5)
    else:
        columns, depth, stages = (16, 128, 4) if outputs < 4096 else (32, 128, 4)
    _rows_kernel[(triton.cdiv(outputs, columns),)](
        x,
        *tensors,
        out,
        rows,
        eps,
        inputs,
        outputs,
        block_m,
        columns,
        depth_block(inputs, depth),
        *flags,
        num_warps=4,
        num_stages=stages,
    )
    return out


def depth_block(size: int, most: int) -> int:
    """The depth of a tile over a dimension of `size`: the largest power of two up to `most` that divides it, if one of at least 64
    does (`most`, where that is less); otherwise one that is masked at the end."""
    whole = min(most, size & -size)
    return whole if whole >= min(64, most) else min(most, max(16, triton.next_power_of_2(size)))
