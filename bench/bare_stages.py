"""Qwen3-Omni's stages without a worker around them: a checkpoint without weights, prompts of a few words, and a stage run to its end."""

from __future__ import annotations

import contextlib
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from omni_bus.deployment import EdgeConfig, StageConfig
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, Message, TextPart
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import Chunk, Output, Stage, StageContext, StageError, StageRequest
from omni_bus.stages.qwen3_omni import fixture
from omni_bus.stages.qwen3_omni.options import DecoderOptions, ThinkerOptions
from omni_bus.stages.qwen3_omni.talker import TalkerProgram
from omni_bus.stages.qwen3_omni.thinker import ThinkerProgram

WORDS = (60, 9, 25)  # of the prompts; the rows are together in one batch


@contextlib.contextmanager
def checkpoint(size: str, layers: int | None = None) -> Iterator[str]:
    """A directory without weights, for load = "random". `layers`: of Thinker and Talker, at most."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch) / size
        fixture.write(directory, size, 0, lambda fraction, detail: None, weights=False, vocabulary="tiny")
        if layers is not None:
            file = directory / "config.json"
            config = json.loads(file.read_text())
            for part in ("thinker_config", "talker_config"):
                text = config[part]["text_config"]
                text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
            config["talker_config"]["accept_hidden_layer"] = min(layers - 1, config["talker_config"]["accept_hidden_layer"])
            file.write_text(json.dumps(config))
        yield str(directory)


def context(stage: str, path: str, device: str, dtype: str, max_batch: int, options: dict[str, Any]) -> StageContext:
    spec = load_pipeline("qwen3_omni")
    return StageContext(
        stage=stage,
        pipeline=spec,
        model_path=path,
        device=device if stage != "processor" else "cpu",
        config=StageConfig(devices=(device,), dtype=dtype, max_batch=max_batch, options=options),
        edges={edge.name: EdgeConfig(credits=edge.credits) for edge in spec.edges},
        progress=lambda fraction, detail: None,
    )


def request(number: int, sampling: SamplingParams, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> StageRequest:
    options = RequestOptions(modalities=("text", "audio"))
    return StageRequest(
        id=number, options=options, sampling=sampling, inputs=inputs, outputs=outputs, deadline=time.monotonic() + 600
    )


def run(stage: Stage) -> list[Output]:
    """All of its outputs. Raises AssertionError where it failed a request."""
    outputs = []
    while stage.has_work():
        for emission in stage.step():
            assert not isinstance(emission, StageError), emission
            if isinstance(emission, Output):
                outputs.append(emission)
    return outputs


def prompts(path: str) -> dict[str, dict[int, Chunk]]:
    """By edge, what the processor makes of each conversation."""
    spec = load_pipeline("qwen3_omni")
    processor = spec.stage("processor").factory()
    processor.load(context("processor", path, "cpu", "float32", len(WORDS), {}))
    edges = ("processor->thinker", "processor->talker")
    words = ("river", "lamp", "seven", "walk", "green", "letter", "tall")
    for number, count in enumerate(WORDS):
        text = " ".join(words[(number + at) % len(words)] for at in range(count))
        processor.open(request(number, SamplingParams(), (spec.entry.name,), edges))
        processor.feed(number, Chunk(spec.entry.name, ChatInput((Message("user", (TextPart(text),)),)), {}, True))
    chunks: dict[str, dict[int, Chunk]] = {edge: {} for edge in edges}
    for output in run(processor):
        chunks[output.edge][output.request_id] = Chunk(output.edge, output.payload, output.tensors, output.last)
    assert all(len(found) == len(WORDS) for found in chunks.values())
    return chunks


def serve(
    program: ThinkerProgram | TalkerProgram,
    ctx: StageContext,
    fed: Sequence[dict[int, Chunk]],
    outputs: tuple[str, ...],
    steps: int,
) -> list[Output]:
    """One form of the engine over a program that is loaded already; that many tokens of each request, greedily."""
    stage = ARStage(program, ThinkerOptions if ctx.stage == "thinker" else DecoderOptions)
    with instead(program, load=lambda ctx: None):
        stage.load(ctx)
    sampling = SamplingParams(temperature=0.0, max_tokens=steps, min_tokens=steps, ignore_eos=True, repetition_penalty=1.0)
    inputs = tuple(chunk.edge for chunks in fed for chunk in (chunks[0],))
    for number in range(len(WORDS)):
        stage.open(request(number, sampling, inputs, outputs))
    for chunks in fed:
        for number, chunk in chunks.items():
            stage.feed(number, chunk)
    return run(stage)


@contextlib.contextmanager
def instead(where: Any, **attributes: Any) -> Iterator[None]:
    """Attributes of an object for a while; what it has of its class comes back."""
    own = {name: where.__dict__[name] for name in attributes if name in where.__dict__}
    for name, value in attributes.items():
        setattr(where, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(where, name, own[name])
            else:
                delattr(where, name)
