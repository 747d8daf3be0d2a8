# mypy: allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of the small operators of a decoder layer: RMS norm with its residual, query and key norm with rotation, silu·mul.

One pass over the data each; arithmetic in float32, results rounded once to the tensors' dtype. ops.py chooses between these and
their plain equals. Imported only where a CUDA device is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_bus.stages.ar import dependent_launch
from omni_bus.stages.ar.dependent_launch import let_next_start, wait_for_earlier


@triton.jit
def scaled_root(wide, weight, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """weight * wide / sqrt(mean(wide²) + eps) over one block of SIZE values; rounded before the weight, as the plain form is."""
    normal = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    return normal.to(DTYPE).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    wait_for_earlier(PDL)
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row + column, x, mask=mask)
    tl.store(out_ptr + row + column, scaled_root(x.to(tl.float32), weight, eps, HIDDEN, dtype).to(dtype), mask=mask)


@triton.jit
def _qk_norm_rope_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and HEAD_BLOCK of its heads, those of queries, keys and values counted through. A dimension i of the first half of a
    head turns with i + HEAD_DIM / 2; values are only copied."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    half = tl.arange(0, HALF_BLOCK)
    HALF: tl.constexpr = HEAD_DIM // 2
    TOTAL: tl.constexpr = HEADS + 2 * KV_HEADS
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    inside = half < HALF
    mask = (head < TOTAL)[:, None] & inside[None, :]
    at = head[:, None] * HEAD_DIM + half[None, :]
    if NORM:
        q_one = tl.load(q_weight_ptr + half, mask=inside, other=0.0).to(tl.float32)
        q_two = tl.load(q_weight_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
        k_one = tl.load(k_weight_ptr + half, mask=inside, other=0.0).to(tl.float32)
        k_two = tl.load(k_weight_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
    wait_for_earlier(PDL)
    source = qkv_ptr + token * (TOTAL * HEAD_DIM) + at
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    is_value = mask & (head >= HEADS + KV_HEADS)[:, None]
    value_at = value_ptr + token * (KV_HEADS * HEAD_DIM) + at - (HEADS + KV_HEADS) * HEAD_DIM
    tl.store(value_at, first, mask=is_value)
    tl.store(value_at + HALF, second, mask=is_value)
    one = first.to(tl.float32)
    two = second.to(tl.float32)
    is_query = head < HEADS
    if NORM:
        square = tl.sum(one * one, 1) + tl.sum(two * two, 1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        one = (one * scale).to(dtype).to(tl.float32) * tl.where(is_query[:, None], q_one[None, :], k_one[None, :])
        two = (two * scale).to(dtype).to(tl.float32) * tl.where(is_query[:, None], q_two[None, :], k_two[None, :])
    angle = token * HEAD_DIM + half
    cos_one = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_two = tl.load(cos_ptr + HALF + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_one = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_two = tl.load(sin_ptr + HALF + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    turned_one = (one * cos_one - two * sin_one).to(dtype)
    turned_two = (two * cos_two + one * sin_two).to(dtype)
    query_mask = mask & is_query[:, None]
    query_at = query_ptr + token * (HEADS * HEAD_DIM) + at
    tl.store(query_at, turned_one, mask=query_mask)
    tl.store(query_at + HALF, turned_two, mask=query_mask)
    key_mask = mask & (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
    key_at = key_ptr + token * (KV_HEADS * HEAD_DIM) + at - HEADS * HEAD_DIM
    tl.store(key_at, turned_one, mask=key_mask)
    tl.store(key_at + HALF, turned_two, mask=key_mask)


@triton.jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(gate_up_ptr + row * (2 * SIZE) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * SIZE) + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[N, hidden] → the same."""
    assert x.is_contiguous() and weight.is_contiguous()
    rows, hidden = x.shape
    out = torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(hidden)
        _rms_norm_kernel[(rows,)](
            x, x, weight, out, out, eps, hidden, block, False, num_warps=norm_warps(block), **dependent_launch.options(x)
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, hidden] twice → (norm of the sum, the sum)."""
    assert x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous() and x.shape == residual.shape
    rows, hidden = x.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(hidden)
        _rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            total,
            eps,
            hidden,
            block,
            True,
            num_warps=norm_warps(block),
            **dependent_launch.options(x),
        )
    return out, total


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, (heads + 2 kv_heads) * head_dim], cos and sin [N, 1, head_dim] → query, key, value, each [N, its heads, head_dim] and
    contiguous. The weights [head_dim] are both given or both None."""
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    tokens, head_dim = len(qkv), cos.shape[-1]
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim and len(cos) == tokens
    query = qkv.new_empty(tokens, heads, head_dim)
    key = qkv.new_empty(tokens, kv_heads, head_dim)
    value = qkv.new_empty(tokens, kv_heads, head_dim)
    if tokens:
        head_block = 8
        _qk_norm_rope_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, head_block))](
            qkv,
            qkv if q_weight is None else q_weight,
            qkv if k_weight is None else k_weight,
            cos,
            sin,
            query,
            key,
            value,
            eps,
            heads,
            kv_heads,
            head_dim,
            triton.next_power_of_2(head_dim // 2),
            head_block,
            q_weight is not None,
            num_warps=4,
            **dependent_launch.options(qkv),
        )
    return query, key, value


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2 * size], gates before ups → silu(gate) * up, [N, size]."""
    assert gate_up.is_contiguous()
    rows, double = gate_up.shape
    out = gate_up.new_empty(rows, double // 2)
    if rows:
        block = min(1024, triton.next_power_of_2(double // 2))
        grid = (rows, triton.cdiv(double // 2, block))
        _silu_mul_kernel[grid](gate_up, out, double // 2, block, num_warps=4, **dependent_launch.options(gate_up))
    return out


def norm_warps(block: int) -> int:
    """Warps of a program that holds one row of `block` values."""
    return min(8, max(1, block // 256))
