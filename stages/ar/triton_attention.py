"""Attention of decode rows over the paged cache, in Triton: the new key and value are stored and attended to in the same pass.

Imports triton: only reached on a GPU. One program takes one KV head of one row, with all query heads that share it, over one part
of the context; where a context is cut into several parts, a second kernel joins them. The plain equal is attention.DecodeAttention
without a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_bus.stages.ar import dependent_launch
from omni_bus.stages.ar.dependent_launch import let_next_start, wait_for_earlier

TILE = 64  # positions attended to at a time
_PROGRAMS = 256  # about two for each multiprocessor of a large card: what the parts of a context are cut for
_MOST_PARTS = 8


def supports(head_dim: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    keys,
    values,
    tables,
    slots,
    lengths,
    out,
    maxima,
    sums,
    scale,
    query_stride,
    key_stride,
    value_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    POSITIONS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths + row)
    table = tables + tl.load(slots + row) * table_stride
    tiles = (length + POSITIONS - 1) // POSITIONS
    span = ((tiles + PARTS - 1) // PARTS) * POSITIONS
    begin = part * span
    end = tl.minimum(begin + span, length)

    column = tl.arange(0, DIM)
    member = tl.arange(0, ROWS)
    queries = tl.load(
        query + row * query_stride + (head * GROUP + member)[:, None] * DIM + column[None, :],
        mask=(member < GROUP)[:, None],
        other=0.0,
    )
    new_key = tl.load(key + row * key_stride + head * DIM + column)
    new_value = tl.load(value + row * value_stride + head * DIM + column)
    newest = length - 1
    if (newest >= begin) & (newest < end):
        place = tl.load(table + newest // PAGE).to(tl.int64) * PAGE + newest % PAGE
        tl.store(keys + (place * KV_HEADS + head) * DIM + column, new_key)
        tl.store(values + (place * KV_HEADS + head) * DIM + column, new_value)

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    attended = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(begin, end, POSITIONS):
        position = start + tl.arange(0, POSITIONS)
        old = position < newest  # the newest is taken from where it came: what was just stored need not be visible yet
        block = tl.load(table + position // PAGE, mask=old, other=0).to(tl.int64)
        offset = ((block * PAGE + position % PAGE) * KV_HEADS + head) * DIM
        is_new = (position == newest)[:, None]
        k = tl.load(keys + offset[:, None] + column[None, :], mask=old[:, None], other=0.0)
        k = tl.where(is_new, new_key[None, :], k)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where((position < end)[None, :], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - now)
        weights = tl.exp(scores - now[:, None])
        v = tl.load(values + offset[:, None] + column[None, :], mask=old[:, None], other=0.0)
        v = tl.where(is_new, new_value[None, :], v)
        total = total * shrink + tl.sum(weights, 1)
        attended = attended * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = now

    index = row * KV_HEADS * GROUP + head * GROUP + member
    inside = member < GROUP
    if PARTS == 1:
        done = (attended / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + index[:, None] * DIM + column[None, :], done, mask=inside[:, None])
    else:
        index = index * PARTS + part
        tl.store(out + index[:, None] * DIM + column[None, :], attended, mask=inside[:, None])
        tl.store(maxima + index, highest, mask=inside)
        tl.store(sums + index, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _join(  # type: ignore[no-untyped-def]
    parts, maxima, sums, out, DIM: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr
):
    """A part with nothing in it has maximum -inf, so it weighs nothing."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    index = tl.program_id(0)
    column = tl.arange(0, DIM)
    part = tl.arange(0, PARTS)
    highest = tl.load(maxima + index * PARTS + part)
    weights = tl.exp(highest - tl.max(highest, 0))
    total = tl.sum(tl.load(sums + index * PARTS + part) * weights, 0)
    attended = tl.load(parts + (index * PARTS + part)[:, None] * DIM + column[None, :])
    done = tl.sum(attended * weights[:, None], 0) / total
    tl.store(out + index * DIM + column, done.to(out.dtype.element_ty))


def parts_for(rows: int, kv_heads: int) -> int:
    """Into how many parts each context is cut: a power of 2 that fills the card and no more."""
    parts = 1
    while parts < _MOST_PARTS and parts * 2 * rows * kv_heads <= _PROGRAMS:
        parts *= 2
    return parts


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_size: int,
) -> torch.Tensor:
    """One new position of each of B rows: stored in the cache, and attended from → [B, heads, head_dim].

    query [B, heads, head_dim], key and value [B, kv_heads, head_dim], each row contiguous; keys and values
    [positions, kv_heads, head_dim], one layer of the cache; tables int32 [slots, n]: the blocks of the row in each slot; slots
    int64 [B]; lengths int32 [B]: positions of each row with the new one, at least 1.
    """
    rows, heads, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    for tensor in (query, key, value, keys, values):
        assert tensor.stride()[1:] == (dim, 1)
    parts = parts_for(rows, kv_heads)
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    partial, maxima, sums = out, out, out
    if parts > 1:
        partial = torch.empty(rows, heads, parts, dim, dtype=torch.float32, device=query.device)
        maxima, sums = torch.empty(2, rows, heads, parts, dtype=torch.float32, device=query.device)
    _attend[(rows, kv_heads, parts)](
        query,
        key,
        value,
        keys,
        values,
        tables,
        slots,
        lengths,
        partial,
        maxima,
        sums,
        dim**-0.5,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        PAGE=block_size,
        POSITIONS=TILE,
        PARTS=parts,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
        **dependent_launch.options(query),
    )
    if parts > 1:
        launch = dependent_launch.options(query)
        _join[(rows * heads,)](partial, maxima, sums, out, DIM=dim, PARTS=parts, num_warps=4, **launch)
    return out
