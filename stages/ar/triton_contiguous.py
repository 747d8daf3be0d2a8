# mypy: allow-untyped-decorators, allow-untyped-calls
"""ContiguousAttention.attend in one Triton kernel: new keys and values stored, every query attended. One program a row and KV head.

Imports triton: only reached on a GPU. For short sequences: all of a row's keys lie in one program's registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_bus.stages.ar import dependent_launch
from omni_bus.stages.ar.dependent_launch import let_next_start, wait_for_earlier


@triton.jit(do_not_specialize=["start"])
def _attend(  # type: ignore[no-untyped-def]  # triton reads annotations as code
    query,
    key,
    value,
    keys,
    values,
    out,
    start,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    scale,
    COUNT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    POSITIONS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.arange(0, POSITIONS)
    at = tl.arange(0, SIZE)
    inside = at < HEAD_DIM
    place = ((row * KV_HEADS + head) * CAPACITY + position[:, None]) * HEAD_DIM + at[None, :]
    token = row * COUNT + position[:, None] - start
    old = (position < start)[:, None] & inside[None, :]
    new = ((position >= start) & (position < start + COUNT))[:, None] & inside[None, :]
    new_key = tl.load(key + token * key_token + head * key_head + at[None, :], mask=new, other=0.0)
    new_value = tl.load(value + token * value_token + head * value_head + at[None, :], mask=new, other=0.0)
    tl.store(keys + place, new_key, mask=new)
    tl.store(values + place, new_value, mask=new)
    all_keys = tl.load(keys + place, mask=old, other=0.0).to(tl.float32) + new_key.to(tl.float32)
    all_values = tl.load(values + place, mask=old, other=0.0).to(tl.float32) + new_value.to(tl.float32)
    for index in tl.static_range(COUNT):
        for group in tl.static_range(GROUPS):
            number = head * GROUPS + group
            asked = tl.load(query + (row * COUNT + index) * query_token + number * query_head + at, mask=inside, other=0.0)
            score = tl.sum(all_keys * asked.to(tl.float32)[None, :], 1) * scale
            score = tl.where(position <= start + index, score, float("-inf"))
            weight = tl.exp(score - tl.max(score, 0))
            weight = weight / tl.sum(weight, 0)
            attended = tl.sum(all_values * weight[:, None], 0)
            target = out + ((row * COUNT + index) * KV_HEADS * GROUPS + number) * HEAD_DIM + at
            tl.store(target, attended.to(out.dtype.element_ty), mask=inside)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rows: int,
    start: int,
) -> torch.Tensor:
    """query [rows * count, heads, head_dim], key and value [rows * count, kv_heads, head_dim] at positions start … start + count - 1;
    keys and values [rows or more, kv_heads, capacity, head_dim], one layer's cache, contiguous → [rows * count, heads, head_dim]."""
    tokens, heads, head_dim = query.shape
    _, kv_heads, capacity, _ = keys.shape
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1 and keys.is_contiguous() and values.is_contiguous()
    out = torch.empty(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
    _attend[(rows, kv_heads)](
        query,
        key,
        value,
        keys,
        values,
        out,
        start,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        head_dim**-0.5,
        COUNT=tokens // rows,
        KV_HEADS=kv_heads,
        GROUPS=heads // kv_heads,
        CAPACITY=capacity,
        POSITIONS=triton.next_power_of_2(capacity),
        HEAD_DIM=head_dim,
        SIZE=triton.next_power_of_2(head_dim),
        num_warps=4,
        **dependent_launch.options(query),
    )
    return out
