"""Where a stage's weights come from, and the decoder stacks made of them for the engine."""

from __future__ import annotations

import torch

from omni_bus.errors import ConfigError
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.mlp import DenseConfig, MoEConfig
from omni_bus.stages.contract import StageContext
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.config import StackConfig
from omni_bus.stages.qwen3_omni.options import LoadOptions
from omni_bus.stages.qwen3_omni.random_weights import RandomCheckpoint

FP8_CAPABILITY = (8, 9)  # from which on Triton converts e4m3
WEIGHTS_SHARE = 0.8  # of a stage's progress; the rest is the KV cache, warm-up and capture


def open_checkpoint(ctx: StageContext, *prefixes: str) -> Checkpoint:
    """The stage's tensors as its `load` option says; what is read under `prefixes` is told as the stage's progress, by bytes."""
    dtype: torch.dtype = getattr(torch, ctx.config.dtype)
    options = ctx.options(LoadOptions)
    random, fp8 = options.load == "random", options.weights == "fp8"
    if fp8:
        check_card(ctx)
    done = total = 0

    def loaded(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        said = f"{'made' if random else 'read'} {done / 1e9:.1f} of {total / 1e9:.1f} GB"
        ctx.progress(WEIGHTS_SHARE * done / total, said)

    checkpoint = (RandomCheckpoint if random else Checkpoint)(ctx.model_path, loaded=loaded, fp8=fp8)
    total = max(1, sum(checkpoint.bytes(prefix, dtype) for prefix in prefixes))
    return checkpoint


def check_card(ctx: StageContext) -> None:
    """ConfigError where the kernels of the stage's card cannot take FP8."""
    if torch.device(ctx.device).type != "cuda" or ctx.options(LoadOptions).kernels == "torch":
        return
    has = torch.cuda.get_device_capability(ctx.device)
    if has < FP8_CAPABILITY:
        raise ConfigError(
            f'stages.{ctx.stage}.weights = "fp8" needs a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or '
            f'more, and {ctx.device} has {has[0]}.{has[1]}; take weights = "model"'
        )


def decoder_config(stack: StackConfig, *, fp8: bool = False) -> DecoderConfig:
    mlp: DenseConfig | MoEConfig = DenseConfig(intermediate=stack.intermediate_size)
    if stack.num_experts:
        mlp = MoEConfig(
            experts=stack.num_experts,
            top_k=stack.num_experts_per_tok,
            intermediate=stack.moe_intermediate_size,
            norm_topk_prob=stack.norm_topk_prob,
            shared_intermediate=stack.shared_expert_intermediate_size,
            fp8=fp8,
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
    return Decoder.from_tensors(decoder_config(stack, fp8=checkpoint.fp8), tensors, dtype=dtype, device=device), tables


def load_tensor(checkpoint: Checkpoint, name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One tensor by its full name."""
    return checkpoint.tensors(name, dtype=dtype, device=device)[""]
