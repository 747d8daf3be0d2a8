"""The feed-forward part of a decoder layer: dense SwiGLU, or a mixture of experts with or without a shared one.

The modules hold a checkpoint's tensors under its names, and their `forward` is the plain form. `pack` joins tensors that one product
can serve (on a GPU; the CPU keeps its products apart, so that its results stay what they are bit for bit), and `add_norm` is the form
that a decoder layer calls.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from omni_bus.stages.ar.fp8 import FP8, dequantise
from omni_bus.stages.ar.norm import RMSNorm
from omni_bus.stages.ar.ops import Kernels, linear_add, norm_linear, silu_mul, silu_mul_plain, use_triton

# Above this many tokens the tensor-core products of torch._grouped_mm take over from the Triton kernels.
GROUPED_ABOVE = 512
# Where neither is wanted or possible: up to here each pair's weights are gathered, which a CUDA graph can hold.
_GATHERED_UP_TO = 64


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
    fp8: bool = False  # the chosen experts' weights as fp8.py has them; a shared one keeps the dtype of the model


class DenseMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self._gate_up: torch.Tensor | None = None

    def pack(self) -> None:
        """Join gate and up; the two parameters become parts of the joined tensor."""
        self._gate_up = join([self.gate_proj, self.up_proj])

    def forward(self, x: torch.Tensor, kernels: Kernels = "auto") -> torch.Tensor:
        if self._gate_up is None:
            inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        else:
            inner = silu_mul(F.linear(x, self._gate_up), kernels)
        out: torch.Tensor = self.down_proj(inner)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, hidden] twice → (norm(residual + self(x)), residual + self(x))."""
        return norm.add(self(x, kernels), residual, kernels)

    def step(self, residual: torch.Tensor, norm: RMSNorm, kernels: Kernels) -> torch.Tensor:
        """One row [1, hidden] → residual + self(norm(residual)). After `pack`."""
        assert self._gate_up is not None
        inner = norm_linear(residual, norm.weight, norm.eps, self._gate_up, gated=True, kernels=kernels)
        return linear_add(inner, self.down_proj.weight, None, residual, kernels)


