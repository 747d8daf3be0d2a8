"""Attention of spans over the paged cache by FlashAttention 3, where it is installed: one call for decode rows and prompts alike.

Two packages bring it: `flash_attn_interface` (FlashAttention's own, Hopper) and vLLM, which ships a build of it. Nothing is imported
before a stage asks. It takes bfloat16 and float16 on Hopper (compute capability 9.x); others go by the Triton kernels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pathlib
from typing import Any

import torch

PACKAGES = ("flash_attn_interface", "vllm.vllm_flash_attn")
_HEAD_DIMS = range(8, 257, 8)


@functools.cache
def installed() -> str | None:
    """The package that would be used, found without importing it."""
    for name in PACKAGES:
        package, _, part = name.partition(".")
        found = importlib.util.find_spec(package)  # of a part it would import the whole
        places = () if found is None else found.submodule_search_locations or ()
        if found is not None and (not part or any((pathlib.Path(place) / part).is_dir() for place in places)):
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
    name = installed()
    assert name is not None, "refusal() comes first"
    module = _imported(name)
    keys, values = (cache.view(-1, block_size, *cache.shape[1:]) for cache in (keys, values))
    if name == PACKAGES[0]:
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
    out: torch.Tensor = module.flash_attn_varlen_func(
        query,
        keys,
        values,
        max_seqlen_q=most,
        cu_seqlens_q=begins,
        max_seqlen_k=tables.shape[1] * block_size,
        seqused_k=lengths,
        block_table=tables,
        causal=True,
        fa_version=3,
    )
    return out


@functools.cache
def _imported(name: str) -> Any:
    return importlib.import_module(name)
