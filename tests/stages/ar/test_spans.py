"""Attention of packed spans: the plain form against dense attention, the forms that hand over to it, and what FlashAttention is handed."""

from __future__ import annotations

import importlib
import pathlib
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from omni_bus.errors import ConfigError
from omni_bus.stages.ar import flash_attention
from omni_bus.stages.ar.attention import DecodeAttention, PagedAttention, Span
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.ar.mlp import DenseConfig
from omni_bus.stages.ar.options import AROptions
from omni_bus.stages.ar.prompt_graphs import SpanAttention
from omni_bus.stages.ar.spans import attend_plain
from omni_bus.stages.ar.stage import ARStage

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
CONFIG = DecoderConfig(
    hidden=HEADS * DIM,
    layers=1,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    mlp=DenseConfig(intermediate=8),
    max_positions=64,
)
BLOCKS = ([1, 9, 3, 7], [2, 4], [11], [6, 5, 10, 12], [8])
SPANS = [
    Span(blocks, start, count, slot)
    for slot, (blocks, start, count) in enumerate(zip(BLOCKS, (0, 3, 0, 9, 2), (14, 5, 1, 7, 1), strict=True), 1)
]


def new_cache() -> KVCache:
    """The same contents each time."""
    cache = KVCache(CONFIG, blocks=12, block_size=BLOCK, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(1)
    for tensor in cache.layer(0):
        tensor[BLOCK:] = torch.randn(tensor[BLOCK:].shape, generator=generator)
    return cache


def packed(tokens: int) -> list[torch.Tensor]:
    joined = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(2))
    return list(torch.split(joined, [HEADS, KV_HEADS, KV_HEADS], dim=1))


def dense(span: Span, cache: KVCache, query: torch.Tensor) -> torch.Tensor:
    """One span's answer, token by token, over the keys and values of its own row up to that token."""
    keys, values = cache.layer(0)
    rows = []
    for index in range(span.count):
        seen = cache.slots(span.blocks, span.start + index + 1)
        k, v = (tensor[seen].repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for tensor in (keys, values))
        rows.append(F.softmax(query[index][:, None] @ k.mT * DIM**-0.5, dim=-1) @ v)
    return torch.stack(rows)[:, :, 0]


def test_each_token_sees_its_own_row_up_to_itself() -> None:
    cache, parts = new_cache(), packed(sum(span.count for span in SPANS))
    attention = PagedAttention(CONFIG, cache, attend_plain)
    attention.plan(SPANS)
    out = attention.attend(0, *parts)
    wanted, begin = [], 0
    for span in SPANS:
        wanted.append(dense(span, cache, parts[0][begin : begin + span.count]))
        begin += span.count
    torch.testing.assert_close(out, torch.cat(wanted))


