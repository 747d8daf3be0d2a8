"""What each stage of a Qwen3-Omni model needs of its device, from config.json alone: for the memory plan, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from omni_bus.deployment import Deployment, StageConfig
from omni_bus.memory import DTYPE_BYTES, StageNeed
from omni_bus.stages.qwen3_omni import code2wav_config
from omni_bus.stages.qwen3_omni.checkpoint_files import EXPERT, resolve
from omni_bus.stages.qwen3_omni.code2wav_config import Code2WavConfig
from omni_bus.stages.qwen3_omni.code2wav_shapes import STEP_FRAMES
from omni_bus.stages.qwen3_omni.config import StackConfig, parse_config
from omni_bus.stages.qwen3_omni.fixture_tensors import tensor_specs
from omni_bus.stages.qwen3_omni.json_fields import Section, read_json
from omni_bus.stages.qwen3_omni.options import Code2WavOptions, DecoderOptions, ThinkerOptions

LEAST_POSITIONS = 4096  # of KV: a short conversation
# Estimates, held against torch's own figures on one card; the constants are for CUDA graphs and libraries.
DECODER_WORKSPACE = 1 << 30
ENCODER_WORKSPACE = 1 << 30  # one audio of 30 s, or one picture of two megapixels
CODE2WAV_WORKSPACE = 512 << 20
FP8_SCALE_BYTES = 4  # of an output channel
LAYER_TENSORS = 32  # of [tokens, hidden] alive at once in a layer, experts' rows counted
LOGITS_TENSORS = 4  # of float32 [rows, vocab] alive at once while sampling
WAVE_TENSORS = 6  # of the widest [rows, channels, samples] alive at once in Code2Wav


def stage_needs(deployment: Deployment) -> dict[str, StageNeed]:
    """Thinker, Talker and Code2Wav. The model's directory was checked before."""
    fields = read_json(resolve(deployment.model.path) / "config.json")
    config, code2wav = parse_config(fields), code2wav_config.parse(Section(fields).section("code2wav_config"))
    weights = parameters(fields)
    stages = deployment.stages
    options = msgspec.convert(stages["thinker"].options, ThinkerOptions)
    thinker = _decoder(stages["thinker"], options, config.thinker.text, weights["thinker"], captures=True)
    if options.weights == "fp8":
        saved = saved_by_fp8(fields, "thinker", DTYPE_BYTES[stages["thinker"].dtype])
        thinker = msgspec.structs.replace(thinker, weights=thinker.weights - saved)
    # The Thinker's embedding table, projected at load: both are there for a moment.
    talker_dtype, rows = DTYPE_BYTES[stages["talker"].dtype], config.thinker.text.vocab_size
    talker = _decoder(
        stages["talker"],
        msgspec.convert(stages["talker"].options, DecoderOptions),
        config.talker.text,
        weights["talker"] + rows * config.talker.text.hidden_size,
    )
    return {
        "thinker": msgspec.structs.replace(
            thinker, workspace=thinker.workspace + (_media(stages["thinker"]) if on_card(stages["thinker"]) else 0)
        ),
        "talker": msgspec.structs.replace(
            talker, workspace=max(talker.workspace, rows * config.thinker.text.hidden_size * talker_dtype)
        ),
        "code2wav": _code2wav(deployment, code2wav, weights["code2wav"]),
    }


def parameters(fields: Mapping[str, Any]) -> dict[str, int]:
    """Stage → its parameters, counted."""
    counts: dict[str, int] = {}
    for spec in tensor_specs(fields):
        stage = spec.name.partition(".")[0]
        counts[stage] = counts.get(stage, 0) + spec.count
    return counts


def saved_by_fp8(fields: Mapping[str, Any], stage: str, dtype_bytes: int) -> int:
    """Bytes by which the matrices of the stage's experts are smaller in FP8, the scales of their output channels counted."""
    matrices = [spec for spec in tensor_specs(fields) if spec.name.startswith(f"{stage}.") and EXPERT.fullmatch(spec.name)]
    return sum(spec.count * (dtype_bytes - 1) - spec.shape[0] * FP8_SCALE_BYTES for spec in matrices)


def on_card(stage: StageConfig) -> bool:
    return any(device != "cpu" for device in stage.devices)


def _decoder(
    stage: StageConfig, options: DecoderOptions, stack: StackConfig, weights: int, *, captures: bool = False
) -> StageNeed:
    """`captures`: whether the states of one layer are kept beside the KV blocks that others may share."""
    size = DTYPE_BYTES[stage.dtype]
    layer = stack.hidden_size if captures and options.prefix_cache else 0
    position = (2 * stack.num_layers * stack.num_kv_heads * stack.head_dim + layer) * size
    length = min(stack.max_positions, options.max_length or stack.max_positions)
    state: int | None = None
    if options.kv_blocks:
        state = options.kv_blocks * options.block_size * position
    elif options.kv_memory_mb is not None:
        state = options.kv_memory_mb << 20
    graphs = DECODER_WORKSPACE if on_card(stage) else 0
    tokens = options.max_prefill_tokens + stage.max_batch
    return StageNeed(
        weights=weights * size,
        workspace=graphs
        + LAYER_TENSORS * tokens * stack.hidden_size * size
        + LOGITS_TENSORS * stage.max_batch * stack.vocab_size * 4,
        unit="positions",
        unit_bytes=position,
        units=stage.max_batch * length,
        least=min(length, LEAST_POSITIONS),
        memory=options.memory,
        state=state,
    )


def _media(stage: StageConfig) -> int:
    """Bytes for the encoders at work, and for what is kept of their results."""
    return ENCODER_WORKSPACE + (msgspec.convert(stage.options, ThinkerOptions).media_cache_mb << 20)


def _code2wav(deployment: Deployment, config: Code2WavConfig, weights: int) -> StageNeed:
    from omni_bus.stages.qwen3_omni.spec import CodecEdgeOptions

    stage = deployment.stages["code2wav"]
    options = msgspec.convert(stage.options, Code2WavOptions)
    edge = msgspec.convert(deployment.edges["talker->code2wav"].options, CodecEdgeOptions)
    size = DTYPE_BYTES[stage.dtype]
    frames = max(edge.first_chunk_frames, edge.max_chunk_frames)
    fused = options.graphs == "plain" or (options.graphs == "auto" and on_card(stage))
    samples = (max(STEP_FRAMES, frames) if fused else stage.max_batch * frames) * config.frame_samples
    widest = max(
        config.decoder_dim // 2 ** (block + 1) * samples // math.prod(config.upsample_rates[block + 1 :])
        for block in range(len(config.upsample_rates))
    )
    return StageNeed(
        weights=weights * size,
        workspace=(CODE2WAV_WORKSPACE if on_card(stage) else 0) + WAVE_TENSORS * widest * size,
        unit="slots",
        unit_bytes=code2wav_config.slot_values(config, frames if fused else 0) * size,
        units=stage.max_batch,
        least=stage.max_batch if options.memory == "auto" else 1,
        memory=options.memory,
    )
