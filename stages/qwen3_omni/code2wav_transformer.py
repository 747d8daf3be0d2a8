"""The streaming transformer in front of Code2Wav's convolutions: causal attention over a sliding window of frames.

A slot keeps the keys and values of the last `window - 1` frames, already rotated by their true positions: positions that restart
with each piece would cost 3e-5 of the waveform, since the angles are computed in float32.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from omni_bus.stages.qwen3_omni.code2wav_config import Code2WavConfig
from omni_bus.stages.qwen3_omni.code2wav_layers import Rows, StreamingLayer


@dataclasses.dataclass(frozen=True, slots=True)
class Frames:
    """What all layers share of one call. cos, sin: [rows, 1, n, head_dim]; mask: bool, True = attend, broadcast to
    [rows, heads, n, keys], where the keys are the kept ones (none if fresh) and then the new ones."""

    rows: Rows
    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor


class RMSNorm(nn.Module):
    """Normalises in float32 whatever the dtype is, as the reference does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Attention(StreamingLayer):
    keys: torch.Tensor  # [slots, kv_heads, window - 1, head_dim], newest last
    values: torch.Tensor

    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.past = config.sliding_window - 1
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shape = (self.kv_heads, self.past, self.head_dim)
        return {"keys": shape, "values": shape}

    def forward(self, x: torch.Tensor, frames: Frames) -> torch.Tensor:
        """[rows, n, hidden] → the same"""
        count, steps, _ = x.shape
        query = _rotate(self.q_proj(x).view(count, steps, self.heads, self.head_dim).transpose(1, 2), frames)
        key = _rotate(self.k_proj(x).view(count, steps, self.kv_heads, self.head_dim).transpose(1, 2), frames)
        value = self.v_proj(x).view(count, steps, self.kv_heads, self.head_dim).transpose(1, 2)
        key, value = self._join(self.keys, key, frames.rows), self._join(self.values, value, frames.rows)
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=frames.mask, enable_gqa=grouped)
        out: torch.Tensor = self.o_proj(y.transpose(1, 2).reshape(count, steps, -1))
        return out

    def _join(self, kept: torch.Tensor, new: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The kept steps and the new ones; the last of them are kept for the next call."""
        whole = new if rows.fresh else torch.cat((kept[rows.slots], new), 2)
        missing = self.past - whole.shape[2]
        kept[rows.slots] = F.pad(whole, (0, 0, missing, 0)) if missing > 0 else whole[:, :, -self.past :]
        return whole


class GatedMlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LayerScale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


class TransformerLayer(nn.Module):
    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.self_attn_layer_scale = LayerScale(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.mlp_layer_scale = LayerScale(config.hidden_size)

    def forward(self, x: torch.Tensor, frames: Frames) -> torch.Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), frames))
        out: torch.Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return out


class Transformer(nn.Module):
    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.head_dim, self.theta, self.window = config.head_dim, config.rope_theta, config.sliding_window
        self.layers = nn.ModuleList([TransformerLayer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[rows, n, hidden] → the same"""
        frames = self._frames(x, rows)
        for layer in self.layers:
            x = layer(x, frames)
        out: torch.Tensor = self.norm(x)
        return out

    def _frames(self, x: torch.Tensor, rows: Rows) -> Frames:
        steps, device = x.shape[1], x.device
        new = rows.positions[:, None] + torch.arange(steps, device=device)  # [rows, n]
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device=device).float() / self.head_dim
        angles = new[..., None].float() * (1.0 / self.theta**exponents)
        angles = torch.cat((angles, angles), -1)[:, None]
        kept = 0 if rows.fresh else self.window - 1
        keys = rows.positions[:, None] + torch.arange(-kept, steps, device=device)  # [rows, keys]; negative: before the stream
        distance = new[:, :, None] - keys[:, None]
        mask = (distance >= 0) & (distance < self.window) & (keys >= 0)[:, None]
        return Frames(rows, angles.cos().to(x.dtype), angles.sin().to(x.dtype), mask[:, None])


def _rotate(x: torch.Tensor, frames: Frames) -> torch.Tensor:
    """Rotary positions over the two halves of the head. x: [rows, heads, n, head_dim]"""
    first, second = x.chunk(2, -1)
    return x * frames.cos + torch.cat((-second, first), -1) * frames.sin
