"""Where attention meets the KV cache: one small protocol, and the caches that implement it.

The decoder hands over rotated queries and keys of all packed tokens, layer by layer; the implementation stores keys and values
and answers with the attended values. Everything that depends on the batch is put into tensors once per step (`plan`), so that
the layer loop holds no per-row Python for decode rows, and a fused kernel or a captured graph can come in behind `attend`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from omni_bus.stages.ar.spans import Attend

if TYPE_CHECKING:
    from omni_bus.stages.ar.decoder import DecoderConfig
    from omni_bus.stages.ar.kv_cache import KVCache


class Attention(Protocol):
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [N, heads, head_dim], key and value [N, kv_heads, head_dim] of N packed tokens → [N, heads, head_dim]."""


def upload(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """int64 vectors from the CPU to `device`: one copy for all, which nobody waits for."""
    packed = torch.cat(list(parts))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return list(torch.split(packed, [len(part) for part in parts]))


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of one row that a step computes: start … start+count-1, kept in the row's `blocks`, which also stand in
    DecodeAttention.tables under the row's `slot`, if it has one."""

    blocks: Sequence[int]
    start: int
    count: int
    slot: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Prefill:
    """One span of more than one position: its tokens, the slots of its whole context, and which of them each query sees. Without
    slots and mask the span is the beginning of its row: its context is itself."""

    begin: int
    end: int
    slots: torch.Tensor | None = None  # int64 [context]
    mask: torch.Tensor | None = None  # bool [groups * count, context]


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    slots: torch.Tensor  # int64 [N]: where each token's key and value go
    single: torch.Tensor  # int64 [rows]: tokens of spans of one position, decoded as one padded batch
    context: torch.Tensor  # int64 [rows, longest]: their slots; padding points to the null slot, which is always zero
    mask: torch.Tensor  # bool [rows, 1, 1, longest]
    prefills: tuple[_Prefill, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Fused:
    """The spans as spans.Attend takes them."""

    slots: torch.Tensor  # as in _Plan
    tables: torch.Tensor
    lengths: torch.Tensor
    begins: torch.Tensor
    most: int


class PagedAttention:
    """Attention over the paged cache for a mixed batch of prefill pieces and decode rows; call `plan` before each forward.

    `fused`: the kernel to compute it with, on a GPU; without one it is torch's scaled_dot_product_attention, span by span.
    """

    def __init__(self, config: DecoderConfig, cache: KVCache, fused: Attend | None = None) -> None:
        self.cache = cache
        self.kv_heads = config.kv_heads
        self.groups = config.heads // config.kv_heads
        self._fused = fused
        self._plan: _Plan | _Fused | None = None

    def plan(self, spans: Sequence[Span]) -> None:
        """The packed tokens of the next forward are those of `spans`, one span behind the other."""
        if self._fused is not None:
            self._plan = self._plan_fused(spans)
            return
        if self.cache.device.type == "cuda":
            self._plan = self._plan_on_device(spans)
            return
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
                prefills.append(_Prefill(begin, begin + span.count, slots, seen.repeat(self.groups, 1)))
        self._plan = _Plan(
            slots=torch.cat([slots[span.start :] for span, slots in zip(spans, contexts, strict=True)]),
            single=torch.tensor([begins[index] for index in single], dtype=torch.int64),
            context=context,
            mask=mask,
            prefills=tuple(prefills),
        )

    def _plan_fused(self, spans: Sequence[Span]) -> _Fused:
        cache = self.cache
        ends = [span.start + span.count for span in spans]
        pages = [-(-end // cache.block_size) for end in ends]
        tables = torch.zeros(len(spans), max(pages), dtype=torch.int64)
        for row, (span, count) in enumerate(zip(spans, pages, strict=True)):
            tables[row, :count] = torch.tensor(span.blocks[:count], dtype=torch.int64)
        slots, numbers = upload(
            (
                torch.cat([cache.slots(span.blocks, end)[span.start :] for span, end in zip(spans, ends, strict=True)]),
                torch.cat((tables.view(-1), torch.tensor([*ends, *itertools.accumulate((s.count for s in spans), initial=0)]))),
            ),
            cache.device,
        )
        flat, lengths, begins = torch.split(numbers.int(), [tables.numel(), len(spans), len(spans) + 1])
        return _Fused(slots, flat.view(tables.shape), lengths, begins, max(span.count for span in spans))

    def _plan_on_device(self, spans: Sequence[Span]) -> _Plan:
        """The same with one copy to the device for all index tensors and no wait; masks are made there. Spans that begin their row
        need neither gather nor mask."""
        cache = self.cache
        contexts = [cache.slots(span.blocks, span.start + span.count) for span in spans]
        begins = [0, *itertools.accumulate(span.count for span in spans)]
        single = [index for index, span in enumerate(spans) if span.count == 1]
        later = [index for index, span in enumerate(spans) if span.count > 1 and span.start > 0]
        longest = max((len(contexts[index]) for index in single), default=0)
        context = torch.zeros(len(single), longest, dtype=torch.int64)
        for row, index in enumerate(single):
            context[row, : len(contexts[index])] = contexts[index]
        slots, tokens, lengths, flat, *seen = upload(
            (
                torch.cat([slots[span.start :] for span, slots in zip(spans, contexts, strict=True)]),
                torch.tensor([begins[index] for index in single], dtype=torch.int64),
                torch.tensor([len(contexts[index]) for index in single], dtype=torch.int64),
                context.view(-1),
                *(contexts[index] for index in later),
            ),
            cache.device,
        )
        at = dict(zip(later, seen, strict=True))
        prefills = []
        for index, span in enumerate(spans):
            begin, end = begins[index], begins[index + 1]
            if index in at:
                queries = torch.arange(span.start, span.start + span.count, device=cache.device).repeat(self.groups)
                mask = torch.arange(len(at[index]), device=cache.device) <= queries[:, None]
                prefills.append(_Prefill(begin, end, at[index], mask))
            elif span.count > 1:
                prefills.append(_Prefill(begin, end))
        return _Plan(
            slots=slots,
            single=tokens,
            context=flat.view(len(single), longest),
            mask=(torch.arange(longest, device=cache.device) < lengths[:, None])[:, None, None],
            prefills=tuple(prefills),
        )

    @property
    def slots(self) -> torch.Tensor:
        """int64 [N]: where the planned tokens are kept."""
        assert self._plan is not None, "plan comes first"
        return self._plan.slots

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        assert plan is not None and len(plan.slots) == len(query)
        keys, values = self.cache.layer(layer)
        keys.index_copy_(0, plan.slots, key)
        values.index_copy_(0, plan.slots, value)
        if isinstance(plan, _Fused):
            assert self._fused is not None
            return self._fused(
                query,
                keys,
                values,
                plan.tables,
                plan.lengths,
                plan.begins,
                most=plan.most,
                block_size=self.cache.block_size,
            )
        if not plan.prefills:
            return self._decode(plan, query, keys, values)
        out = torch.empty_like(query)
        if len(plan.single):
            out[plan.single] = self._decode(plan, query[plan.single], keys, values)
        for piece in plan.prefills:
            own = slice(piece.begin, piece.end)
            if piece.slots is None:
                out[own] = self._begin(query[own], key[own], value[own])
            else:
                out[own] = self._prefill(piece, piece.slots, query[own], keys, values)
        return out

    def _begin(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=self.groups > 1,
        )
        return attended[0].transpose(0, 1)

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

    def _prefill(
        self, piece: _Prefill, slots: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        count, heads, head_dim = query.shape
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).reshape(1, self.kv_heads, self.groups * count, head_dim),
            keys.index_select(0, slots).transpose(0, 1)[None],
            values.index_select(0, slots).transpose(0, 1)[None],
            attn_mask=piece.mask,
        )
        return attended.reshape(heads, count, head_dim).transpose(0, 1)


class DecodeAttention:
    """Attention of a batch of fixed size, one new position a row, that reads all it needs of the batch from tensors of fixed
    address: what a captured graph holds. Call `begin` before each forward.

    The blocks of each row stand in `tables` under the row's slot, from its admission on; slot 0 has the scratch block. Without a
    kernel the keys and values of `max_length` positions are gathered, whatever the rows' lengths.
    """

    def __init__(
        self,
        config: DecoderConfig,
        cache: KVCache,
        *,
        slots: int,
        max_length: int,
        kernel: bool,
        fused: Attend | None = None,
        filling: int = 0,
    ) -> None:
        """`kernel`: ours, for steps of one position a row. `fused`: instead of that one, a kernel for any spans. `filling`: positions that
        slot 0 stands for, at least."""
        self.cache = cache
        self.kv_heads = config.kv_heads
        self.groups = config.heads // config.kv_heads
        self._length = max_length
        self._fused = fused
        self._kernel = None
        if kernel and fused is None:
            from omni_bus.stages.ar import triton_attention

            self._kernel = triton_attention.attend
        pages = -(-max(max_length, filling) // cache.block_size)
        self.tables = torch.zeros(slots + 1, pages, dtype=torch.int32, device=cache.device)
        self.tables[0] = cache.scratch
        self._positions = torch.arange(max_length, device=cache.device)
        self._rows = torch.arange(slots + 1, dtype=torch.int32, device=cache.device)
        self._slots = self._lengths = self._new = self._context = self._mask = self._pages = self._positions

    @staticmethod
    def has_kernel(config: DecoderConfig) -> bool:
        """Whether the kernel takes heads of this size. Asked on a GPU only."""
        from omni_bus.stages.ar import triton_attention

        return triton_attention.supports(config.head_dim)

    def admit(self, slot: int, blocks: Sequence[int]) -> None:
        """The row in `slot` has these blocks from now on."""
        (table,) = upload((torch.tensor(blocks, dtype=torch.int64),), self.cache.device)
        self.tables[slot, : len(blocks)] = table

    def begin(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """slots int64 [B] and lengths int32 [B], the new position included, of the next forward's rows."""
        self._slots, self._lengths = slots, lengths
        if self._kernel is not None:
            return
        size = self.cache.block_size
        pages = self.tables.index_select(0, slots).long()
        newest = (lengths.long() - 1)[:, None]
        self._new = (pages.gather(1, newest // size) * size + newest % size).view(-1)
        if self._fused is not None:
            self._pages = pages.int()
            return
        self._mask = (self._positions <= newest)[:, None, None]
        context = pages[:, self._positions // size] * size + self._positions % size
        self._context = torch.where(self._positions <= newest, context, 0).view(-1)  # elsewhere the null block

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self.cache.layer(layer)
        if self._kernel is not None:
            return self._kernel(
                query, key, value, keys, values, self.tables, self._slots, self._lengths, block_size=self.cache.block_size
            )
        keys.index_copy_(0, self._new, key)
        values.index_copy_(0, self._new, value)
        rows = len(query)
        if self._fused is not None:
            begins = self._rows[: rows + 1]
            return self._fused(
                query, keys, values, self._pages, self._lengths, begins, most=1, block_size=self.cache.block_size
            )
        shape = (rows, self._length, self.kv_heads, -1)
        attended = F.scaled_dot_product_attention(
            query.reshape(rows, self.kv_heads, self.groups, -1),
            keys.index_select(0, self._context).view(shape).transpose(1, 2),
            values.index_select(0, self._context).view(shape).transpose(1, 2),
            attn_mask=self._mask,
        )
        return attended.reshape(query.shape)


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
        return attended.reshape(rows, heads, count, head_dim).transpose(1, 2).reshape(tokens, heads, head_dim)
