"""Attention of spans over the paged cache, in Triton: prompts, later pieces of them, and single positions, packed behind each other.

Imports triton: only reached on a GPU. One program takes one KV head of one tile of a span's tokens, with all query heads that share it,
over the span's whole context up to the tile's last token; heads are those that triton_attention takes. Which span a tile belongs to is found on the device, so that a captured graph
takes any spans that its number of tokens holds. The plain equal is spans.attend_plain.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

POSITIONS = 64  # of the context, attended to at a time
_ROWS = 128  # of a tile: tokens times the query heads that share a KV head
_FEW_ROWS = 64  # where there are few tokens, so that there are more tiles; and in float32, which takes twice the shared memory
_FEW_TOKENS = 128


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    lengths,
    begins,
    out,
    scale,
    spans,
    query_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    POSITIONS: tl.constexpr,
    SPANS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    index = tl.arange(0, SPANS)
    first = tl.load(begins + index, mask=index < spans, other=0)
    behind = tl.load(begins + index + 1, mask=index < spans, other=0)
    tiles = (behind - first + TOKENS - 1) // TOKENS
    if tile >= tl.sum(tiles, 0):
        return
    span = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    begin = tl.load(begins + span)
    count = tl.load(begins + span + 1) - begin
    length = tl.load(lengths + span)
    first_token = (tile - tl.sum(tl.where(index < span, tiles, 0), 0)) * TOKENS
    start = length - count
    table = tables + span * table_stride

    row = tl.arange(0, TOKENS * MEMBERS)
    token = first_token + row // MEMBERS
    member = row % MEMBERS
    inside = (token < count) & (member < GROUP)
    column = tl.arange(0, DIM)
    place = (head * GROUP + member)[:, None] * DIM + column[None, :]
    at = (begin + token).to(tl.int64)[:, None]
    queries = tl.load(query + at * query_stride + place, mask=inside[:, None], other=0.0)

    highest = tl.full((TOKENS * MEMBERS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * MEMBERS,), tl.float32)
    attended = tl.zeros((TOKENS * MEMBERS, DIM), tl.float32)
    end = tl.minimum(start + first_token + TOKENS, length)
    for begin_position in range(0, end, POSITIONS):
        position = begin_position + tl.arange(0, POSITIONS)
        there = position < end
        block = tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64)
        offset = ((block * PAGE + position % PAGE) * KV_HEADS + head) * DIM
        k = tl.load(keys + offset[:, None] + column[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        # Each row sees the first position, those that are nobody's too: no row is without a finite maximum.
        scores = tl.where((position[None, :] <= (start + token)[:, None]) & there[None, :], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - now)
        weights = tl.exp(scores - now[:, None])
        v = tl.load(values + offset[:, None] + column[None, :], mask=there[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        attended = attended * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = now
    done = (attended / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at * (KV_HEADS * GROUP * DIM) + place, done, mask=inside[:, None])


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    begins: torch.Tensor,
    *,
    most: int,
    block_size: int,
) -> torch.Tensor:
    """As spans.attend_plain; each row of `query` contiguous."""
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    for tensor in (query, keys, values):
        assert tensor.stride()[1:] == (dim, 1)
    spans = len(lengths)
    members = triton.next_power_of_2(group)
    wide = query.dtype == torch.float32
    rows = max(16, _FEW_ROWS // 2 if wide else _FEW_ROWS if tokens <= _FEW_TOKENS else _ROWS)
    of_tile = max(1, rows // members)
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    # Each span may leave one tile unfinished, and no more.
    grid = (triton.cdiv(tokens, of_tile) + min(spans, tokens) - 1, kv_heads)
    _attend[grid](
        query,
        keys,
        values,
        tables,
        lengths,
        begins,
        out,
        dim**-0.5,
        spans,
        query.stride(0),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        MEMBERS=members,
        TOKENS=of_tile,
        DIM=dim,
        PAGE=block_size,
        POSITIONS=POSITIONS,
        SPANS=triton.next_power_of_2(spans),
        PRECISION="ieee" if wide else "tf32",
        num_warps=8 if rows == _ROWS else 4,
        num_stages=2,
    )
    return out
