# mypy: allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,var-annotated,unreachable"
"""Triton kernels of the code predictor: the attention of a pass, norms, rotation, cache and all, behind the joined projection; and
the choice of a code, with what is made of it: the next pass's input, and the sum of the frame's embeddings.

A frame is fifteen passes over a small decoder for a few rows: starting a kernel costs as much as running it. Imports triton: only
reached on a GPU. Values are rounded where the plain decoder rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_bus.stages.ar import dependent_launch
from omni_bus.stages.ar.dependent_launch import let_next_start, wait_for_earlier
from omni_bus.stages.ar.program import StepTensors
from omni_bus.stages.ar.triton_sampler import drawn, noise, warps_of


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    one, two, first_weight, second_weight, cos, sin, eps, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr
):
    """The two halves of one head, normalised and rotated: float32 values of DTYPE."""
    one = one.to(tl.float32)
    two = two.to(tl.float32)
    scale = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(two * two, 0)) / HEAD_DIM + eps)
    one = ((one * scale).to(DTYPE).to(tl.float32) * first_weight).to(DTYPE).to(tl.float32)
    two = ((two * scale).to(DTYPE).to(tl.float32) * second_weight).to(DTYPE).to(tl.float32)
    return (one * cos - two * sin).to(DTYPE).to(tl.float32), (two * cos + one * sin).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["start"])
def _attend(  # type: ignore[no-untyped-def]
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    eps,
    scale,
    start,
    COUNT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    POSITIONS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and query head: the new keys of its KV head normalised and rotated (and stored with the values by the head's first
    query), its own queries attended. SIZE ≥ HEAD_DIM / 2."""
    let_next_start(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    HEADS: tl.constexpr = KV_HEADS * GROUPS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    head = number // GROUPS
    position = tl.arange(0, POSITIONS)
    half = tl.arange(0, SIZE)
    inside = half < HALF
    q_first = tl.load(q_norm_ptr + half, mask=inside, other=0.0).to(tl.float32)
    q_second = tl.load(q_norm_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
    k_first = tl.load(k_norm_ptr + half, mask=inside, other=0.0).to(tl.float32)
    k_second = tl.load(k_norm_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
    angles = ()
    for index in tl.static_range(COUNT):
        angle = (start + index) * HEAD_DIM + half
        cos = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
        angles += ((cos, tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)),)
    wait_for_earlier(PDL)
    base = (row * KV_HEADS + head) * CAPACITY * HEAD_DIM
    place = base + position[:, None] * HEAD_DIM + half[None, :]
    old = (position < start)[:, None] & inside[None, :]
    new_keys = ()
    queries = ()
    said = ()
    for index in tl.static_range(COUNT):
        token = qkv_ptr + (row * COUNT + index) * WIDTH + half
        at = token + (HEADS + head) * HEAD_DIM
        new_keys += ((tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)),)
        at = token + number * HEAD_DIM
        queries += ((tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)),)
        at = token + (HEADS + KV_HEADS + head) * HEAD_DIM
        said += ((tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)),)
    key_one = tl.load(keys_ptr + place, mask=old, other=0.0).to(tl.float32)
    key_two = tl.load(keys_ptr + place + HALF, mask=old, other=0.0).to(tl.float32)
    value_one = tl.load(values_ptr + place, mask=old, other=0.0).to(tl.float32)
    value_two = tl.load(values_ptr + place + HALF, mask=old, other=0.0).to(tl.float32)
    for index in tl.static_range(COUNT):
        cos, sin = angles[index]
        one, two = new_keys[index]
        new_one, new_two = _turned(one, two, k_first, k_second, cos, sin, eps, HEAD_DIM, dtype)
        said_one, said_two = said[index]
        target = base + (start + index) * HEAD_DIM + half
        stored = inside & (number % GROUPS == 0)
        tl.store(keys_ptr + target, new_one.to(dtype), mask=stored)
        tl.store(keys_ptr + target + HALF, new_two.to(dtype), mask=stored)
        tl.store(values_ptr + target, said_one, mask=stored)
        tl.store(values_ptr + target + HALF, said_two, mask=stored)
        own = (position == start + index)[:, None]
        key_one = tl.where(own, new_one[None, :], key_one)
        key_two = tl.where(own, new_two[None, :], key_two)
        value_one = tl.where(own, said_one.to(tl.float32)[None, :], value_one)
        value_two = tl.where(own, said_two.to(tl.float32)[None, :], value_two)
    for index in tl.static_range(COUNT):
        cos, sin = angles[index]
        one, two = queries[index]
        one, two = _turned(one, two, q_first, q_second, cos, sin, eps, HEAD_DIM, dtype)
        score = tl.sum(key_one * one[None, :] + key_two * two[None, :], 1) * scale
        score = tl.where(position <= start + index, score, float("-inf"))
        weight = tl.exp(score - tl.max(score, 0))
        weight = (weight / tl.sum(weight, 0))[:, None]
        target = out_ptr + ((row * COUNT + index) * HEADS + number) * HEAD_DIM + half
        tl.store(target, tl.sum(value_one * weight, 0).to(dtype), mask=inside)
        tl.store(target + HALF, tl.sum(value_two * weight, 0).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["group", "k"])
