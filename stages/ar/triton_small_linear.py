# mypy: allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of linear layers with a residual, for a decode step of a small batch, on tensor cores.

A step waits for weights, not for products: while the kernel before still runs, a program asks for its weights to be brought into the L2
cache (dependent_launch.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_bus.stages.ar import dependent_launch
from omni_bus.stages.ar.dependent_launch import let_next_start, wait_for_earlier
from omni_bus.stages.ar.triton_linear import depth_block

MOST_ROWS = 64


@triton.jit
def _fetch(at, INPUTS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for COLUMNS rows of weights that lie at `at` one after the other, line by line of 128 bytes. Nothing waits for them."""
    LINE: tl.constexpr = 1024 // at.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (COLUMNS * INPUTS + LINE - 1) // LINE
    for begin in tl.static_range(0, LINES, 1024):
        line = begin + tl.arange(0, 1024)
        target = at + tl.where(line < LINES, line, 0) * LINE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [target], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize=["rows"])
def _small_batch_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    begin_column = tl.program_id(0) * BLOCK_N
    if PDL and OUTPUTS % BLOCK_N == 0:
        _fetch(weight_ptr + begin_column * INPUTS, INPUTS, BLOCK_N)
    wait_for_earlier(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    member = tl.arange(0, BLOCK_M)
    valid = (member < rows)[:, None]
    column = begin_column + tl.arange(0, BLOCK_N)
    row = tl.where(column < OUTPUTS, column, 0)
    depth = tl.arange(0, BLOCK_K)
    x_at = x_ptr + member[:, None] * INPUTS + depth[None, :]
    weight_at = weight_ptr + row[None, :] * INPUTS + depth[:, None]
    out = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for begin in range(0, INPUTS, BLOCK_K):
        inside = begin + depth < INPUTS
        if INPUTS % BLOCK_K == 0:
            x = tl.load(x_at + begin, mask=valid, other=0.0)
            weight = tl.load(weight_at + begin)
        else:
            x = tl.load(x_at + begin, mask=valid & inside[None, :], other=0.0)
            weight = tl.load(weight_at + begin, mask=inside[:, None], other=0.0)
        out = tl.dot(x, weight, out, input_precision="ieee")
    if BIAS:
        out += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    at = member[:, None] * OUTPUTS + column[None, :]
    mask = valid & (column < OUTPUTS)[None, :]
    out = out.to(dtype).to(tl.float32) + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(dtype), mask=mask)


def linear_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """x [N, inputs] of up to MOST_ROWS rows, weight [outputs, inputs], residual [N, outputs] → residual + x · weightᵀ (+ bias)."""
    rows, inputs = x.shape
    outputs = len(weight)
    assert 1 <= rows <= MOST_ROWS and x.is_contiguous(), "this kernel is for a small batch"
    assert weight.is_contiguous() and weight.shape[1] == inputs and weight.dtype == x.dtype
    assert residual.is_contiguous() and residual.shape == (rows, outputs)
    out = x.new_empty(rows, outputs)
    wide = x.dtype == torch.float32
    columns = 32 if outputs >= 2048 and not wide else 16
    _small_batch_kernel[(triton.cdiv(outputs, columns),)](
        x,
        weight,
        weight if bias is None else bias,
        residual,
        out,
        rows,
        inputs,
        outputs,
        max(16, triton.next_power_of_2(rows)),
        columns,
        depth_block(inputs, 32 if wide else 128 if columns == 32 else 256),
        bias is not None,
        num_warps=4,
        num_stages=2 if wide else 4,
        **dependent_launch.options(x),
    )
    return out
