"""Attention of packed spans over the paged cache: the plain form, and which of its equals a stage takes.

A span is consecutive positions of one row: a prompt, a piece of one, or a single position. Keys and values of its tokens stand in the
cache before it attends.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from omni_bus.stages.ar import flash_attention


class Attend(Protocol):
    """One layer of attention of R spans with N tokens in all, one span behind the other."""

    def __call__(
        self,
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
        """query [N, heads, head_dim]; keys and values [positions, kv_heads, head_dim], one layer of the cache; tables int32 [R, n]: the
        blocks of each span's row; lengths int32 [R]: positions of each row, the span's own included; begins int32 [R + 1]: where each
        span's tokens begin in `query`, and N at the end; no span has more than `most` tokens → [N, heads, head_dim].

        Token i of span r has position lengths[r] - (begins[r + 1] - begins[r]) + i and sees all up to itself. A span may have no token.
        """


def attend_plain(
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
    """In torch operators, span by span: reads the numbers, so no graph can hold it."""
    out = torch.empty_like(query)
    kv_heads = keys.shape[1]
    groups = query.shape[1] // kv_heads
    ends = begins.tolist()
    for row, (begin, end, length) in enumerate(zip(ends, ends[1:], lengths.tolist(), strict=False)):
        count = end - begin
        assert count <= most
        if not count:
            continue
        positions = torch.arange(length, device=keys.device)
        slots = tables[row, positions // block_size].long() * block_size + positions % block_size
        seen = torch.ones(count, length, dtype=torch.bool, device=keys.device).tril(length - count).repeat(groups, 1)
        attended = F.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1).reshape(1, kv_heads, groups * count, -1),
            keys.index_select(0, slots).transpose(0, 1)[None],
            values.index_select(0, slots).transpose(0, 1)[None],
            attn_mask=seen,
        )
        out[begin:end] = attended.reshape(query.shape[1], count, -1).transpose(0, 1)
    return out


def kernel(name: str) -> Attend:
    """The fused form: "triton", ours, or "flash", FlashAttention 3. To be asked for on a GPU only."""
    if name == "flash":
        return flash_attention.attend
    from omni_bus.stages.ar import triton_spans

    attend: Attend = triton_spans.attend
    return attend
