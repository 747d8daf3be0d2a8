"""The decoder over prompts, packed into a fixed number of tokens: one CUDA graph a size.

Prompts and pieces of them, from wherever their rows have got to: what stands before them is read from the cache. What fills the size up
comes last and is a span of its own, in the cache's scratch block. Rows share nothing but the step: what is not finite in one stays there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from omni_bus.stages.ar.attention import DecodeAttention, Span
from omni_bus.stages.ar.capture import Capture
from omni_bus.stages.ar.decoder import Decoder
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.ar.spans import Attend
from omni_bus.stages.ar.transfer import to_device

_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
_SPANS = 32  # rows of one step, at most


States = tuple[torch.Tensor, torch.Tensor | None]  # post-norm and captured, [tokens, hidden] each


def largest_size(max_tokens: int) -> int:
    """Positions that one graph holds, where a step computes up to `max_tokens` of prompts."""
    return min((size for size in _SIZES if size >= max_tokens), default=_SIZES[-1])


class SpanAttention:
    """Attention of spans whose numbers stand in tensors of fixed address; their rows' blocks, in DecodeAttention's tables."""

    def __init__(self, cache: KVCache, tables: torch.Tensor, attend: Attend) -> None:
        self._cache = cache
        self._blocks = tables
        self._attend = attend
        self._most = 0
        self._places = self._tables = self._lengths = self._begins = tables

    def begin(self, places: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, begins: torch.Tensor) -> None:
        """int64 each: where the next forward's N tokens are stored [N]; of R spans their rows' slots [R] and lengths [R], and where their
        tokens begin [R + 1]."""
        self._places, self._most = places, len(places)
        self._tables = self._blocks.index_select(0, slots)
        self._lengths, self._begins = lengths.int(), begins.int()

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.layer(layer)
        keys.index_copy_(0, self._places, key)
        values.index_copy_(0, self._places, value)
        return self._attend(
            query,
            keys,
            values,
            self._tables,
            self._lengths,
            self._begins,
            most=self._most,
            block_size=self._cache.block_size,
        )


@dataclasses.dataclass(slots=True)
class _Size:
    spans: int  # that fit, without the one that fills up
    host: torch.Tensor  # int64: positions on three axes, places in the cache, slots and lengths of the spans, where they begin
    numbers: torch.Tensor  # the same on the device
    embeds: torch.Tensor  # [tokens, hidden]
    deepstack: torch.Tensor | None  # [taps, tokens, hidden]
    run: Callable[[], States]
    has_deepstack: bool = False  # it is not zero everywhere


class PromptGraphs:
    """`taps`: layers behind which deepstack is added, where the program has such inputs."""

    def __init__(
        self,
        decoder: Decoder,
        attention: DecodeAttention,
        attend: Attend,
        *,
        capture_layer: int | None,
        max_tokens: int,
        max_batch: int,
        taps: int = 0,
    ) -> None:
        self._decoder = decoder
        self._cache = attention.cache
        self._capture_layer = capture_layer
        self._taps = taps
        self._max_batch = max_batch
        self._attention = SpanAttention(attention.cache, attention.tables, attend)
        self._wanted = [size for size in _SIZES if size <= largest_size(max_tokens)]
        self._sizes: dict[int, _Size] = {}

    def prepare(self, capture: Capture, progress: Callable[[float, str], None]) -> None:
        """Run every size, and capture it on a GPU."""
        for number, tokens in enumerate(reversed(self._wanted)):
            self._sizes[tokens] = self._prepare(tokens, capture)
            progress((number + 1) / len(self._wanted), f"prompts of {tokens} positions")

    def takes(self, spans: Sequence[Span], deepstack: torch.Tensor | None) -> bool:
        count = sum(span.count for span in spans)
        taps = 0 if deepstack is None else len(deepstack)
        return count <= self._wanted[-1] and len(spans) <= self._size(count).spans and taps <= self._taps

    def run(
        self, embeds: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span], deepstack: torch.Tensor | None = None
    ) -> States:
        """embeds [N, hidden] on the device, positions int64 [3, N] on the CPU and deepstack [taps, N, hidden] on the device of the packed
        spans → their states, valid until the next call."""
        count, cache = len(embeds), self._cache
        size = self._size(count)
        tokens, unused = len(size.embeds), size.spans - len(spans)
        ends = [span.start + span.count for span in spans]
        rows = size.host[4 * tokens :]
        axes = size.host[: 4 * tokens].view(4, tokens)
        axes[:3, :count] = positions
        axes[3, :count] = torch.cat(
            [cache.slots(span.blocks, end)[span.start :] for span, end in zip(spans, ends, strict=True)]
        )
        axes[:3, count:] = 0
        axes[3, count:] = cache.scratch * cache.block_size
        begins = itertools.accumulate((span.count for span in spans), initial=0)
        rows[:] = torch.tensor(
            [
                *([span.slot for span in spans] + [0] * (unused + 1)),
                *(ends + [0] * unused + [tokens - count]),
                *begins,
                *([count] * unused + [tokens]),
            ]
        )
        size.numbers.copy_(to_device(size.host, cache.device))  # `host` is written again while the card may still be behind
        size.embeds[:count].copy_(embeds)
        size.embeds[count:].zero_()
        if size.deepstack is not None and (deepstack is not None or size.has_deepstack):
            size.deepstack.zero_()
            size.has_deepstack = deepstack is not None
            if deepstack is not None:
                size.deepstack[: len(deepstack), :count].copy_(deepstack)
        hidden, captured = size.run()
        return hidden[:count], None if captured is None else captured[:count]

    def _size(self, count: int) -> _Size:
        return self._sizes[min(tokens for tokens in self._wanted if tokens >= count)]

    def _prepare(self, tokens: int, capture: Capture) -> _Size:
        dtype, device = next(self._decoder.parameters()).dtype, self._cache.device
        spans = min(self._max_batch, tokens, _SPANS)
        host = torch.zeros(4 * tokens + 3 * (spans + 1) + 1, dtype=torch.int64)
        host[3 * tokens : 4 * tokens] = self._cache.scratch * self._cache.block_size
        host[-1] = host[-(spans + 3)] = tokens  # all of it fills up: where the last span ends, and how long its row is
        numbers = host.to(device, copy=True)
        hidden = self._decoder.config.hidden
        embeds = torch.zeros(tokens, hidden, dtype=dtype, device=device)
        deepstack = torch.zeros(self._taps, tokens, hidden, dtype=dtype, device=device) if self._taps else None
        parts = [3 * tokens, tokens, spans + 1, spans + 1, spans + 2]

        def forward() -> States:
            positions, places, slots, lengths, begins = torch.split(numbers, parts)
            self._attention.begin(places, slots, lengths, begins)
            states: States = self._decoder(
                embeds, positions.view(3, tokens), self._attention, deepstack=deepstack, capture_layer=self._capture_layer
            )
            self._cache.capture(places, states[1])
            return states

        return _Size(spans, host, numbers, embeds, deepstack, capture(forward))
