"""[stages.NAME] keys of a stage that runs on this engine. Imports no torch: a family's spec.py names it, or a subtype."""

from __future__ import annotations

from typing import Literal

import msgspec

from omni_bus.memory import check_memory


class AROptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size: int = 16  # positions in one KV block
    kv_blocks: int = 0  # 0 = enough for max_batch rows of max_length, as far as memory allows
    kv_memory_mb: int | None = None  # of KV blocks, where kv_blocks does not say; without either, `memory` decides
    memory: str = "auto"  # of a card, for weights, workspace and KV blocks together, such as "40GiB"; "auto" = a share of it
    max_prefill_tokens: int = 512  # prompt positions in one step, besides one position of every decoding row
    max_length: int = 0  # positions of a row, prompt and output; 0 = what the model can
    prefix_cache: bool = True  # keep KV blocks for requests that begin alike
    graphs: Literal["auto", "decode", "plain", "off"] = "auto"  # auto: CUDA graphs on a GPU; plain: their steps, not captured
    attention: Literal["auto", "triton", "flash", "torch"] = "auto"  # flash: FlashAttention 3; auto: the fastest
    kernels: Literal["auto", "torch"] = "auto"  # of the decoder's layers; auto: Triton on a GPU, torch: plain operators

    def __post_init__(self) -> None:
        rules = (
            ("block_size", self.block_size >= 1, "at least 1"),
            ("kv_blocks", self.kv_blocks >= 0, "at least 0"),
            ("kv_memory_mb", self.kv_memory_mb is None or self.kv_memory_mb >= 1, "at least 1"),
            ("max_prefill_tokens", self.max_prefill_tokens >= 1, "at least 1"),
            ("max_length", self.max_length == 0 or self.max_length >= 2, "0 or at least 2"),
        )
        for name, good, wanted in rules:
            if not good:
                raise ValueError(f"{name} must be {wanted}")
        check_memory(self.memory)