class Router(nn.Module):
    """Softmax over all experts in float32, the top k of it, normalised to sum 1 where the model says so."""

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, hidden))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, hidden] → weights [N, top_k] in the dtype of x, expert numbers int64 [N, top_k]."""
        return self.choose(F.linear(x, self.weight))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from the scores [N, experts]."""
        probs = F.softmax(logits, dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probs, self.config.top_k, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(logits.dtype), chosen


class Experts(nn.Module):
    """All experts' weights in two tensors: gate_up_proj [experts, 2 * intermediate, hidden], down_proj [experts, hidden, intermediate].
    In FP8 these are codes, and gate_up_proj_scale [experts, 2 * intermediate] and down_proj_scale [experts, hidden] their scales."""

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        gate_up, down = (config.experts, 2 * config.intermediate, hidden), (config.experts, hidden, config.intermediate)
        dtype = FP8 if config.fp8 else None
        self.gate_up_proj = nn.Parameter(torch.empty(gate_up, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(down, dtype=dtype))
        self.gate_up_proj_scale: nn.Parameter | None = None
        self.down_proj_scale: nn.Parameter | None = None
        if config.fp8:
            self.gate_up_proj_scale = nn.Parameter(torch.empty(gate_up[:2], dtype=torch.float32))
            self.down_proj_scale = nn.Parameter(torch.empty(down[:2], dtype=torch.float32))

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of gate_up_proj and of down_proj, in FP8."""
        gate_up, down = self.gate_up_proj_scale, self.down_proj_scale
        return None if gate_up is None or down is None else (gate_up.data, down.data)

    def weights_of(self, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [2 * intermediate, hidden] and down [hidden, intermediate] of one expert, for a product in that dtype."""
        gate_up, down, scales = self.gate_up_proj[expert], self.down_proj[expert], self.scales
        if scales is None:
            return gate_up, down
        return dequantise(gate_up, scales[0][expert], dtype), dequantise(down, scales[1][expert], dtype)

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
                gate_up, down = self.weights_of(expert, x.dtype)
                inner = silu_mul_plain(F.linear(rows[begin : begin + count], gate_up))
                parts.append(F.linear(inner, down))
                begin += count
        out = torch.empty_like(rows)
        out[order] = torch.cat(parts)
        return (out.view(tokens, top_k, -1) * weights[..., None]).sum(dim=1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Packed:
    """A mixture's tensors as its kernels want them. The shared expert is cut into `shared` experts of the others' size, behind them;
    its gate is row `experts` of the router."""

    router: torch.Tensor  # [at least experts, hidden], rows a multiple of 8
    gate_up: torch.Tensor  # [experts + shared, 2 * intermediate, hidden]
    down: torch.Tensor  # [experts + shared, hidden, intermediate]
    shared: int
    scales: tuple[torch.Tensor, torch.Tensor] | None = None  # of gate_up and down, where they are FP8; then `shared` is 0

    def dequantised(self, dtype: torch.dtype) -> _Packed:
        if self.scales is None:
            return self
        gate_up, down = dequantise(self.gate_up, self.scales[0], dtype), dequantise(self.down, self.scales[1], dtype)
        return dataclasses.replace(self, gate_up=gate_up, down=down, scales=None)


class MoE(nn.Module):
    """The chosen experts' weighted sum, plus sigmoid(shared_expert_gate(x)) * shared_expert(x) where there is one."""

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(hidden, config)
        self.experts = Experts(hidden, config)
        self.shared_expert: DenseMLP | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if config.shared_intermediate:
            self.shared_expert = DenseMLP(hidden, config.shared_intermediate)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)
        self._packed: _Packed | None = None

    def pack(self) -> None:
        """Put the shared expert behind the others, where it can be cut to their size. The experts' parameters become parts of the
        longer tensors; the shared expert's stay beside them."""
        config, experts = self.config, self.experts
        router, gate_up, down = [self.gate.weight.data], experts.gate_up_proj.data, experts.down_proj.data
        shared = 0
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            self.shared_expert.pack()
            if config.shared_intermediate % config.intermediate == 0 and not config.fp8:
                shared = config.shared_intermediate // config.intermediate
                router.append(self.shared_expert_gate.weight.data)
                gates = self.shared_expert.gate_proj.weight.data.view(shared, config.intermediate, -1)
                ups = self.shared_expert.up_proj.weight.data.view(shared, config.intermediate, -1)
                downs = self.shared_expert.down_proj.weight.data.view(-1, shared, config.intermediate).transpose(0, 1)
                gate_up = torch.cat([gate_up, torch.cat([gates, ups], dim=1)])
                experts.gate_up_proj.data = gate_up[: config.experts]
                down = torch.cat([down, downs])
                experts.down_proj.data = down[: config.experts]
        rows = sum(len(part) for part in router)
        if rows % 8:
            router.append(router[0].new_zeros(8 - rows % 8, router[0].shape[1]))
        self._packed = _Packed(
            torch.cat(router) if len(router) > 1 else router[0],
            gate_up.contiguous(),
            down.contiguous(),
            shared,
            experts.scales,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x)
        out: torch.Tensor = self.experts(x, weights, chosen)
        return self._add_shared(out, x, "torch")

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, hidden] twice → (norm(residual + self(x)), residual + self(x))."""
        if self._packed is None:
            return norm.add(self(x), residual, kernels)
        if not use_triton(x, kernels):
            return norm.add(moe_plain(x, self, self._packed), residual, kernels)
        separate = self.shared_expert is not None and not self._packed.shared
        fused = None if separate else norm
        out, total = moe(x, self.config, self._packed, residual, fused)
        if fused is None:
            return norm.add(self._add_shared(out, x, kernels), residual, kernels)
        return out, total

    def step(self, residual: torch.Tensor, norm: RMSNorm, kernels: Kernels) -> torch.Tensor:
        """One row [1, hidden] → residual + self(norm(residual)). After `pack`."""
        packed = self._packed
        assert packed is not None
        if (self.shared_expert is not None and not packed.shared) or not use_triton(residual, kernels):
            return self.add_norm(norm(residual, kernels), residual, norm, kernels)[1]
        return moe_step(residual, self.config, packed, norm, kernels)

    def _add_shared(self, out: torch.Tensor, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x, kernels)
        return out


def moe(
    x: torch.Tensor, config: MoEConfig, packed: _Packed, residual: torch.Tensor, norm: RMSNorm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixture by Triton kernels, or by grouped products where there are many tokens; never a word to the host. With a norm:
    (norm(residual + out), residual + out); without: out, twice."""
    from omni_bus.stages.ar import triton_moe

    weights, chosen = triton_moe.route(
        F.linear(x, packed.router),
        experts=config.experts,
        top_k=config.top_k,
        shared=packed.shared,
        normalise=config.norm_topk_prob,
    )
    place = None
    if len(x) > GROUPED_ABOVE and _can_group(x, packed):
        parts, place = grouped_experts(x, chosen, packed.gate_up, packed.down, "auto")
    else:
        parts = triton_moe.experts(x, chosen, packed.gate_up, packed.down, scales=packed.scales)
    if norm is None:
        return triton_moe.combine(parts, weights, place=place)
    return triton_moe.combine(parts, weights, place=place, residual=residual, norm_weight=norm.weight, eps=norm.eps)


def moe_step(residual: torch.Tensor, config: MoEConfig, packed: _Packed, norm: RMSNorm, kernels: Kernels) -> torch.Tensor:
    """residual [N, hidden] + the mixture of its norm; the norm is taken on the way, by the router and by the experts."""
    from omni_bus.stages.ar import triton_moe

    weights, chosen = triton_moe.route(
        norm_linear(residual, norm.weight, norm.eps, packed.router, kernels=kernels),
        experts=config.experts,
        top_k=config.top_k,
        shared=packed.shared,
        normalise=config.norm_topk_prob,
    )
    return triton_moe.experts_sum(
        residual, weights, chosen, packed.gate_up, packed.down, scales=packed.scales, norm_weight=norm.weight, eps=norm.eps
    )


def moe_plain(x: torch.Tensor, module: MoE, packed: _Packed) -> torch.Tensor:
    """The mixture by torch alone, from the packed tensors: what `moe` gives, up to rounding. Only with many tokens of a dtype that
    has no grouped product does it ask the host. FP8 weights are all brought back for the call: slow, and nothing a graph cannot hold."""
    packed = packed.dequantised(x.dtype)
    if not _can_group(x, packed) and len(x) > _GATHERED_UP_TO:
        out: torch.Tensor = module(x)
        return out
    weights, chosen = module.gate.choose(F.linear(x, packed.router)[:, : module.config.experts])
    if _can_group(x, packed):
        parts, place = grouped_experts(x, chosen, packed.gate_up, packed.down, "torch")
        parts = parts[place]
    else:
        flat = chosen.view(-1)
        rows = x.repeat_interleave(chosen.shape[1], dim=0)[..., None]
        inner = silu_mul_plain(torch.bmm(packed.gate_up[flat], rows)[..., 0])
        parts = torch.bmm(packed.down[flat], inner[..., None])[..., 0]
    out = (parts.view(*chosen.shape, -1) * weights[..., None]).sum(dim=1)
    return module._add_shared(out, x, "torch")


def grouped_experts(
    x: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, hidden], numbers [N, slots] → each pair's expert output, unweighted, grouped by expert [N * slots, hidden], and the row
    int64 [N * slots] in which each pair (token * slots + slot) lies."""
    flat = chosen.view(-1)
    ordered, order = flat.sort(stable=True)
    groups = torch.arange(len(down), dtype=flat.dtype, device=x.device)
    ends = torch.searchsorted(ordered, groups, right=True).to(torch.int32)
    inner = torch._grouped_mm(x[order // chosen.shape[1]], gate_up.transpose(1, 2), offs=ends)
    parts = torch._grouped_mm(silu_mul(inner, kernels), down.transpose(1, 2), offs=ends)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=x.device)
    return parts, place


def _can_group(x: torch.Tensor, packed: _Packed) -> bool:
    """torch._grouped_mm is for bfloat16, and for rows of whole 16 bytes."""
    return (
        x.is_cuda
        and x.dtype == packed.down.dtype == torch.bfloat16
        and packed.down.shape[1] % 8 == 0
        and packed.down.shape[2] % 8 == 0
    )


def join(layers: list[nn.Linear]) -> torch.Tensor:
    """The weights of layers with one input as one tensor, [sum of outputs, inputs]; the layers' own become parts of it."""
    joined = torch.cat([layer.weight.data for layer in layers])
    begin = 0
    for layer in layers:
        layer.weight.data = joined[begin : begin + layer.out_features]
        begin += layer.out_features
    return joined
