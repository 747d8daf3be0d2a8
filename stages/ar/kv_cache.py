"""The paged KV cache: one key and one value tensor for all layers, cut into blocks of `block_size` positions.

Beside them, where a program wants to see the hidden states of one layer, those of every position: a block that is shared brings
them along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from omni_bus.stages.ar.decoder import DecoderConfig


class KVCache:
    """Block 0 is the null block: never handed out and always zero, so that padding may point to it whatever other blocks hold.

    One block more, `scratch`, takes what rows write that only fill up a batch of fixed size; no request's row reads it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        captures: bool = False,
    ) -> None:
        self.block_size = block_size
        self.scratch = blocks + 1
        self.device = torch.device(device)
        self._offsets = torch.arange(block_size)
        shape = (config.layers, (blocks + 2) * block_size, config.kv_heads, config.head_dim)
        self._keys = torch.empty(shape, dtype=dtype, device=device)  # pages are touched when a block is first written
        self._values = torch.empty(shape, dtype=dtype, device=device)
        width = (blocks + 2) * block_size, config.hidden
        self.captured = torch.empty(width, dtype=dtype, device=device) if captures else None
        for cache in (self._keys, self._values):
            cache[:, :block_size] = 0
            cache[:, -block_size:] = 0

    @staticmethod
    def block_bytes(config: DecoderConfig, block_size: int, dtype: torch.dtype, *, captures: bool = False) -> int:
        """Bytes of one block over all layers, captured states included."""
        values = 2 * config.layers * config.kv_heads * config.head_dim + (config.hidden if captures else 0)
        return values * block_size * dtype.itemsize

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, [slots, kv_heads, head_dim] each."""
        return self._keys[layer], self._values[layer]

    def capture(self, slots: torch.Tensor, states: torch.Tensor | None) -> None:
        """Keep the captured layer's states [N, hidden] of the positions in `slots`, int64 [N] on the device, if any are kept."""
        if self.captured is not None and states is not None:
            self.captured.index_copy_(0, slots, states)

    def slot(self, blocks: Sequence[int], position: int) -> int:
        """The slot of one position of a row."""
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def slots(self, blocks: Sequence[int], length: int) -> torch.Tensor:
        """int64 [length], on the CPU: the slots of a row's first `length` positions."""
        count = -(-length // self.block_size)
        assert count <= len(blocks), "a position outside the row's blocks"
        table = torch.tensor(blocks[:count], dtype=torch.int64)
        return (table[:, None] * self.block_size + self._offsets).view(-1)[:length]
