"""The feed-forward part of a decoder layer: dense SwiGLU, or a mixture of experts with or without a shared one."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    intermediate: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    experts: int
    top_k: int
    intermediate: int  # of one expert
    norm_topk_prob: bool = True
    shared_intermediate: int = 0  # 0 = no shared expert


class DenseMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Router(nn.Module):
    """Softmax over all experts in float32, the top k of it, normalised to sum 1 where the model says so."""

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, hidden))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, hidden] → weights [N, top_k] in the dtype of x, expert numbers int64 [N, top_k]."""
        probs = F.softmax(F.linear(x, self.weight), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probs, self.config.top_k, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


class Experts(nn.Module):
    """All experts' weights in two tensors: gate_up_proj [experts, 2 * intermediate, hidden], down_proj [experts, hidden, intermediate]."""

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * config.intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, hidden, config.intermediate))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Each expert runs once, over the tokens that chose it. A token's sum over its experts is taken in the order of choice,
        so it does not depend on the other tokens of the batch."""
        tokens, top_k = chosen.shape
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=len(self.gate_up_proj)).tolist()
        rows = x[order // top_k]
        parts = []
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                gate, up = F.linear(rows[begin : begin + count], self.gate_up_proj[expert]).chunk(2, dim=-1)
                parts.append(F.linear(F.silu(gate) * up, self.down_proj[expert]))
                begin += count
        out = torch.empty_like(rows)
        out[order] = torch.cat(parts)
        return (out.view(tokens, top_k, -1) * weights[..., None]).sum(dim=1)


class MoE(nn.Module):
    """The chosen experts' weighted sum, plus sigmoid(shared_expert_gate(x)) * shared_expert(x) where there is one."""

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate = Router(hidden, config)
        self.experts = Experts(hidden, config)
        self.shared_expert: DenseMLP | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if config.shared_intermediate:
            self.shared_expert = DenseMLP(hidden, config.shared_intermediate)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x)
        out: torch.Tensor = self.experts(x, weights, chosen)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out
