"""What the memory plan reckons from config.json is what the stages then hold."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from omni_bus.deployment import ApiConfig, BusConfig, Deployment, EdgeConfig, ModelConfig, StageConfig
from omni_bus.memory import StageNeed
from omni_bus.spec import load_pipeline
from omni_bus.stages.ar.kv_budget import block_count
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.ar.options import AROptions
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import StageContext
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.code2wav import Code2WavStage
from omni_bus.stages.qwen3_omni.config import read_config
from omni_bus.stages.qwen3_omni.needs import stage_needs
from omni_bus.stages.qwen3_omni.weights import decoder_config

SPEC = load_pipeline("qwen3_omni")


def needs(directory: pathlib.Path, dtype: str = "float32", **options: Any) -> dict[str, StageNeed]:
    return stage_needs(
        Deployment(
            model=ModelConfig(pipeline="qwen3_omni", path=str(directory)),
            api=ApiConfig(),
            bus=BusConfig(),
            stages={
                stage.name: StageConfig(devices=("cpu",), dtype=dtype, max_batch=4, options=options.get(stage.name, {}))
                for stage in SPEC.stages
            },
            edges={edge.name: EdgeConfig(credits=edge.credits) for edge in SPEC.edges},
        )
    )


def context(directory: pathlib.Path, stage: str, state: int | None, **options: Any) -> StageContext:
    return StageContext(
        stage=stage,
        pipeline=SPEC,
        model_path=str(directory),
        device="cpu",
        config=StageConfig(devices=("cpu",), max_batch=4, options=options),
        edges={edge.name: EdgeConfig(credits=edge.credits) for edge in SPEC.edges},
        progress=lambda fraction, detail: None,
        state_bytes=state,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_positions_are_counted_to_the_byte(omni_checkpoint: pathlib.Path, dtype: str) -> None:
    found, kind = needs(omni_checkpoint, dtype), getattr(torch, dtype)
    config, checkpoint = read_config(str(omni_checkpoint)), Checkpoint(omni_checkpoint)
    table = config.thinker.text.vocab_size * config.talker.text.hidden_size * kind.itemsize  # of projected text
    assert found["thinker"].weights == checkpoint.bytes("thinker.", kind)
    assert found["talker"].weights == checkpoint.bytes("talker.", kind) + table
    assert found["code2wav"].weights == checkpoint.bytes("code2wav.", kind)
    for stage, stack in (("thinker", config.thinker.text), ("talker", config.talker.text)):
        block = KVCache.block_bytes(decoder_config(stack), 16, kind, captures=stage == "thinker")
        assert found[stage].unit_bytes * 16 == block
        assert found[stage].units == 4 * stack.max_positions


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_position_of_the_thinker_is_what_its_stage_allocates(omni_checkpoint: pathlib.Path, prefix_cache: bool) -> None:
    """With shared blocks each position has the accept layer's state beside its keys and values."""
    options = {"prefix_cache": prefix_cache, "kv_blocks": 8}
    stage = SPEC.stage("thinker").factory()
    stage.load(context(omni_checkpoint, "thinker", None, **options))
    assert isinstance(stage, ARStage) and stage._engine is not None
    cache = stage._engine.attention.cache
    captured = 0 if cache.captured is None else cache.captured.nbytes
    assert bool(captured) == prefix_cache
    positions = len(cache.layer(0)[0])
    found = needs(omni_checkpoint, thinker=options)["thinker"]
    assert found.unit_bytes * positions == cache._keys.nbytes + cache._values.nbytes + captured
    assert found.state == 8 * 16 * found.unit_bytes


def test_keys_of_a_decoder_bound_its_positions(omni_checkpoint: pathlib.Path) -> None:
    assert needs(omni_checkpoint, talker={"max_length": 100})["talker"].units == 400
    assert needs(omni_checkpoint, talker={"kv_memory_mb": 3})["talker"].state == 3 << 20
    found = needs(omni_checkpoint, talker={"kv_blocks": 5, "block_size": 8})["talker"]
    assert found.state == 40 * found.unit_bytes
    assert needs(omni_checkpoint, talker={"memory": "9GiB"})["talker"].memory == "9GiB"


def test_a_slot_is_what_a_stream_leaves_behind(omni_checkpoint: pathlib.Path) -> None:
    found = needs(omni_checkpoint)["code2wav"]
    stage = Code2WavStage()
    stage.load(context(omni_checkpoint, "code2wav", None))
    assert found.unit_bytes == sum(tensor.nbytes for tensor in stage._decoder.state_of(0))
    assert (found.units, found.least) == (4, 4)
    assert needs(omni_checkpoint, code2wav={"memory": "9GiB"})["code2wav"].least == 1


def test_code2wav_has_as_many_slots_as_there_is_memory_for(omni_checkpoint: pathlib.Path) -> None:
    one = needs(omni_checkpoint)["code2wav"].unit_bytes
    for state, slots in ((4 * one, 4), (3 * one - 1, 2), (100 * one, 4), (None, 4)):
        stage = Code2WavStage()
        stage.load(context(omni_checkpoint, "code2wav", state))
        assert stage.stats().slots_total == slots


@pytest.mark.parametrize(
    ("options", "state", "blocks"),
    [
        ({}, None, 28),  # all that four rows of 100 positions can use, in blocks of 16
        ({}, 10_500, 10),
        ({}, 10**9, 28),
        ({"kv_memory_mb": 1}, 10_500, 28),
        ({"kv_blocks": 3}, 10_500, 3),
        ({"kv_blocks": 50}, 10_500, 50),
    ],
)
def test_blocks_of_a_decoder(options: dict[str, int], state: int | None, blocks: int) -> None:
    ctx = context(pathlib.Path(), "talker", state, **options)
    assert block_count(ctx, ctx.options(AROptions), torch.device("cpu"), block_bytes=1000, max_length=100) == blocks
