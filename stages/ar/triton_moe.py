# mypy: allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment,misc,unreachable,var-annotated"
"""Triton kernels of a mixture of experts: every weight that some token chose is read once a step, with no word to the host.

A token has `slots` pairs (token, expert): its chosen experts, then the shared expert cut into parts of an expert's size, if it has
one. Pairs are counted through, pair = token * slots + slot. A step is: route (softmax, top k) → align (pairs grouped by expert, in
blocks of BLOCK_M) → gate, up, silu·mul → down → combine (weighted sum over a token's pairs in order of choice, so that a token's
result does not depend on the rest of the batch; with the residual and the next norm on it). With very few tokens nearly every
pair has an expert to itself: then `align` is left out and each pair is a matrix-vector product of its own.

Weights in FP8 (fp8.py; SCALED in the kernels) are brought to the dtype of x in registers, which holds every code as it is, and a
channel's scale is multiplied in behind its sum.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from omni_bus.stages.ar import dependent_launch
from omni_bus.stages.ar.dependent_launch import let_next_start, wait_for_earlier
from omni_bus.stages.ar.fp8 import FP8
from omni_bus.stages.ar.triton_layers import norm_warps, scaled_root
from omni_bus.stages.ar.triton_linear import block_of, depth_block

Scales = tuple[torch.Tensor, torch.Tensor]  # of gate_up and of down, float32 [groups, outputs] each

DIRECT_TOKENS = 2  # up to here each pair is computed by itself
_ALIGN_CHUNK = 1024


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    weights_ptr,
    chosen_ptr,
    stride,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERT_BLOCK)
    real = expert < EXPERTS
    logit = tl.load(logits_ptr + token * stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    prob = tl.exp(logit - tl.max(logit, 0))
    prob = prob / tl.sum(prob, 0)
    slot = tl.arange(0, SLOT_BLOCK)
    weights = tl.zeros([SLOT_BLOCK], dtype=tl.float32)
    chosen = tl.zeros([SLOT_BLOCK], dtype=tl.int32)
    left = tl.where(real, prob, -1.0)
    for rank in tl.static_range(TOP_K):
        # Scores that are not numbers must not lead outside the weights.
        score, best = tl.max(left, 0, return_indices=True)
        best = tl.minimum(best, EXPERTS - 1)
        weights = tl.where(slot == rank, score, weights)
        chosen = tl.where(slot == rank, best, chosen)
        left = tl.where(expert == best, -1.0, left)
    if NORMALISE:
        weights = weights / tl.sum(weights, 0)
    if SHARED > 0:
        gate = tl.load(logits_ptr + token * stride + EXPERTS).to(tl.float32)
        weights = tl.where(slot >= TOP_K, 1.0 / (1.0 + tl.exp(-gate)), weights)
        chosen = tl.where(slot >= TOP_K, EXPERTS + slot - TOP_K, chosen)
    at = token * (TOP_K + SHARED) + slot
    tl.store(weights_ptr + at, weights.to(weights_ptr.dtype.element_ty), mask=slot < TOP_K + SHARED)
    tl.store(chosen_ptr + at, chosen, mask=slot < TOP_K + SHARED)


@triton.jit(do_not_specialize=["pairs", "max_blocks"])
def _align_kernel(  # type: ignore[no-untyped-def]
    chosen_ptr,
    pair_ptr,
    expert_ptr,
    pairs,
    max_blocks,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program an expert: counts everyone's pairs, finds its own first block, lists its pairs there in order, fills up with `pairs`."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    mine = tl.program_id(0)
    group = tl.arange(0, GROUP_BLOCK)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([GROUP_BLOCK], dtype=tl.int32)
    for begin in range(0, pairs, CHUNK):
        pair = begin + lane
        chosen = tl.load(chosen_ptr + pair, mask=pair < pairs, other=GROUPS)
        counts += tl.histogram(chosen, GROUP_BLOCK)
    blocks = tl.where(group < GROUPS, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(group < mine, blocks, 0), 0)
    own = tl.sum(tl.where(group == mine, blocks, 0), 0)
    seen = own * 0
    for begin in range(0, pairs, CHUNK):
        pair = begin + lane
        chosen = tl.load(chosen_ptr + pair, mask=pair < pairs, other=GROUPS)
        member = (chosen == mine).to(tl.int32)
        place = seen + tl.cumsum(member, 0) - 1
        tl.store(pair_ptr + first * BLOCK_M + place, pair, mask=member > 0)
        seen += tl.sum(member, 0)
    fill = seen + tl.arange(0, BLOCK_M)
    tl.store(pair_ptr + first * BLOCK_M + fill, tl.zeros([BLOCK_M], dtype=tl.int32) + pairs, mask=fill < own * BLOCK_M)
    for begin in range(0, own, CHUNK):
        tl.store(expert_ptr + first + begin + lane, tl.zeros([CHUNK], dtype=tl.int32) + mine, mask=begin + lane < own)
    if mine == GROUPS - 1:
        for begin in range(first + own, max_blocks, CHUNK):
            tl.store(expert_ptr + begin + lane, tl.zeros([CHUNK], dtype=tl.int32) - 1, mask=begin + lane < max_blocks)


@triton.jit(do_not_specialize=["pairs"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    pair_ptr,
    expert_ptr,
    pairs,
    eps,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert < 0:
        return
    pair = tl.load(pair_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = pair < pairs
    token = tl.where(valid, pair // SLOTS, 0)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(column < INTER, column, 0)
    depth = tl.arange(0, BLOCK_K)
    x_at = x_ptr + token.to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    gate_at = weight_ptr + expert.to(tl.int64) * (2 * INTER * HIDDEN) + row[None, :] * HIDDEN + depth[:, None]
    up_at = gate_at + INTER * HIDDEN
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for begin in range(0, HIDDEN, BLOCK_K):
        if HIDDEN % BLOCK_K == 0:
            x = tl.load(x_at + begin, mask=valid[:, None], other=0.0)
            gate_weight = tl.load(gate_at + begin)
            up_weight = tl.load(up_at + begin)
        else:
            inside = begin + depth < HIDDEN
            x = tl.load(x_at + begin, mask=valid[:, None] & inside[None, :], other=0.0)
            gate_weight = tl.load(gate_at + begin, mask=inside[:, None], other=0.0)
            up_weight = tl.load(up_at + begin, mask=inside[:, None], other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            scale = tl.load(norm_ptr + begin + depth, mask=begin + depth < HIDDEN, other=0.0).to(tl.float32)
            x = (wide * scale[None, :]).to(out_ptr.dtype.element_ty)
        if SCALED:
            gate_weight = gate_weight.to(x.dtype)
            up_weight = up_weight.to(x.dtype)
        gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
        up = tl.dot(x, up_weight, up, input_precision="ieee")
    if NORM:
        root = tl.rsqrt(squares / HIDDEN + eps)[:, None]
        gate = gate * root
        up = up * root
    if SCALED:
        gate_scale_at = scale_ptr + expert.to(tl.int64) * (2 * INTER) + row
        gate = gate * tl.load(gate_scale_at)[None, :]
        up = up * tl.load(gate_scale_at + INTER)[None, :]
    out = gate / (1.0 + tl.exp(-gate)) * up
    out_at = out_ptr + pair.to(tl.int64)[:, None] * INTER + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (column < INTER)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    pair_ptr,
    expert_ptr,
    pairs,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert < 0:
        return
    pair = tl.load(pair_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = pair < pairs
    source = tl.where(valid, pair, 0).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(column < HIDDEN, column, 0)
    depth = tl.arange(0, BLOCK_K)
    x_at = x_ptr + source[:, None] * INTER + depth[None, :]
    weight_at = weight_ptr + expert.to(tl.int64) * (HIDDEN * INTER) + row[None, :] * INTER + depth[:, None]
    out = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for begin in range(0, INTER, BLOCK_K):
        if INTER % BLOCK_K == 0:
            x = tl.load(x_at + begin, mask=valid[:, None], other=0.0)
            weight = tl.load(weight_at + begin)
        else:
            inside = begin + depth < INTER
            x = tl.load(x_at + begin, mask=valid[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_at + begin, mask=inside[:, None], other=0.0)
        if SCALED:
            weight = weight.to(x.dtype)
        out = tl.dot(x, weight, out, input_precision="ieee")
    if SCALED:
        out = out * tl.load(scale_ptr + expert.to(tl.int64) * HIDDEN + row)[None, :]
    out_at = out_ptr + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (column < HIDDEN)[None, :])


@triton.jit
def _gate_up_direct_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    chosen_ptr,
    eps,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One pair, and TURNS times ROWS of its values: a row of each weight a warp, the input read by every warp for itself."""
    let_next_start(PDL)
    pair = tl.program_id(1)
    lane = tl.arange(0, ROWS)
    depth = tl.arange(0, BLOCK_K)[None, :]
    same = lane[:, None] * 0 + depth
    norms = ()
    if NORM:
        for begin in tl.static_range(0, HIDDEN, BLOCK_K):
            norms += (block_of(norm_ptr + same, begin, depth, HIDDEN, BLOCK_K),)
    wait_for_earlier(PDL)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    x_at = x_ptr + (pair // SLOTS).to(tl.int64) * HIDDEN + same
    inputs = ()
    for begin in tl.static_range(0, HIDDEN, BLOCK_K):
        inputs += (block_of(x_at, begin, depth, HIDDEN, BLOCK_K),)
    for turn in tl.static_range(TURNS):
        column = (tl.program_id(0) * TURNS + turn) * ROWS + lane
        row = tl.where(column < INTER, column, 0)
        gate_at = weight_ptr + expert * (2 * INTER * HIDDEN) + row[:, None] * HIDDEN + depth
        up_at = gate_at + INTER * HIDDEN
        gates = tl.zeros([ROWS, BLOCK_K], dtype=tl.float32)
        ups = tl.zeros([ROWS, BLOCK_K], dtype=tl.float32)
        squares = tl.zeros([ROWS, BLOCK_K], dtype=tl.float32)
        for block in tl.static_range((HIDDEN + BLOCK_K - 1) // BLOCK_K):
            begin = block * BLOCK_K
            gate_weight = block_of(gate_at, begin, depth, HIDDEN, BLOCK_K).to(tl.float32)
            up_weight = block_of(up_at, begin, depth, HIDDEN, BLOCK_K).to(tl.float32)
            x = inputs[block].to(tl.float32)
            if NORM:
                squares += x * x
                x = x * norms[block].to(tl.float32)
            gates += gate_weight * x
            ups += up_weight * x
        gate = tl.sum(gates, 1)
        up = tl.sum(ups, 1)
        if NORM:
            root = tl.rsqrt(tl.sum(squares, 1) / HIDDEN + eps)
            gate = gate * root
            up = up * root
        if SCALED:
            gate_scale_at = scale_ptr + expert * (2 * INTER) + row
            gate = gate * tl.load(gate_scale_at)
            up = up * tl.load(gate_scale_at + INTER)
        out = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + pair.to(tl.int64) * INTER + column, out.to(out_ptr.dtype.element_ty), mask=column < INTER)


@triton.jit
def _down_direct_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    weights_ptr,
    chosen_ptr,
    residual_ptr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS values, one a warp, of one pair; with SUM of one token, down and combine in one: residual + the weighted sum over its pairs,
    SLOTS of them."""
    let_next_start(PDL)
    first = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, ROWS)
    column = tl.program_id(0) * ROWS + lane
    row = tl.where(column < HIDDEN, column, 0)
    depth = tl.arange(0, BLOCK_K)[None, :]
    same = lane[:, None] * 0 + depth
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wait_for_earlier(PDL)
    numbers = ()
    shares = ()
    for slot in tl.static_range(SLOTS):
        numbers += (tl.load(chosen_ptr + first * SLOTS + slot).to(tl.int64),)
        if SUM:
            shares += (tl.load(weights_ptr + first * SLOTS + slot).to(tl.float32),)
    if SUM:
        residual = tl.load(residual_ptr + first * HIDDEN + row).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK_K], dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        expert = numbers[slot]
        x_at = x_ptr + (first * SLOTS + slot) * INTER + same
        weight_at = weight_ptr + expert * (HIDDEN * INTER) + row[:, None] * INTER + depth
        if SCALED:
            scale = tl.load(scale_ptr + expert * HIDDEN + row)
        for begin in tl.static_range(0, INTER, BLOCK_K):
            weight = block_of(weight_at, begin, depth, INTER, BLOCK_K).to(tl.float32)
            x = block_of(x_at, begin, depth, INTER, BLOCK_K).to(tl.float32)
            if SUM:
                if SCALED:  # each slot's expert has scales of its own, and all go into one sum
                    weight = weight * scale[:, None]
                x = x * shares[slot]
            total += weight * x
    out = tl.sum(total, 1)
    if SUM:
        out = out.to(dtype).to(tl.float32) + residual
    elif SCALED:
        out = out * tl.load(scale_ptr + numbers[0] * HIDDEN + row)
    tl.store(out_ptr + first * HIDDEN + column, out.to(dtype), mask=column < HIDDEN)


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    part_ptr,
    weights_ptr,
    place_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    sum_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PLACED: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_earlier(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        source = pair
        if PLACED:
            source = tl.load(place_ptr + pair).to(tl.int64)
        part = tl.load(part_ptr + source * HIDDEN + column, mask=mask, other=0.0)
        total += tl.load(weights_ptr + pair).to(tl.float32) * part.to(tl.float32)
    at = token * HIDDEN + column
    value = total.to(dtype)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        value = (value.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    if NORM:
        weight = tl.load(norm_ptr + column, mask=mask, other=0.0)
        tl.store(sum_ptr + at, value, mask=mask)
        value = scaled_root(value.to(tl.float32), weight, eps, HIDDEN, dtype).to(dtype)
    tl.store(out_ptr + at, value, mask=mask)


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Of one expert product: columns and depth of a program's weight tile, its warps and pipeline stages."""

    columns: int
    depth: int
    warps: int
    stages: int


def route(logits: torch.Tensor, *, experts: int, top_k: int, shared: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router scores [N, at least experts] (column `experts`: the shared expert's gate, where `shared` parts of one follow the experts)
    → weights [N, top_k + shared] in their dtype, numbers int32 [N, top_k + shared]."""
    tokens, slots = len(logits), top_k + shared
    assert logits.stride(1) == 1 and logits.shape[1] >= experts + (shared > 0)
    weights = logits.new_empty(tokens, slots)
    chosen = torch.empty(tokens, slots, dtype=torch.int32, device=logits.device)
    _route_kernel[(tokens,)](
        logits,
        weights,
        chosen,
        logits.stride(0),
        experts,
        triton.next_power_of_2(experts),
        top_k,
        shared,
        triton.next_power_of_2(slots),
        normalise,
        num_warps=1,
        **dependent_launch.options(logits),
    )
    return weights, chosen


def align(chosen: torch.Tensor, *, groups: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers int32 [N, slots] below `groups` → pairs int32 [blocks, block_m], grouped by number and filled up with N * slots, and each
    block's number int32 [blocks], -1 for blocks that are not needed. `blocks` is a bound that holds whatever was chosen."""
    pairs = chosen.numel()
    most = min(pairs, pairs // block_m + groups)
    pair_table = torch.empty(most, block_m, dtype=torch.int32, device=chosen.device)
    expert_table = torch.empty(most, dtype=torch.int32, device=chosen.device)
    group_block = triton.next_power_of_2(groups + 1)
    _align_kernel[(groups,)](
        chosen,
        pair_table,
        expert_table,
        pairs,
        most,
        groups,
        group_block,
        block_m,
        _ALIGN_CHUNK,
        num_warps=4,
        **dependent_launch.options(chosen),
    )
    return pair_table, expert_table


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    scales: Scales | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """x [N, hidden], numbers int32 [N, slots], gate_up [groups, 2 * inter, hidden], down [groups, hidden, inter] → each pair's expert
    output, not yet weighted, [N * slots, hidden]. With norm_weight [hidden]: of the normalised x, as triton_linear does it. With scales
    both weights are FP8."""
    tokens, slots = chosen.shape
    groups, hidden, inter = down.shape
    _check(x, chosen, gate_up, down, scales)
    first_scale, second_scale = (gate_up, down) if scales is None else scales
    pairs = tokens * slots
    inner = x.new_empty(pairs, inter)
    out = x.new_empty(pairs, hidden)
    if tokens <= DIRECT_TOKENS:
        _gate_up_direct(x, chosen, gate_up, scales, inner, norm_weight, eps)
        _down_direct(inner, chosen.view(-1, 1), down, scales, out)
        return out
    block_m, first, second = tiles(tokens, slots, groups, x.dtype)
    pair_table, expert_table = align(chosen, groups=groups, block_m=block_m)
    blocks = len(expert_table)
    _gate_up_kernel[(triton.cdiv(inter, first.columns), blocks)](
        x,
        x if norm_weight is None else norm_weight,
        gate_up,
        first_scale,
        inner,
        pair_table,
        expert_table,
        pairs,
        eps,
        hidden,
        inter,
        slots,
        block_m,
        first.columns,
        depth_block(hidden, first.depth),
        norm_weight is not None,
        scales is not None,
        num_warps=first.warps,
        num_stages=first.stages,
        **dependent_launch.options(x),
    )
    _down_kernel[(triton.cdiv(hidden, second.columns), blocks)](
        inner,
        down,
        second_scale,
        out,
        pair_table,
        expert_table,
        pairs,
        hidden,
        inter,
        block_m,
        second.columns,
        depth_block(inter, second.depth),
        scales is not None,
        num_warps=second.warps,
        num_stages=second.stages,
        **dependent_launch.options(x),
    )
    return out


def experts_sum(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    scales: Scales | None = None,
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """x + the weighted sum of the experts of its norm, [N, hidden]: `experts` and `combine` with x as residual, for any N; where N is at
    most DIRECT_TOKENS in one kernel less."""
    tokens, slots = chosen.shape
    if tokens > DIRECT_TOKENS:
        parts = experts(x, chosen, gate_up, down, scales=scales, norm_weight=norm_weight, eps=eps)
        return combine(parts, weights, residual=x)[0]
    _check(x, chosen, gate_up, down, scales)
    inner = x.new_empty(tokens * slots, down.shape[2])
    _gate_up_direct(x, chosen, gate_up, scales, inner, norm_weight, eps)
    out = torch.empty_like(x)
    _down_direct(inner, chosen, down, scales, out, weights, x)
    return out


def _gate_up_direct(
    x: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    scales: Scales | None,
    inner: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> None:
    hidden, (pairs, inter) = x.shape[1], inner.shape
    warps, turns = 4, 2 if hidden <= 1024 else 1
    _gate_up_direct_kernel[(triton.cdiv(inter, warps * turns), pairs)](
        x,
        x if norm_weight is None else norm_weight,
        gate_up,
        gate_up if scales is None else scales[0],
        inner,
        chosen,
        eps,
        hidden,
        inter,
        chosen.shape[1],
        warps,
        turns,
        depth_block(hidden, 256),
        norm_weight is not None,
        scales is not None,
        num_warps=warps,
        **dependent_launch.options(x),
    )


def _down_direct(
    inner: torch.Tensor,
    chosen: torch.Tensor,
    down: torch.Tensor,
    scales: Scales | None,
    out: torch.Tensor,
    weights: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """inner [N * slots, inter], chosen [N, slots] → out [N, hidden]. Without weights and residual there is one slot."""
    tokens, slots = chosen.shape
    hidden, inter = down.shape[1:]
    assert (weights is not None and residual is not None) or slots == 1
    warps = 4
    _down_direct_kernel[(triton.cdiv(hidden, warps), tokens)](
        inner,
        down,
        down if scales is None else scales[1],
        out,
        inner if weights is None else weights,
        chosen,
        inner if residual is None else residual,
        hidden,
        inter,
        slots,
        warps,
        depth_block(inter, 256),
        scales is not None,
        weights is not None,
        num_warps=warps,
        **dependent_launch.options(inner),
    )


def _check(x: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, scales: Scales | None) -> None:
    groups, hidden, inter = down.shape
    assert x.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous() and chosen.is_contiguous()
    assert x.shape == (len(chosen), hidden) and gate_up.shape == (groups, 2 * inter, hidden)
    assert gate_up.dtype == down.dtype == (x.dtype if scales is None else FP8) and chosen.dtype == torch.int32
    for weight, scale in zip((gate_up, down), scales or (), strict=False):
        assert scale.is_contiguous() and scale.shape == weight.shape[:2] and scale.dtype == torch.float32


def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    *,
    place: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over a token's pairs: parts [N * slots, hidden], weights [N, slots]; pair p is row place[p] of parts, or row p.

    With residual [N, hidden] and norm_weight [hidden]: (norm of residual + sum, residual + sum); without a norm: the sum, with the
    residual if there is one, twice.
    """
    tokens, slots = weights.shape
    hidden = parts.shape[1]
    assert parts.is_contiguous() and weights.is_contiguous() and (norm_weight is None or residual is not None)
    out = parts.new_empty(tokens, hidden)
    assert residual is None or (residual.is_contiguous() and residual.shape == out.shape)
    total = out if norm_weight is None else torch.empty_like(out)
    block = triton.next_power_of_2(hidden)
    _combine_kernel[(tokens,)](
        parts,
        weights,
        weights if place is None else place,
        parts if residual is None else residual,
        parts if norm_weight is None else norm_weight,
        out,
        total,
        eps,
        hidden,
        block,
        slots,
        place is not None,
        residual is not None,
        norm_weight is not None,
        num_warps=norm_warps(block),
        **dependent_launch.options(parts),
    )
    return out, total


def tiles(tokens: int, slots: int, groups: int, dtype: torch.dtype) -> tuple[int, Tiles, Tiles]:
    """Rows of a block, tiles of the gate and up product, tiles of the down product. Few rows: long, deep pipelines of narrow weight
    tiles, for the memory's sake; many rows: tiles for the tensor cores."""
    mean = tokens * slots // groups
    if dtype == torch.float32:
        return 16, Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2)
    if mean <= 10:
        return 16, Tiles(32, 128, 4, 4), Tiles(64, 128, 4, 4)
    if mean <= 28:
        return 32, Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 4)
    return 64, Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 4)
