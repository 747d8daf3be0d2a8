"""The small operators of a decoder layer: a plain form in torch, which is what the CPU runs, and a Triton kernel where a GPU is.

`kernels` = "auto" takes the Triton kernel for tensors on a CUDA device, "torch" the plain form everywhere. Kernels and plain forms
are equal up to rounding: float32 agrees to a few units in the last place (matrix products never use TF32: torch's default,
`torch.backends.cuda.matmul.allow_tf32` = False, is relied on), bfloat16 to one or two roundings of a result.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Kernels = Literal["auto", "torch"]

# Measured on an H200, us a decoder layer, by the kernels for few rows / by ordinary products. Two rows: code predictor 21 / 39, Talker
# 25 / 42, Thinker 70 / 75. Four rows, where there are experts: Talker 54 / 50, Thinker 155 / 108.
STEP_ROWS = 2  # up to here a decoder goes by the kernels for few rows
FEW_ROWS = 4  # up to here a dense linear layer does: 1024 to 4096, four rows: 7.0 against 7.4 us
# Rows of which a linear layer with a residual goes by triton_small_linear.py. A frame's codes, ms with it / without: 8 rows 2.85 / 2.69, 32 rows
# 2.94 / 2.83, 64 rows 2.64 / 2.94.
SMALL_ROWS = range(33, 65)


def use_triton(x: torch.Tensor, kernels: Kernels) -> bool:
    return kernels == "auto" and x.is_cuda


def use_step_form(x: torch.Tensor, kernels: Kernels) -> bool:
    """For x [N, …]: whether linear layers take in what stands before and behind them, in kernels for few rows."""
    return use_triton(x, kernels) and 1 <= len(x) <= STEP_ROWS


def use_few_rows(x: torch.Tensor, kernels: Kernels) -> bool:
    """As use_step_form, for one dense linear layer."""
    return use_triton(x, kernels) and 1 <= len(x) <= FEW_ROWS


def use_small_batch(x: torch.Tensor, kernels: Kernels) -> bool:
    """As use_step_form, for a linear layer with a residual on tensor cores."""
    return use_triton(x, kernels) and len(x) in SMALL_ROWS


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: Kernels = "auto") -> torch.Tensor:
    """weight * x / sqrt(mean(x²) + eps) over the last dimension, the root in float32."""
    if use_triton(x, kernels):
        from omni_bus.stages.ar import triton_layers

        return triton_layers.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps).view(x.shape)
    return rms_norm_plain(x, weight, eps)


def rms_norm_plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, kernels: Kernels = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, hidden] twice → (norm of residual + x, residual + x)."""
    if use_triton(x, kernels):
        from omni_bus.stages.ar import triton_layers

        return triton_layers.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
    return add_rms_norm_plain(x, residual, weight, eps)


def add_rms_norm_plain(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return rms_norm_plain(total, weight, eps), total


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [N, heads, head_dim] by cos and sin [N, 1, head_dim]: dimension i is paired with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor],
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    kernels: Kernels = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The projections of N tokens, queries before keys before values [N, (heads + 2 kv_heads) * head_dim] → normalised (where there
    are weights [head_dim]) and rotated query [N, heads, head_dim], key and value [N, kv_heads, head_dim]. Rotary as `rotate` takes it."""
    if use_triton(qkv, kernels):
        from omni_bus.stages.ar import triton_layers

        return triton_layers.qk_norm_rope(
            qkv.contiguous(), q_weight, k_weight, *rotary, heads=heads, kv_heads=kv_heads, eps=eps
        )
    return qk_norm_rope_plain(qkv, q_weight, k_weight, rotary, heads=heads, kv_heads=kv_heads, eps=eps)


def qk_norm_rope_plain(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor],
    *,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    split = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    query, key, value = split[:, :heads], split[:, heads:-kv_heads], split[:, -kv_heads:]
    if q_weight is not None and k_weight is not None:
        query, key = rms_norm_plain(query, q_weight, eps), rms_norm_plain(key, k_weight, eps)
    return rotate(query, *rotary), rotate(key, *rotary), value


def silu_mul(gate_up: torch.Tensor, kernels: Kernels = "auto") -> torch.Tensor:
    """[N, 2 * size], gates before ups → silu(gate) * up, [N, size]."""
    if use_triton(gate_up, kernels):
        from omni_bus.stages.ar import triton_layers

        return triton_layers.silu_mul(gate_up.contiguous())
    return silu_mul_plain(gate_up)


def silu_mul_plain(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    kernels: Kernels = "auto",
) -> torch.Tensor:
    """x [N, inputs] → the linear layer of its RMS norm, [N, outputs]. Gated: weight [2 * outputs, inputs] has gates before ups, and the
    result is silu(gate) * up. The kernels are for decode steps of few rows."""
    if use_few_rows(x, kernels):
        from omni_bus.stages.ar import triton_linear

        return triton_linear.linear(x.contiguous(), weight, bias=bias, norm_weight=norm_weight, eps=eps, gated=gated)
    out = F.linear(rms_norm(x, norm_weight, eps, kernels), weight, bias)
    return silu_mul(out, kernels) if gated else out


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, kernels: Kernels = "auto"
) -> torch.Tensor:
    """residual [N, outputs] + the linear layer of x [N, inputs]. The kernels are for decode steps of few rows."""
    if use_few_rows(x, kernels):
        from omni_bus.stages.ar import triton_linear

        return triton_linear.linear(x.contiguous(), weight, bias=bias, residual=residual.contiguous())
    if use_small_batch(x, kernels):
        from omni_bus.stages.ar import triton_small_linear

        return triton_small_linear.linear_add(x.contiguous(), weight, bias, residual.contiguous())
    return residual + F.linear(x, weight, bias)
