# mypy: allow-untyped-decorators, allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs
"""Triton kernels of Code2Wav's fused form: each equals its form in code2wav_ops.TorchOps up to rounding.

Arithmetic is in float32, never TF32; a result is rounded once to the tensors' dtype. Sizes that differ between calls are not
specialised on, so that a whole set of batch and chunk sizes shares one compiled kernel. Imported only where a CUDA device is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_bus.stages.qwen3_omni.code2wav_ops import FusedRows, Join, SnakeScale


@triton.jit
def _snake(x, frequency_ptr, inverse_ptr, column, mask):
    frequency = tl.load(frequency_ptr + column, mask=mask, other=0.0)
    inverse = tl.load(inverse_ptr + column, mask=mask, other=0.0)
    # sin² has the period pi: a few products in place of a sine with its path for huge arguments, which each element would carry.
    # pi as three terms (Cephes' split, exact for turns below 2^16); the series ends below 6e-8 at pi / 2.
    angle = x * frequency[None, :]
    turns = (angle * 0.3183098861837907 + 12582912.0) - 12582912.0
    angle = ((angle - turns * 3.140625) - turns * 9.67502593994140625e-4) - turns * 1.509957990978376e-7
    square = angle * angle
    wave = -2.505210838544172e-8 * square + 2.755731922398589e-6
    wave = wave * square - 1.984126984126984e-4
    wave = wave * square + 8.333333333333333e-3
    wave = wave * square - 1.666666666666667e-1
    wave = angle + angle * square * wave
    return x + inverse[None, :] * (wave * wave)


@triton.jit(do_not_specialize=["steps", "past", "head", "fresh", "dilation", "out_steps"])
def _join_kernel(
    x_ptr,
    residual_ptr,
    total_ptr,
    out_ptr,
    kept_ptr,
    states_ptr,
    frequency_ptr,
    inverse_ptr,
    steps,
    channels,
    past,
    head,
    fresh,
    dilation,
    out_steps,
    TAPS: tl.constexpr,
    SNAKE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(2).to(tl.int64)
    step = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # of the joined steps
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_column = column < channels
    whole = steps + head
    source = step - head
    new = ((source >= 0) & (source < steps))[:, None] & in_column[None, :]
    at = (row * steps + source)[:, None] * channels + column[None, :]
    x = tl.load(x_ptr + at, mask=new, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=new, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + at, x, mask=new)
    if SNAKE:
        x = _snake(x.to(tl.float32), frequency_ptr, inverse_ptr, column, in_column).to(dtype)
    state = tl.load(states_ptr + row).to(tl.int64)
    old = ((step < head) & (fresh == 0))[:, None] & in_column[None, :]
    before = tl.load(kept_ptr + (state * past + step)[:, None] * channels + column[None, :], mask=old, other=0.0)
    y = tl.where((source >= 0)[:, None], x, before)
    inside = (step < whole)[:, None] & in_column[None, :]
    for tap in tl.static_range(TAPS):
        to = step - tap * dilation
        there = ((to >= 0) & (to < out_steps))[:, None] & inside
        tl.store(out_ptr + ((row * out_steps + to) * TAPS + tap)[:, None] * channels + column[None, :], y, mask=there)
    keep = step - (whole - past)
    kept_at = ((state ^ 1) * past + keep)[:, None] * channels + column[None, :]
    tl.store(kept_ptr + kept_at, y, mask=(keep >= 0)[:, None] & inside)


@triton.jit(do_not_specialize=["steps", "past", "dilation"])
def _conv_kernel(
    joined_ptr,
    weight_ptr,
    bias_ptr,
    frequency_ptr,
    inverse_ptr,
    out_ptr,
    steps,
    past,
    dilation,
    INTO: tl.constexpr,
    OUTOF: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    step = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    in_step, in_column = step < steps, column < OUTOF
    blocks: tl.constexpr = (INTO + BLOCK_K - 1) // BLOCK_K
    base = joined_ptr + row * (steps + past) * INTO
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for turn in range(TAPS * blocks):
        tap = turn // blocks
        channel = (turn % blocks) * BLOCK_K + inner
        in_channel = channel < INTO
        x = tl.load(
            base + (step + tap * dilation)[:, None] * INTO + channel[None, :],
            mask=in_step[:, None] & in_channel[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + (tap * INTO + channel)[:, None] * OUTOF + column[None, :],
            mask=in_channel[:, None] & in_column[None, :],
            other=0.0,
        )
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    acc += tl.load(bias_ptr + column, mask=in_column, other=0.0).to(tl.float32)[None, :]
    y = _snake(acc, frequency_ptr, inverse_ptr, column, in_column)
    at = (row * steps + step)[:, None] * OUTOF + column[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=in_step[:, None] & in_column[None, :])


@triton.jit(do_not_specialize=["steps"])
def _last_conv_kernel(
    joined_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    steps,
    channels,
    TAPS: tl.constexpr,
    PCM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    step = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_C)
    in_step, in_column = step < steps, column < channels
    base = joined_ptr + row * (steps + TAPS - 1) * channels
    acc = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + tap * channels + column, mask=in_column, other=0.0).to(tl.float32)
        at = (step + tap)[:, None] * channels + column[None, :]
        x = tl.load(base + at, mask=in_step[:, None] & in_column[None, :], other=0.0)
        acc += x.to(tl.float32) * weight[None, :]
    y = tl.sum(acc, 1) + tl.load(bias_ptr).to(tl.float32)
    y = tl.minimum(tl.maximum(y, -1.0), 1.0)
    if PCM:
        # Adding 1.5 * 2^23 leaves no bits behind the point: halves go to even, as torch.round takes them.
        y = (y * 32767.0 + 12582912.0) - 12582912.0
        tl.store(out_ptr + row * steps + step, y.to(tl.int32).to(tl.int16), mask=in_step)
    else:
        tl.store(out_ptr + row * steps + step, y, mask=in_step)


@triton.jit(do_not_specialize=["steps"])
def _depthwise_norm_kernel(
    joined_ptr,
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    out_ptr,
    steps,
    eps,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, step = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    base = joined_ptr + (row * (steps + TAPS - 1) + step) * WIDTH
    acc = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        x = tl.load(base + tap * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        acc += x * tl.load(weight_ptr + tap * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    off = tl.where(mask, acc - tl.sum(acc, 0) / WIDTH, 0.0)
    y = off * tl.rsqrt(tl.sum(off * off, 0) / WIDTH + eps)
    y = y * tl.load(norm_weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    y = y + tl.load(norm_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + (row * steps + step) * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_norm_kernel(
    x_ptr, y_ptr, scale_ptr, weight_ptr, total_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0)
    if ADD:
        y = tl.load(y_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + column, mask=mask, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + scale * y).to(dtype)
        tl.store(total_ptr + row + column, x, mask=mask)
    wide = x.to(tl.float32)
    normal = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + column, (weight * normal).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["steps", "ring"])
def _rotate_kernel(
    qkv_ptr,
    queries_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    positions_ptr,
    rates_ptr,
    steps,
    ring,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = queries_ptr.dtype.element_ty
    step, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = tl.load(positions_ptr + row) + step
    place = (tl.load(slots_ptr + row).to(tl.int64) * ring + position % ring) * KV_HEADS
    column = tl.arange(0, BLOCK)
    mask = column < HALF
    base = qkv_ptr + ((row * steps + step) * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + column
    first, second = tl.load(base, mask=mask, other=0.0), tl.load(base + HALF, mask=mask, other=0.0)
    if head < HEADS + KV_HEADS:
        angle = position.to(tl.float32) * tl.load(rates_ptr + column, mask=mask, other=0.0)
        cos, sin = tl.cos(angle).to(dtype).to(tl.float32), tl.sin(angle).to(dtype).to(tl.float32)
        one, two = first.to(tl.float32), second.to(tl.float32)
        first, second = (one * cos - two * sin).to(dtype), (two * cos + one * sin).to(dtype)
    if head < HEADS:
        to = queries_ptr + ((row * steps + step) * HEADS + head) * (2 * HALF) + column
    elif head < HEADS + KV_HEADS:
        to = keys_ptr + (place + head - HEADS) * (2 * HALF) + column
    else:
        to = values_ptr + (place + head - HEADS - KV_HEADS) * (2 * HALF) + column
    tl.store(to, first, mask=mask)
    tl.store(to + HALF, second, mask=mask)


@triton.jit(do_not_specialize=["steps", "ring", "window"])
def _attend_kernel(
    queries_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    steps,
    ring,
    window,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.load(positions_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    step, index, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_column = column < HEAD_DIM
    at = start + 1 - window + index  # position of a key
    there = (at >= 0) & (index < window - 1 + steps)
    place = (slot * ring + at % ring) * KV_HEADS + head // (HEADS // KV_HEADS)
    mine = ((row * steps + step) * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    in_query = (step < steps)[:, None] & in_column[None, :]
    query = tl.load(queries_ptr + mine, mask=in_query, other=0.0)
    key = tl.load(keys_ptr + place[None, :] * HEAD_DIM + column[:, None], mask=there[None, :] & in_column[:, None], other=0.0)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    distance = (start + step)[:, None] - at[None, :]
    scores = tl.where((distance >= 0) & (distance < window) & there[None, :], scores, -1e30)
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    value = tl.load(
        values_ptr + place[:, None] * HEAD_DIM + column[None, :], mask=there[:, None] & in_column[None, :], other=0.0
    )
    y = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    tl.store(out_ptr + mine, y.to(out_ptr.dtype.element_ty), mask=in_query)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * (2 * WIDTH) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * WIDTH) + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (gate * up).to(dtype), mask=mask)


class TritonOps:
    """code2wav_ops.Ops by the kernels above."""

    def join(
        self,
        x: torch.Tensor,
        kept: torch.Tensor,
        rows: FusedRows,
        how: Join,
        snake: SnakeScale | None = None,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, steps, channels = x.shape
        past = kept.shape[1]
        head = past if how.head else 0
        whole = steps + head
        out_steps = whole - (how.taps - 1) * how.dilation
        assert out_steps >= 1 and whole >= past
        assert x.is_contiguous() and kept.is_contiguous() and (residual is None or residual.is_contiguous())
        out = x.new_empty(count, out_steps, how.taps * channels)
        total = x if residual is None else torch.empty_like(x)
        _join_kernel[(triton.cdiv(whole, 16), triton.cdiv(channels, 128), count)](
            x,
            x if residual is None else residual,
            total,
            out,
            kept if past else x,  # an empty tensor has no address
            rows.states,
            x if snake is None else snake.frequency,
            x if snake is None else snake.inverse,
            steps,
            channels,
            past,
            head,
            int(rows.fresh),
            how.dilation,
            out_steps,
            TAPS=how.taps,
            SNAKE=snake is not None,
            RESIDUAL=residual is not None,
            BLOCK_T=16,
            BLOCK_C=128,
            num_warps=4,
        )
        return out, total

    def conv(
        self, joined: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dilation: int, snake: SnakeScale
    ) -> torch.Tensor:
        taps, into, outof = weight.shape
        past = (taps - 1) * dilation
        count, steps = joined.shape[0], joined.shape[1] - past
        assert joined.is_contiguous() and weight.is_contiguous()
        out = joined.new_empty(count, steps, outof)
        block_n = 64 if outof % 64 == 0 else 128
        block_k = 64 if into % 64 == 0 and joined.dtype != torch.float32 else 32
        _conv_kernel[(triton.cdiv(steps, 64), triton.cdiv(outof, block_n), count)](
            joined,
            weight,
            bias,
            snake.frequency,
            snake.inverse,
            out,
            steps,
            past,
            dilation,
            INTO=into,
            OUTOF=outof,
            TAPS=taps,
            BLOCK_M=64,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=3,
        )
        return out

    def last_conv(self, joined: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pcm: bool) -> torch.Tensor:
        taps, channels = weight.shape
        count, steps = joined.shape[0], joined.shape[1] - (taps - 1)
        assert joined.is_contiguous() and weight.is_contiguous()
        out = torch.empty(count, steps, dtype=torch.int16 if pcm else torch.float32, device=joined.device)
        _last_conv_kernel[(triton.cdiv(steps, 32), count)](
            joined,
            weight,
            bias,
            out,
            steps,
            channels,
            TAPS=taps,
            PCM=pcm,
            BLOCK_T=32,
            BLOCK_C=max(16, triton.next_power_of_2(channels)),
            num_warps=4,
        )
        return out

    def depthwise_norm(
        self,
        joined: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        taps, width = weight.shape
        count, steps = joined.shape[0], joined.shape[1] - (taps - 1)
        assert joined.is_contiguous() and weight.is_contiguous()
        out = joined.new_empty(count, steps, width)
        _depthwise_norm_kernel[(steps, count)](
            joined,
            weight,
            bias,
            norm_weight,
            norm_bias,
            out,
            steps,
            eps,
            WIDTH=width,
            TAPS=taps,
            BLOCK=triton.next_power_of_2(width),
            num_warps=4,
        )
        return out

    def add_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, scale: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        add = y is not None and scale is not None
        width = x.shape[-1]
        assert x.is_contiguous() and (y is None or y.is_contiguous())
        out = torch.empty_like(x)
        total = torch.empty_like(x) if add else x
        _add_norm_kernel[(x.numel() // width,)](
            x,
            y if add else x,
            scale if add else weight,
            weight,
            total,
            out,
            eps,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            ADD=add,
            num_warps=4,
        )
        return total, out

    def rotate(
        self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FusedRows, rates: torch.Tensor
    ) -> torch.Tensor:
        count, steps, all_heads, head_dim = qkv.shape
        _, ring, kv_heads, _ = keys.shape
        heads = all_heads - 2 * kv_heads
        assert qkv.is_contiguous()
        queries = qkv.new_empty(count, steps, heads, head_dim)
        _rotate_kernel[(steps, all_heads, count)](
            qkv,
            queries,
            keys,
            values,
            rows.slots,
            rows.positions,
            rates,
            steps,
            ring,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=1,
        )
        return queries

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FusedRows, window: int
    ) -> torch.Tensor:
        count, steps, heads, head_dim = queries.shape
        _, ring, kv_heads, _ = keys.shape
        assert steps + window - 1 <= ring
        out = torch.empty_like(queries)
        _attend_kernel[(heads, count)](
            queries,
            keys,
            values,
            out,
            rows.slots,
            rows.positions,
            steps,
            ring,
            window,
            head_dim**-0.5,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_M=max(16, triton.next_power_of_2(steps)),
            BLOCK_N=max(16, triton.next_power_of_2(ring)),
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            num_warps=4,
        )
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        width = gate_up.shape[-1] // 2
        assert gate_up.is_contiguous()
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        _swiglu_kernel[(gate_up.numel() // (2 * width), triton.cdiv(width, 1024))](
            gate_up, out, WIDTH=width, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=4
        )
        return out
