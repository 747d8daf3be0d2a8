"""RMS norm as a module: its weight under the checkpoint's name, alone or with the addition that comes before it."""

from __future__ import annotations

import torch
from torch import nn

from omni_bus.stages.ar import ops


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x²) + eps), the root in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, kernels: ops.Kernels = "auto") -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps, kernels)

    def add(self, x: torch.Tensor, residual: torch.Tensor, kernels: ops.Kernels = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        """[N, hidden] twice → (norm(residual + x), residual + x)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, kernels)