def _choose(  # type: ignore[no-untyped-def]
    scores_ptr,
    seeds_ptr,
    draws_ptr,
    temperature_ptr,
    code0_ptr,
    embedded_ptr,
    table_ptr,
    frame_ptr,
    vector_ptr,
    sums_ptr,
    total_ptr,
    group,
    k,
    p,
    VOCAB: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: its code `group` drawn from its scores; the sum of embeddings goes from pass to pass in float32. Seeds, draws and
    temperatures are what they are since before the step began: so the noise is made while the scores are."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < VOCAB
    place = tl.arange(0, HIDDEN_BLOCK)
    mask = place < HIDDEN
    dtype: tl.constexpr = vector_ptr.dtype.element_ty
    heat = tl.where(tl.load(temperature_ptr + row) > 0, 1.0, 0.0)
    gumbel = noise(column, tl.load(seeds_ptr + row), tl.load(draws_ptr + row) * GROUPS + group, BLOCK)
    wait_for_earlier(PDL)
    score = tl.load(scores_ptr + row * VOCAB + column, mask=inside, other=float("-inf")).to(tl.float32)
    if FIRST:
        total = tl.load(embedded_ptr + row * HIDDEN + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(frame_ptr + row * GROUPS, tl.load(code0_ptr + row))
    else:
        total = tl.load(sums_ptr + row * HIDDEN + place, mask=mask, other=0.0)
    is_bfloat16: tl.constexpr = scores_ptr.dtype.element_ty == tl.bfloat16
    code = drawn(score, gumbel, inside, heat, k, p, is_bfloat16, BLOCK)
    tl.store(frame_ptr + row * GROUPS + group, code)
    vector = tl.load(table_ptr + code * HIDDEN + place, mask=mask, other=0.0)
    total += vector.to(tl.float32)
    if LAST:
        tl.store(total_ptr + row * HIDDEN + place, total.to(dtype), mask=mask)
    else:
        tl.store(vector_ptr + row * HIDDEN + place, vector, mask=mask)
        tl.store(sums_ptr + row * HIDDEN + place, total, mask=mask)


def attend(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
    *,
    rows: int,
    start: int,
) -> torch.Tensor:
    """qkv [rows * count, (heads + 2 kv_heads) * head_dim] of positions start … start + count - 1; cos and sin [capacity, head_dim];
    keys and values [rows or more, kv_heads, capacity, head_dim], one layer's cache → attended [rows * count, heads * head_dim]."""
    tokens, width = qkv.shape
    _, kv_heads, capacity, head_dim = keys.shape
    heads = width // head_dim - 2 * kv_heads
    assert qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous() and cos.shape == (capacity, head_dim)
    out = qkv.new_empty(tokens, heads * head_dim)
    _attend[(rows, heads)](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        keys,
        values,
        out,
        eps,
        head_dim**-0.5,
        start,
        COUNT=tokens // rows,
        KV_HEADS=kv_heads,
        GROUPS=heads // kv_heads,
        CAPACITY=capacity,
        POSITIONS=triton.next_power_of_2(capacity),
        HEAD_DIM=head_dim,
        SIZE=triton.next_power_of_2(head_dim // 2),
        num_warps=1,  # nothing then passes between warps: with four, barriers are most of the time
        **dependent_launch.options(qkv),
    )
    return out


class Frames:
    """The frames of one call, as its passes choose their codes: tensors are made once, each pass's choice is one kernel."""

    def __init__(self, codes: torch.Tensor, embedded: torch.Tensor, groups: int) -> None:
        """codes int64 [rows]: code 0 of each; embedded [rows, hidden]: their embeddings."""
        assert embedded.is_contiguous() and codes.is_contiguous()
        rows, hidden = embedded.shape
        self.codes, self.embedded = codes, embedded
        self.frame = codes.new_empty(rows, groups)  # int64: what is chosen
        self.total = torch.empty_like(embedded)  # the sum of all embeddings, behind the last choice
        self._sums = torch.empty(rows, hidden, dtype=torch.float32, device=embedded.device)

    def choose(
        self,
        group: int,
        scores: torch.Tensor,
        table: torch.Tensor,
        step: StepTensors,
        *,
        top_k: int,
        top_p: float,
    ) -> torch.Tensor:
        """Code `group` of each row from its scores [rows, vocab], by draw `group` of the row's frame (rows of temperature 0: the best) →
        its row of the embedding table [vocab, hidden], [rows, hidden]; of the last group nothing that is of use."""
        rows, vocab = scores.shape
        groups, hidden = self.frame.shape[1], self.embedded.shape[1]
        assert scores.is_contiguous() and table.is_contiguous() and table.shape[1] == hidden
        assert table.dtype == self.embedded.dtype
        vector = torch.empty_like(self.embedded)
        block = triton.next_power_of_2(vocab)
        _choose[(rows,)](
            scores,
            step.seeds,
            step.draws,
            step.temperature,
            self.codes,
            self.embedded,
            table,
            self.frame,
            vector,
            self._sums,
            self.total,
            group,
            top_k,
            top_p,
            VOCAB=vocab,
            HIDDEN=hidden,
            GROUPS=groups,
            BLOCK=block,
            HIDDEN_BLOCK=triton.next_power_of_2(hidden),
            FIRST=group == 1,
            LAST=group == groups - 1,
            num_warps=warps_of(block),
            **dependent_launch.options(scores),
        )
        return vector
