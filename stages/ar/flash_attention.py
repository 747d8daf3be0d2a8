"""Attention of spans over the paged cache by FlashAttention 3, where it is installed: one call for decode rows and prompts alike.

Two packages bring it: `flash_attn_interface` (FlashAttention's own, Hopper) and vLLM, which ships a build of it. Nothing is imported
before a stage asks. It takes bfloat16 and float16 on Hopper (compute capability 9.x); others go by the Triton kernels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

PACKAGES = ("flash_attn_interface", "vllm.vllm_flash_attn")
_HEAD_DIMS = range(8, 257, 8)


def installed() -> str | None:
    """The package that would be used, found without importing it."""
    for name in PACKAGES:
        package, _, part = name.partition(".")
        found = importlib.util.find_spec(package)
        if found is None:
            continue
        places = found.submodule_search_locations
        if not part or (places and importlib.util.find_spec(name) is not None):
            return name
    return None


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot be used here, in a few words; None where it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU (H100, H200)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in _HEAD_DIMS:
        return f"it does not take heads of {head_dim}"
    if installed() is None:
        return f"neither {PACKAGES[0]} (FlashAttention 3) nor vllm is installed"
    return None


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
    pages = (len(keys) // block_size, block_size, *keys.shape[1:])
    out: torch.Tensor = _call()(
        query, keys.view(pages), values.view(pages), tables=tables, lengths=lengths, begins=begins, most=most
    )
    return out


@functools.cache
def _call() -> Callable[..., torch.Tensor]:
    """The installed package's function, with our names."""
    name = installed()
    assert name is not None, "refusal() comes first"
    module: Any = importlib.import_module(name)
    return _own_package(module) if name == PACKAGES[0] else _of_vllm(module)


def _own_package(module: Any) -> Callable[..., torch.Tensor]:
    def call(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        begins: torch.Tensor,
        most: int,
    ) -> torch.Tensor:
        found: torch.Tensor | tuple[torch.Tensor, ...] = module.flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=lengths,
            page_table=tables,
            cu_seqlens_q=begins,
            max_seqlen_q=most,
            causal=True,
        )
        return found[0] if isinstance(found, tuple) else found

    return call


def _of_vllm(module: Any) -> Callable[..., torch.Tensor]:
    def call(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        begins: torch.Tensor,
        most: int,
    ) -> torch.Tensor:
        found: torch.Tensor = module.flash_attn_varlen_func(
            query,
            keys,
            values,
            max_seqlen_q=most,
            cu_seqlens_q=begins,
            max_seqlen_k=tables.shape[1] * keys.shape[1],
            seqused_k=lengths,
            block_table=tables,
            causal=True,
            fa_version=3,
        )
        return found

    return call
