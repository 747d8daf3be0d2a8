# mypy: allow-untyped-decorators, allow-untyped-calls
"""The attention of a pass of the code predictor in one Triton kernel: norms, rotation, cache and all, behind the joined projection.

A frame is fifteen passes over a small decoder for a few rows: starting a kernel costs as much as running it. Imports triton: only
reached on a GPU. Values are rounded where the plain decoder rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    at, weight_ptr, angle, cos_ptr, sin_ptr, eps, half, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr
):
    """The two halves of one head, normalised and rotated: float32 values of DTYPE."""
    inside = half < HALF
    one = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(at + HALF + half, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(two * two, 0)) / HEAD_DIM + eps)
    one = (one * scale).to(DTYPE).to(tl.float32) * tl.load(weight_ptr + half, mask=inside, other=0.0).to(tl.float32)
    two = (two * scale).to(DTYPE).to(tl.float32) * tl.load(weight_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
    one = one.to(DTYPE).to(tl.float32)
    two = two.to(DTYPE).to(tl.float32)
    cos = tl.load(cos_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)
    return (one * cos - two * sin).to(DTYPE).to(tl.float32), (two * cos + one * sin).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["start"])
def _attend(  # type: ignore[no-untyped-def]
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    eps,
    scale,
    start,
    COUNT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    POSITIONS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One row and KV head: its new keys normalised, rotated and stored with the values, its queries attended. SIZE ≥ HEAD_DIM / 2."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    HEADS: tl.constexpr = KV_HEADS * GROUPS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.arange(0, POSITIONS)
    half = tl.arange(0, SIZE)
    inside = half < HALF
    base = (row * KV_HEADS + head) * CAPACITY * HEAD_DIM
    place = base + position[:, None] * HEAD_DIM + half[None, :]
    old = (position < start)[:, None] & inside[None, :]
    key_one = tl.load(keys_ptr + place, mask=old, other=0.0).to(tl.float32)
    key_two = tl.load(keys_ptr + place + HALF, mask=old, other=0.0).to(tl.float32)
    value_one = tl.load(values_ptr + place, mask=old, other=0.0).to(tl.float32)
    value_two = tl.load(values_ptr + place + HALF, mask=old, other=0.0).to(tl.float32)
    for index in range(COUNT):
        token = qkv_ptr + (row * COUNT + index) * WIDTH
        angle = (start + index) * HEAD_DIM
        at = token + (HEADS + head) * HEAD_DIM
        new_one, new_two = _turned(at, k_norm_ptr, angle, cos_ptr, sin_ptr, eps, half, HEAD_DIM, HALF, dtype)
        at = token + (HEADS + KV_HEADS + head) * HEAD_DIM + half
        said_one = tl.load(at, mask=inside, other=0.0)
        said_two = tl.load(at + HALF, mask=inside, other=0.0)
        target = base + (start + index) * HEAD_DIM + half
        tl.store(keys_ptr + target, new_one.to(dtype), mask=inside)
        tl.store(keys_ptr + target + HALF, new_two.to(dtype), mask=inside)
        tl.store(values_ptr + target, said_one, mask=inside)
        tl.store(values_ptr + target + HALF, said_two, mask=inside)
        own = (position == start + index)[:, None]
        key_one = tl.where(own, new_one[None, :], key_one)
        key_two = tl.where(own, new_two[None, :], key_two)
        value_one = tl.where(own, said_one.to(tl.float32)[None, :], value_one)
        value_two = tl.where(own, said_two.to(tl.float32)[None, :], value_two)
    for index in range(COUNT):
        for group in range(GROUPS):
            number = head * GROUPS + group
            at = qkv_ptr + (row * COUNT + index) * WIDTH + number * HEAD_DIM
            angle = (start + index) * HEAD_DIM
            one, two = _turned(at, q_norm_ptr, angle, cos_ptr, sin_ptr, eps, half, HEAD_DIM, HALF, dtype)
            score = (tl.sum(key_one * one[None, :], 1) + tl.sum(key_two * two[None, :], 1)) * scale
            score = tl.where(position <= start + index, score, float("-inf"))
            weight = tl.exp(score - tl.max(score, 0))
            weight = (weight / tl.sum(weight, 0))[:, None]
            target = out_ptr + ((row * COUNT + index) * HEADS + number) * HEAD_DIM + half
            tl.store(target, tl.sum(value_one * weight, 0).to(dtype), mask=inside)
            tl.store(target + HALF, tl.sum(value_two * weight, 0).to(dtype), mask=inside)


def attend(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
    *,
    rows: int,
    start: int,
) -> torch.Tensor:
    """qkv [rows * count, (heads + 2 kv_heads) * head_dim] of positions start … start + count - 1; cos and sin [capacity, head_dim];
    keys and values [rows or more, kv_heads, capacity, head_dim], one layer's cache → attended [rows * count, heads * head_dim]."""
    tokens, width = qkv.shape
    _, kv_heads, capacity, head_dim = keys.shape
    heads = width // head_dim - 2 * kv_heads
    assert qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous() and cos.shape == (capacity, head_dim)
    out = qkv.new_empty(tokens, heads * head_dim)
    _attend[(rows, kv_heads)](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        keys,
        values,
        out,
        eps,
        head_dim**-0.5,
        start,
        COUNT=tokens // rows,
        KV_HEADS=kv_heads,
        GROUPS=heads // kv_heads,
        CAPACITY=capacity,
        POSITIONS=triton.next_power_of_2(capacity),
        HEAD_DIM=head_dim,
        SIZE=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return out