def test_the_spans_as_a_kernel_takes_them_are_those_of_the_other_form() -> None:
    parts = packed(sum(span.count for span in SPANS))
    results, caches = [], []
    for fused in (None, attend_plain):
        cache = new_cache()
        attention = PagedAttention(CONFIG, cache, fused)
        attention.plan(SPANS)
        results.append(attention.attend(0, *parts))
        caches.append(cache.layer(0))
    torch.testing.assert_close(*results)
    for ours, theirs in zip(*caches, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("filled", [0, 3, 20])
def test_spans_in_tensors_of_fixed_size_are_the_same_whatever_fills_them_up(filled: int) -> None:
    tokens = sum(span.count for span in SPANS)
    parts = packed(tokens + filled)
    cache = new_cache()
    whole = PagedAttention(CONFIG, cache)
    whole.plan(SPANS)
    wanted = whole.attend(0, *(part[:tokens] for part in parts))
    cache = new_cache()
    decode = DecodeAttention(CONFIG, cache, slots=8, max_length=16, kernel=False, filling=tokens + filled)
    for span in SPANS:
        decode.admit(span.slot, span.blocks)
    fixed = SpanAttention(cache, decode.tables, attend_plain)
    places = [cache.slots(span.blocks, span.start + span.count)[span.start :] for span in SPANS]
    counts = [span.count for span in SPANS] + [0, 0, filled]
    fixed.begin(
        torch.cat([*places, torch.full((filled,), cache.scratch * BLOCK)]),
        torch.tensor([span.slot for span in SPANS] + [0, 0, 0]),
        torch.tensor([span.start + span.count for span in SPANS] + [0, 0, filled]),
        torch.tensor([0, *counts]).cumsum(0),
    )
    torch.testing.assert_close(fixed.attend(0, *parts)[:tokens], wanted)


def test_decode_steps_by_a_kernel_for_spans_are_those_of_the_other_form() -> None:
    parts, results = packed(3), []
    for fused in (None, attend_plain):
        decode = DecodeAttention(CONFIG, new_cache(), slots=4, max_length=16, kernel=False, fused=fused)
        for slot, blocks in enumerate(BLOCKS[:2], 1):
            decode.admit(slot, blocks)
        decode.begin(torch.tensor([2, 1, 0]), torch.tensor([7, 11, 1], dtype=torch.int32))
        results.append(decode.attend(0, *parts))
    torch.testing.assert_close(results[0][:2], results[1][:2])


# The packages cannot be imported without a GPU: these have their signatures, and compute by the plain form what they are asked.
STANDINS = {
    "flash_attn_interface": """
        def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, causal):
            assert causal
            return attend(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q)
    """,
    "vllm.vllm_flash_attn": """
        def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, *, seqused_k, block_table, causal, fa_version):
            assert causal and fa_version == 3 and max_seqlen_k >= int(seqused_k.max())
            return attend(q, k, v, block_table, seqused_k, cu_seqlens_q, max_seqlen_q)
    """,
}
COMMON = """
    from omni_bus.stages.ar.spans import attend_plain

    def attend(query, keys, values, tables, lengths, begins, most):
        pages, size, *shape = keys.shape
        flat = (tensor.reshape(pages * size, *shape) for tensor in (keys, values))
        return attend_plain(query, *flat, tables, lengths, begins, most=most, block_size=size)
"""


def forget() -> None:
    """What was found and imported before."""
    flash_attention.installed.cache_clear()
    flash_attention._imported.cache_clear()


@pytest.fixture(params=STANDINS)
def package(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name: str = request.param
    folder = tmp_path
    for part in name.split("."):
        folder /= part
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / "__init__.py").write_text(textwrap.dedent(COMMON) + textwrap.dedent(STANDINS[name]))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    forget()
    yield name
    forget()
    for imported in [module for module in sys.modules if module.partition(".")[0] == name.partition(".")[0]]:
        del sys.modules[imported]


def test_flash_attention_is_handed_the_spans_as_its_packages_take_them(package: str) -> None:
    assert flash_attention.installed() == package
    assert package.partition(".")[0] not in sys.modules, "to look for it imports nothing"
    parts, results = packed(sum(span.count for span in SPANS)), []
    for fused in (attend_plain, flash_attention.attend):
        attention = PagedAttention(CONFIG, new_cache(), fused)
        attention.plan(SPANS)
        results.append(attention.attend(0, *parts))
    torch.testing.assert_close(*results)


def test_flash_attention_says_why_it_cannot_be_used() -> None:
    assert flash_attention.installed() is None, "no such package is among those of the tests"
    assert flash_attention.refusal(torch.device("cpu"), torch.bfloat16, 128) == "it needs a GPU"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "major", "why"),
    [
        (torch.bfloat16, 128, 8, "it needs a Hopper GPU (H100, H200)"),
        (torch.float32, 128, 9, "it takes bfloat16 and float16, not float32"),
        (torch.bfloat16, 100, 9, "it does not take heads of 100"),
        (torch.bfloat16, 128, 9, "neither flash_attn_interface (FlashAttention 3) nor vllm is installed"),
    ],
)
def test_flash_attention_on_a_gpu_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, major: int, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert flash_attention.refusal(torch.device("cuda"), dtype, head_dim) == why


@pytest.mark.parametrize(
    ("attention", "flash", "triton", "taken"),
    [
        ("auto", True, True, ("flash", "triton")),
        ("auto", False, True, ("triton", "triton")),
        ("auto", True, False, ("flash", "")),
        ("auto", False, False, ("", "")),
        ("flash", True, True, ("flash", "flash")),
        ("triton", True, True, ("triton", "triton")),
        ("torch", True, True, ("", "")),
        ("flash", False, True, 'stage llm: attention = "flash": it needs a Hopper GPU (H100, H200); leave it at "auto"'),
        ("triton", True, False, 'stage llm: attention = "triton": it has no kernel for this head size; leave it at "auto"'),
    ],
)
def test_a_stage_takes_the_kernels_that_are_there(
    monkeypatch: pytest.MonkeyPatch, attention: str, flash: bool, triton: bool, taken: tuple[str, str] | str
) -> None:
    """On a card, of which nothing is used here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 if flash else 8, 0))
    monkeypatch.setattr(flash_attention, "installed", lambda: "flash_attn_interface")
    monkeypatch.setattr(DecodeAttention, "has_kernel", lambda config: triton)
    with torch.device("meta"):
        decoder = Decoder(CONFIG).to(torch.bfloat16)
    stage = ARStage(SimpleNamespace(decoder=decoder))  # type: ignore[arg-type]
    stage._device = torch.device("cuda")
    context = SimpleNamespace(stage="llm")
    options = AROptions(attention=attention)  # type: ignore[arg-type]
    if isinstance(taken, str):
        with pytest.raises(ConfigError) as refused:
            stage._kernels(context, options)  # type: ignore[arg-type]
        assert refused.value.message == taken
    else:
        assert stage._kernels(context, options) == taken  # type: ignore[arg-type]
