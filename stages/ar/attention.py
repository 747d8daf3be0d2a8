"""Where attention meets the KV cache: one small protocol, and the two caches that implement it.

The decoder hands over rotated queries and keys of all packed tokens, layer by layer; the implementation stores keys and values
and answers with the attended values. Everything that depends on the batch is put into tensors once per step (`plan`), so that
the layer loop holds no per-row Python for decode rows, and a fused kernel or a captured graph can come in behind `attend`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from omni_bus.stages.ar.decoder import DecoderConfig
    from omni_bus.stages.ar.kv_cache import KVCache


class Attention(Protocol):
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [N, heads, head_dim], key and value [N, kv_heads, head_dim] of N packed tokens → [N, heads, head_dim]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of one row that a step computes: start … start+count-1, kept in the row's `blocks`."""

    blocks: Sequence[int]
    start: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Prefill:
    """One span of more than one position: its tokens, the slots of its whole context, and which of them each query sees."""

    begin: int
    end: int
    slots: torch.Tensor  # int64 [context]
    mask: torch.Tensor  # bool [groups * count, context]


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    slots: torch.Tensor  # int64 [N]: where each token's key and value go
    single: torch.Tensor  # int64 [rows]: tokens of spans of one position, decoded as one padded batch
    context: torch.Tensor  # int64 [rows, longest]: their slots; padding points to the null slot, which is always zero
    mask: torch.Tensor  # bool [rows, 1, 1, longest]
    prefills: tuple[_Prefill, ...]


class PagedAttention:
    """Attention over the paged cache for a mixed batch of prefill pieces and decode rows; call `plan` before each forward."""

    def __init__(self, config: DecoderConfig, cache: KVCache) -> None:
        self.cache = cache
        self.kv_heads = config.kv_heads
        self.groups = config.heads // config.kv_heads
        self._plan: _Plan | None = None

    def plan(self, spans: Sequence[Span]) -> None:
        """The packed tokens of the next forward are those of `spans`, one span behind the other."""
        cache = self.cache
        contexts = [cache.slots(span.blocks, span.start + span.count) for span in spans]
        begins: list[int] = []
        total = 0
        for span in spans:
            begins.append(total)
            total += span.count
        single = [index for index, span in enumerate(spans) if span.count == 1]
        longest = max((len(contexts[index]) for index in single), default=0)
        context = torch.zeros(len(single), longest, dtype=torch.int64)
        mask = torch.zeros(len(single), 1, 1, longest, dtype=torch.bool)
        for row, index in enumerate(single):
            length = len(contexts[index])
            context[row, :length] = contexts[index]
            mask[row, ..., :length] = True
        prefills = []
        for span, begin, slots in zip(spans, begins, contexts, strict=True):
            if span.count > 1:
                seen = torch.ones(span.count, len(slots), dtype=torch.bool).tril(span.start)
                prefills.append(
                    _Prefill(begin, begin + span.count, slots.to(cache.device), seen.repeat(self.groups, 1).to(cache.device))
                )
        self._plan = _Plan(
            slots=torch.cat([slots[span.start :] for span, slots in zip(spans, contexts, strict=True)]).to(cache.device),
            single=torch.tensor([begins[index] for index in single], dtype=torch.int64).to(cache.device),
            context=context.to(cache.device),
            mask=mask.to(cache.device),
            prefills=tuple(prefills),
        )

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        assert plan is not None and len(plan.slots) == len(query)
        keys, values = self.cache.layer(layer)
        keys.index_copy_(0, plan.slots, key)
        values.index_copy_(0, plan.slots, value)
        if not plan.prefills:
            return self._decode(plan, query, keys, values)
        out = torch.empty_like(query)
        if len(plan.single):
            out[plan.single] = self._decode(plan, query[plan.single], keys, values)
        for piece in plan.prefills:
            out[piece.begin : piece.end] = self._prefill(piece, query[piece.begin : piece.end], keys, values)
        return out

    def _decode(self, plan: _Plan, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows, longest = plan.context.shape
        flat = plan.context.view(-1)
        shape = (rows, longest, self.kv_heads, -1)
        attended = F.scaled_dot_product_attention(
            query.view(rows, self.kv_heads, self.groups, -1),  # heads that share a KV head take the place of query positions
            keys.index_select(0, flat).view(shape).transpose(1, 2),
            values.index_select(0, flat).view(shape).transpose(1, 2),
            attn_mask=plan.mask,
        )
        return attended.reshape(query.shape)

    def _prefill(self, piece: _Prefill, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        count, heads, head_dim = query.shape
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).reshape(1, self.kv_heads, self.groups * count, head_dim),
            keys.index_select(0, piece.slots).transpose(0, 1)[None],
            values.index_select(0, piece.slots).transpose(0, 1)[None],
            attn_mask=piece.mask,
        )
        return attended.view(heads, count, head_dim).transpose(0, 1)


class ContiguousAttention:
    """A plain cache for sequences that are short, of equal length and computed together, such as the residual codes of one frame."""

    def __init__(
        self, config: DecoderConfig, *, rows: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (config.layers, rows, config.kv_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.kv_heads = config.kv_heads
        self.groups = config.heads // config.kv_heads
        self.rows = 0
        self.length = 0
        self._new = 0

    def reset(self, rows: int) -> None:
        """Forget everything; `rows` sequences begin."""
        assert 0 < rows <= self.keys.shape[1]
        self.rows, self.length, self._new = rows, 0, 0

    def extend(self, count: int) -> int:
        """The next forward brings `count` more positions of every row, row by row; returns the first one's number."""
        start = self.length
        assert start + count <= self.keys.shape[3], "more positions than the cache holds"
        self.length, self._new = start + count, count
        return start

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, count, start = self.rows, self._new, self.length - self._new
        tokens, heads, head_dim = query.shape
        assert tokens == rows * count
        keys = self.keys[layer, :rows, :, : self.length]
        values = self.values[layer, :rows, :, : self.length]
        keys[:, :, start:] = key.view(rows, count, self.kv_heads, head_dim).transpose(1, 2)
        values[:, :, start:] = value.view(rows, count, self.kv_heads, head_dim).transpose(1, 2)
        mask = None
        if count > 1:
            mask = torch.ones(count, self.length, dtype=torch.bool, device=query.device).tril(start).repeat(self.groups, 1)
        attended = F.scaled_dot_product_attention(
            query.view(rows, count, heads, head_dim).transpose(1, 2).reshape(rows, self.kv_heads, -1, head_dim),
            keys,
            values,
            attn_mask=mask,
        )
        return attended.view(rows, heads, count, head_dim).transpose(1, 2).reshape(tokens, heads, head_dim)
