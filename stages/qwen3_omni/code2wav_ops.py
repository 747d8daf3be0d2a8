"""The operators of Code2Wav's fused form, in torch: what its Triton kernels (code2wav_triton.py) must equal up to rounding.

Activations lie channels-last, [rows, steps, channels], so that a convolution is a matrix product over neighbouring steps. The last
`past` steps before a convolution are kept twice per slot, [2 * slots, past, channels]: a call reads at `states` = 2 * slot + turn and
writes at `states` ^ 1, so that no kernel overwrites what another part of it still has to read.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
import torch.nn.functional as F

from omni_bus.stages.qwen3_omni.code2wav_model import to_pcm16


@dataclasses.dataclass(frozen=True, slots=True)
class SnakeScale:
    """[channels] each, at least float32: y = x + inverse * sin²(x * frequency)"""

    frequency: torch.Tensor
    inverse: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FusedRows:
    """The streams of one call: int32 [rows] on the model's device. All of them are at their beginning (`fresh`), or none."""

    slots: torch.Tensor
    states: torch.Tensor  # 2 * slot + the half that holds what was kept last
    positions: torch.Tensor  # frames decoded before
    fresh: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """How kept steps and new ones are put together: `head` puts the kept ones (zeros if fresh) in front; every row of the result is
    `taps` steps that lie `dilation` apart, side by side."""

    head: bool = True
    taps: int = 1
    dilation: int = 1


class Ops(Protocol):
    def join(
        self,
        x: torch.Tensor,
        kept: torch.Tensor,
        rows: FusedRows,
        how: Join,
        snake: SnakeScale | None = None,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """total = x (+ residual), [rows, n, channels]; y = snake(total); kept steps in front, the newest kept for the next call.

        → ([rows, steps, taps * channels], total), steps = n (+ past) - (taps - 1) * dilation.
        """

    def conv(
        self, joined: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dilation: int, snake: SnakeScale
    ) -> torch.Tensor:
        """snake(convolution): joined [rows, n + past, in], weight [kernel, in, out] → [rows, n, out]"""

    def last_conv(self, joined: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pcm: bool) -> torch.Tensor:
        """The convolution to one channel, held to -1..1: joined [rows, n + kernel - 1, in], weight [kernel, in], bias [1] → [rows, n],
        int16 where `pcm`, else at least float32."""

    def depthwise_norm(
        self,
        joined: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """LayerNorm of a depthwise convolution: joined [rows, n + kernel - 1, width], weight [kernel, width] → [rows, n, width]"""

    def add_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, scale: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """total = x (+ scale * y), [rows, n, hidden] → (total, weight * total / rms(total))"""

    def rotate(
        self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FusedRows, rates: torch.Tensor
    ) -> torch.Tensor:
        """Rotary positions: qkv [rows, n, heads + 2 * kv_heads, head_dim] → the rotated queries [rows, n, heads, head_dim].

        Keys (rotated) and values go into the rings [slots, ring, kv_heads, head_dim] at position % ring. rates: float32 [head_dim / 2].
        """

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FusedRows, window: int
    ) -> torch.Tensor:
        """Attention to the last `window` positions, its own included, from the rings: [rows, n, heads, head_dim] → the same"""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[…, 2 * width] → silu(first half) * second half"""


class TorchOps:
    """Ops without kernels of our own."""

    def join(
        self,
        x: torch.Tensor,
        kept: torch.Tensor,
        rows: FusedRows,
        how: Join,
        snake: SnakeScale | None = None,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        y = total if snake is None else _snake(total, snake)
        past = kept.shape[1]
        if past:
            if how.head:
                before = y.new_zeros(y.shape[0], past, y.shape[2]) if rows.fresh else kept[rows.states]
                y = torch.cat((before, y), 1)
            kept[rows.states ^ 1] = y[:, -past:]
        return _windows(y, how.taps, how.dilation), total

    def conv(
        self, joined: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dilation: int, snake: SnakeScale
    ) -> torch.Tensor:
        return _snake(_windows(joined, weight.shape[0], dilation) @ weight.flatten(0, 1) + bias, snake)

    def last_conv(self, joined: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pcm: bool) -> torch.Tensor:
        dtype = torch.promote_types(joined.dtype, torch.float32)
        windows = _windows(joined, weight.shape[0], 1).to(dtype)
        samples = (windows @ weight.flatten().to(dtype) + bias.to(dtype)).clamp(-1, 1)
        return to_pcm16(samples) if pcm else samples

    def depthwise_norm(
        self,
        joined: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        kernel, width = weight.shape
        y = (_windows(joined, kernel, 1).view(joined.shape[0], -1, kernel, width) * weight).sum(2) + bias
        return F.layer_norm(y, (width,), norm_weight, norm_bias, eps)

    def add_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, scale: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if y is None or scale is None else x + scale * y
        wide = total.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return total, weight * wide.to(x.dtype)

    def rotate(
        self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FusedRows, rates: torch.Tensor
    ) -> torch.Tensor:
        steps, kv_heads = qkv.shape[1], keys.shape[2]
        positions = rows.positions[:, None] + torch.arange(steps, device=qkv.device, dtype=torch.int32)
        angles = positions[..., None].float() * rates
        cos, sin = angles.cos().to(qkv.dtype)[:, :, None], angles.sin().to(qkv.dtype)[:, :, None]
        rotating, value = qkv[:, :, :-kv_heads], qkv[:, :, -kv_heads:]
        first, second = rotating.chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        where = (rows.slots[:, None], positions % keys.shape[1])
        keys[where] = rotated[:, :, -kv_heads:]
        values[where] = value
        return rotated[:, :, :-kv_heads].contiguous()

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: FusedRows, window: int
    ) -> torch.Tensor:
        steps, device = queries.shape[1], queries.device
        at = rows.positions[:, None] + torch.arange(1 - window, steps, device=device, dtype=torch.int32)  # [rows, keys]
        where = (rows.slots[:, None], at % keys.shape[1])
        there = (at >= 0)[:, :, None, None]  # others hold what an earlier stream left
        key = torch.where(there, keys[where], 0).transpose(1, 2)
        value = torch.where(there, values[where], 0).transpose(1, 2)
        distance = at[:, window - 1 :, None] - at[:, None]
        mask = (distance >= 0) & (distance < window) & (at >= 0)[:, None]
        grouped = queries.shape[2] != keys.shape[2]
        y = F.scaled_dot_product_attention(queries.transpose(1, 2), key, value, attn_mask=mask[:, None], enable_gqa=grouped)
        return y.transpose(1, 2)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up


def _snake(x: torch.Tensor, scale: SnakeScale) -> torch.Tensor:
    wide = x.to(scale.frequency.dtype)
    return (wide + scale.inverse * torch.sin(wide * scale.frequency).square()).to(x.dtype)


def _windows(x: torch.Tensor, taps: int, dilation: int) -> torch.Tensor:
    steps = x.shape[1] - (taps - 1) * dilation
    assert steps >= 1
    return x if taps == 1 else torch.cat([x[:, tap * dilation : tap * dilation + steps] for tap in range(taps)], -1)
