"""How many KV blocks a stage gets: what its keys say, else its share of the device."""

from __future__ import annotations

import torch

from omni_bus.memory import CPU_STATE_BYTES
from omni_bus.stages.ar.capture import device_alone
from omni_bus.stages.ar.options import AROptions
from omni_bus.stages.contract import StageContext

# Of a card's free memory, left to CUDA graphs, to workspaces and to the other stages' last allocations.
GRAPH_MARGIN_BYTES = 2 << 30


def kv_bytes(ctx: StageContext, options: AROptions, device: torch.device) -> int:
    """Bytes for all blocks. Called with the weights loaded: on a card it is never more than what is free then, less the margin."""
    if options.kv_memory_mb is not None:
        return options.kv_memory_mb << 20
    if device.type != "cuda":
        return CPU_STATE_BYTES if ctx.state_bytes is None else ctx.state_bytes
    with device_alone:
        torch.cuda.empty_cache()  # what the loading has left cached counts as used otherwise, for this process and for others
    free, _ = torch.cuda.mem_get_info(device)
    room = max(0, free - GRAPH_MARGIN_BYTES)
    return room if ctx.state_bytes is None else min(room, ctx.state_bytes)


def block_count(ctx: StageContext, options: AROptions, device: torch.device, *, block_bytes: int, max_length: int) -> int:
    """As many as max_batch rows of max_length could use, as far as memory allows; `kv_blocks` where the stage's keys say it."""
    wanted = ctx.config.max_batch * -(-max_length // options.block_size)
    return options.kv_blocks or min(wanted, kv_bytes(ctx, options, device) // block_bytes)
