"""The decoder over whole prompts, packed into a fixed number of tokens: one CUDA graph a size.

For prompts computed from their first position on. What fills the size up comes last and is a prompt of its own to attention, so
that it changes nothing; its keys and values go to the cache's scratch block. Deepstack and later pieces are computed freely.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from omni_bus.stages.ar.attention import Span
from omni_bus.stages.ar.capture import Capture
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.kv_cache import KVCache

_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)

States = tuple[torch.Tensor, torch.Tensor | None]  # post-norm and captured, [tokens, hidden] each


class NotFinite(ArithmeticError):
    """Some prompt of several has states that are not finite; through what attention multiplies by zero they may be in all."""


class PromptAttention:
    """Attention within each of several packed prompts, which are stored in the cache as well."""

    def __init__(self, config: DecoderConfig, cache: KVCache) -> None:
        self.cache = cache
        self.kv_heads = config.kv_heads
        self.groups = config.heads // config.kv_heads
        self._slots = self._mask = torch.empty(0)

    def begin(self, slots: torch.Tensor, prompts: torch.Tensor, dtype: torch.dtype) -> None:
        """int64 [N] each: where the next forward's tokens are stored, and the number of the prompt they belong to."""
        order = torch.arange(len(prompts), device=prompts.device)
        seen = (prompts[:, None] == prompts) & (order[:, None] >= order)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)
        self._slots, self._mask = slots, mask.repeat(self.groups, 1)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self.cache.layer(layer)
        keys.index_copy_(0, self._slots, key)
        values.index_copy_(0, self._slots, value)
        count, heads, head_dim = query.shape
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).reshape(1, self.kv_heads, self.groups * count, head_dim),
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=self._mask,
        )
        return attended.reshape(heads, count, head_dim).transpose(0, 1)


@dataclasses.dataclass(slots=True)
class _Size:
    host: torch.Tensor  # int64 [5, tokens]: positions on three axes, slots in the cache, prompt numbers
    numbers: torch.Tensor  # the same on the device
    embeds: torch.Tensor  # [tokens, hidden]
    run: Callable[[], States]


class PromptGraphs:
    def __init__(self, decoder: Decoder, cache: KVCache, *, capture_layer: int | None, max_tokens: int) -> None:
        self._decoder = decoder
        self._cache = cache
        self._capture_layer = capture_layer
        self._attention = PromptAttention(decoder.config, cache)
        self._wanted = [size for size in _SIZES if size < max_tokens]
        self._wanted += [size for size in _SIZES if size >= max_tokens][:1]
        self._sizes: dict[int, _Size] = {}

    def prepare(self, capture: Capture, progress: Callable[[float, str], None]) -> None:
        """Run every size, and capture it on a GPU."""
        for number, tokens in enumerate(reversed(self._wanted)):
            self._sizes[tokens] = self._prepare(tokens, capture)
            progress((number + 1) / len(self._wanted), f"prompts of {tokens} positions")

    @property
    def largest(self) -> int:
        """Positions that one graph holds."""
        return self._wanted[-1]

    def takes(self, spans: Sequence[Span]) -> bool:
        return sum(span.count for span in spans) <= self.largest and all(span.start == 0 for span in spans)

    def run(self, embeds: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span]) -> States:
        """embeds [N, hidden] on the device and positions int64 [3, N] on the CPU of the packed spans → their states, valid until
        the next call. NotFinite for several spans of which one has states that are not."""
        count = len(embeds)
        size = self._sizes[min(tokens for tokens in self._wanted if tokens >= count)]
        size.host[:3, :count] = positions
        size.host[3, :count] = torch.cat([self._cache.slots(span.blocks, span.count) for span in spans])
        size.host[4, :count] = torch.repeat_interleave(torch.tensor([span.count for span in spans]))
        size.host[:3, count:] = 0
        size.host[3, count:] = self._cache.scratch * self._cache.block_size
        size.host[4, count:] = len(spans)
        size.numbers.copy_(size.host, non_blocking=True)
        size.embeds[:count].copy_(embeds)
        size.embeds[count:].zero_()
        hidden, captured = size.run()
        if len(spans) > 1 and not bool(hidden[:count].isfinite().all()):
            raise NotFinite
        return hidden[:count], None if captured is None else captured[:count]

    def _prepare(self, tokens: int, capture: Capture) -> _Size:
        dtype, device = next(self._decoder.parameters()).dtype, self._cache.device
        host = torch.zeros(5, tokens, dtype=torch.int64, pin_memory=device.type == "cuda")
        host[3] = self._cache.scratch * self._cache.block_size
        numbers = host.to(device, copy=True)
        embeds = torch.zeros(tokens, self._decoder.config.hidden, dtype=dtype, device=device)

        def forward() -> States:
            self._attention.begin(numbers[3], numbers[4], dtype)
            states: States = self._decoder(embeds, numbers[:3], self._attention, capture_layer=self._capture_layer)
            self._cache.capture(numbers[3], states[1])
            return states

        return _Size(host, numbers, embeds, capture(forward))
