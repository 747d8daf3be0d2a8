"""Decoder stacks of a Qwen3-Omni checkpoint for the engine: the configuration translated, the tensors of one stack loaded."""

from __future__ import annotations

import torch

from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.mlp import DenseConfig, MoEConfig
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.config import StackConfig


def decoder_config(stack: StackConfig) -> DecoderConfig:
    mlp: DenseConfig | MoEConfig = DenseConfig(intermediate=stack.intermediate_size)
    if stack.num_experts:
        mlp = MoEConfig(
            experts=stack.num_experts,
            top_k=stack.num_experts_per_tok,
            intermediate=stack.moe_intermediate_size,
            norm_topk_prob=stack.norm_topk_prob,
            shared_intermediate=stack.shared_expert_intermediate_size,
        )
    time, height, width = stack.mrope_section or (0, 0, 0)
    return DecoderConfig(
        hidden=stack.hidden_size,
        layers=stack.num_layers,
        heads=stack.num_heads,
        kv_heads=stack.num_kv_heads,
        head_dim=stack.head_dim,
        mlp=mlp,
        max_positions=stack.max_positions,
        rms_eps=stack.rms_norm_eps,
        rope_theta=stack.rope_theta,
        mrope_section=(time, height, width) if stack.mrope_section else None,
        qk_norm=True,
    )


def load_stack(
    checkpoint: Checkpoint, prefix: str, stack: StackConfig, *, embeddings: str, dtype: torch.dtype, device: torch.device
) -> tuple[Decoder, dict[str, torch.Tensor]]:
    """The decoder under `prefix`, and the tensors there whose names start with `embeddings`."""
    tensors = checkpoint.tensors(prefix, dtype=dtype, device=device)
    tables = {name: tensors.pop(name) for name in list(tensors) if name.startswith(embeddings)}
    return Decoder.from_tensors(decoder_config(stack), tensors, dtype=dtype, device=device), tables


def load_tensor(checkpoint: Checkpoint, name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One tensor by its full name."""
    return checkpoint.tensors(name, dtype=dtype, device=device)[""]
