"""Whole answers at the real size in bfloat16: graphs and kernels against plain operators on the same weights, position by position.

Both forms are the engine's own; the second is fed what the first drew, so that rounding is compared and not what follows from it. How
far rounding goes is measured: where it tips the choice of an expert, one position is off by much more than another. So the plain form
runs once more, with what each layer hands on moved by up to EPSILON of itself (half of that is what a rounding moves it by), and the
other form may be off by twice as much. That such noise is worth what all roundings of a layer are is measured too, against float32 with
REFERENCE_LAYERS layers, where that fits; where it is worth less, more is allowed by as much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import pathlib
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from omni_bus.deployment import EdgeConfig, StageConfig
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, Message, TextPart
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from omni_bus.stages.ar.attention import ContiguousAttention, PagedAttention, Span
from omni_bus.stages.ar.decoder import Decoder
from omni_bus.stages.ar.graphs import bucket_sizes
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.ar.program import Row
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import Chunk, Output, Stage, StageContext, StageError, StageRequest
from omni_bus.stages.qwen3_omni import fixture, random_weights
from omni_bus.stages.qwen3_omni.code2wav import Code2WavStage
from omni_bus.stages.qwen3_omni.options import DecoderOptions, ThinkerOptions
from omni_bus.stages.qwen3_omni.payloads import CodecFrames, ThinkerTokens
from omni_bus.stages.qwen3_omni.talker import TalkerProgram
from omni_bus.stages.qwen3_omni.thinker import ThinkerProgram

EPSILON = torch.finfo(torch.bfloat16).eps  # 2**-7: from one number to the next, so that a rounding moves it by 2**-8 at most
REFERENCE_LAYERS = 5
STEPS = 16
WORDS = (60, 9, 25)  # of the prompts; the rows are together in one batch
TIMES = 2.0  # as far as noise goes
SPREAD = 6.0  # standard deviations of an error that a score may be off by: there are up to 150,000 of them
RESIDUAL = 3e-2  # what the residual codes' scores may be off by of their norm (bench/gpu_checks/talker.py)
PLAIN = {"graphs": "off", "attention": "torch", "kernels": "torch"}
FAST = {"graphs": "auto", "attention": "auto", "kernels": "auto"}
STEPPED = {"graphs": "plain", "attention": "torch", "kernels": "torch"}  # the same on a CPU, as near as it comes
KV = {"kv_blocks": 96, "load": "random"}


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "thinker", functools.partial(thinker, "full", "cuda", FAST)
    yield "talker", functools.partial(talker, "full", "cuda", FAST)
    yield "code2wav", functools.partial(code2wav, "full", "cuda", "auto")


@dataclasses.dataclass
class Answer:
    """What one form made of one request; tensors on the CPU, in float32."""

    states: list[torch.Tensor] = dataclasses.field(default_factory=list)  # [hidden] each, post-norm: what a token is drawn from
    tokens: list[int] = dataclasses.field(default_factory=list)
    frames: list[list[int]] = dataclasses.field(default_factory=list)  # the Talker's: 16 codes each
    sums: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of a frame's embeddings: [hidden], where it was made
    scores: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of a frame's residual codes: [15, vocab]


Answers = dict[int, Answer]


# ---- a stage, one form after the other on the same weights


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
) -> list[Output]:
    """One form of the engine over a program that is loaded already; STEPS tokens of each request, greedily."""
    stage = ARStage(program, ThinkerOptions if ctx.stage == "thinker" else DecoderOptions)
    with instead(program, load=lambda ctx: None):
        stage.load(ctx)
    sampling = SamplingParams(temperature=0.0, max_tokens=STEPS, min_tokens=STEPS, ignore_eos=True, repetition_penalty=1.0)
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


def kept(state: torch.Tensor) -> torch.Tensor:
    return state.detach().float().cpu()


@contextlib.contextmanager
def plain_recorded(program: ThinkerProgram | TalkerProgram, past: Answers | None = None) -> Iterator[Answers]:
    """What the form without graphs draws, and from what. `past`: each position is fed what that drew instead."""
    answers: Answers = {}
    sampled = program.sampled

    def record(rows: Sequence[Row], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        fed = list(tokens)
        for index, (row, state) in enumerate(zip(rows, hidden, strict=True)):
            answer = answers.setdefault(row.request.id, Answer())
            if past is not None:
                fed[index] = past[row.request.id].tokens[len(answer.states)]
            answer.states.append(kept(state))
            answer.tokens.append(tokens[index])
        sampled(rows, fed, hidden)

    with contextlib.ExitStack() as stack:
        stack.enter_context(instead(program, sampled=record))
        if isinstance(program, TalkerProgram):
            stack.enter_context(_plain_frames(program, answers, past))
        yield answers


@contextlib.contextmanager
def _plain_frames(program: TalkerProgram, answers: Answers, past: Answers | None) -> Iterator[None]:
    """Residual codes by plain operators, recorded with their scores."""
    predictor, frames = program.code_predictor, program._frames
    scores, predict = predictor._scores, predictor.predict
    found: list[torch.Tensor] = []
    going: list[Row] = []

    def scored(inputs: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        found.append(scores(inputs, head))
        return found[-1]

    def predicted(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found.clear()
        codes, sums = predict(*arguments)
        for index, row in enumerate(going):
            answer = answers[row.request.id]
            if past is not None:
                codes[index] = torch.tensor(past[row.request.id].frames[len(answer.frames)])
                sums[index] = past[row.request.id].sums[len(answer.frames)]
            answer.frames.append(codes[index].tolist())
            answer.sums.append(sums[index].clone())
            answer.scores.append(torch.stack([kept(one[index]) for one in found]))
        return codes, sums

    def record(rows: Sequence[Row], tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        going[:] = rows
        frames(rows, tokens, hidden)

    attend = types.MethodType(ContiguousAttention.attend, predictor.cache)
    with (
        instead(program, _frames=record),
        instead(predictor, _scores=scored, predict=predicted, fused=False),
        instead(predictor.cache, attend=attend),
        instead(predictor.decoder, kernels="torch"),
    ):
        yield


@contextlib.contextmanager
def noisy(decoder: Decoder) -> Iterator[None]:
    """What each layer hands on is moved by up to EPSILON of itself."""
    generator = torch.Generator(next(decoder.parameters()).device).manual_seed(0)

    def move(layer: Any, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(
            one * (1 + EPSILON * (2 * torch.rand(one.shape, generator=generator, device=one.device) - 1)).to(one.dtype)
            for one in outputs
        )

    hooks = [layer.register_forward_hook(move) for layer in decoder.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def stepped_recorded(program: ThinkerProgram | TalkerProgram, plain: Answers, max_batch: int) -> Iterator[Answers]:
    """What the form by steps of fixed size draws. Each step is fed what `plain` drew, so that all positions have the same past."""
    answers: Answers = {}
    parameter = next(program.decoder.parameters())
    hidden_of = {
        size: torch.zeros(size, program.decoder.config.hidden, dtype=parameter.dtype, device=parameter.device)
        for size in bucket_sizes(max_batch)
    }
    graph_output, graph_sampled = program.graph_output, program.graph_sampled

    def output(hidden: torch.Tensor, step: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_of[len(hidden)].copy_(hidden)  # is part of the graph
        return graph_output(hidden, step)

    def record(rows: Sequence[Row], drawn: torch.Tensor) -> None:
        states = hidden_of[min(size for size in hidden_of if size >= len(rows))]
        forced = drawn.clone()
        places = []
        for index, row in enumerate(rows):
            answer = answers.setdefault(row.request.id, Answer())
            place = len(answer.states)
            places.append(place)
            answer.states.append(kept(states[index]))
            answer.tokens.append(int(drawn[index, 0]))
            if isinstance(program, TalkerProgram):
                answer.frames.append(drawn[index].tolist())
                if row.finish_reason is None:
                    forced[index] = torch.tensor(plain[row.request.id].frames[place])
            else:
                forced[index, 0] = plain[row.request.id].tokens[place]
        graph_sampled(rows, forced)
        if isinstance(program, TalkerProgram):
            for row, place in zip(rows, places, strict=True):
                if row.finish_reason is None:
                    program._slots.frame_sum[row.slot].copy_(plain[row.request.id].sums[place])

    with instead(program, graph_output=output, graph_sampled=record):
        yield answers


# ---- what may differ


def apart(answers: Answers, expected: Answers) -> dict[int, list[float]]:
    """By how much of its norm each state differs."""
    assert answers.keys() == expected.keys() and len(answers) == len(WORDS)
    found: dict[int, list[float]] = {}
    for number, answer in answers.items():
        assert len(answer.states) == len(expected[number].states) == STEPS, "not as many positions"
        assert all(bool(state.isfinite().all()) for state in answer.states), "a state is not finite"
        pairs = zip(answer.states, expected[number].states, strict=True)
        found[number] = [float((state - other).norm() / other.norm()) for state, other in pairs]
    return found


def quantiles(errors: Iterable[float]) -> tuple[float, float]:
    """(the median, what one in ten exceeds)"""
    ordered = sorted(errors)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10]


def noise_is_worth(
    make: Callable[[], ThinkerProgram | TalkerProgram], stage: str, size: str, device: str
) -> tuple[float, float]:
    """Medians, of a state's norm: (plain operators in bfloat16 from float32 with equal weights, from themselves with noise)"""
    draw = random_weights.draw

    def rounded(*arguments: Any) -> torch.Tensor:
        return draw(*arguments).to(torch.bfloat16).float()

    inputs, states = None, []
    with checkpoint(size, REFERENCE_LAYERS) as path, instead(random_weights, draw=rounded):
        for dtype, noise in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
            if not noise:
                program = make()
                program.load(context(stage, path, device, str(dtype)[6:], 1, KV))
            decoder = program.decoder
            if inputs is None:
                table = program.embed_tokens if isinstance(program, ThinkerProgram) else program.prompts.text_table
                ids = torch.randint(0, len(table), (64,), generator=torch.Generator().manual_seed(0))
                inputs = table[ids.to(device)]
            decoder.kernels = "torch"
            cache = KVCache(decoder.config, blocks=8, block_size=16, dtype=dtype, device=torch.device(device))
            attention = PagedAttention(decoder.config, cache)
            attention.plan([Span([1, 2, 3, 4], 0, len(inputs))])
            positions = torch.arange(len(inputs), device=device).expand(3, -1)
            with noisy(decoder) if noise else contextlib.nullcontext():
                states.append(kept(decoder(inputs.to(dtype), positions, attention)[0]))
            del decoder, attention, cache
            if dtype == torch.float32 or noise:
                del program
                free()
    short, moved, exact = states
    return tuple(
        quantiles(((one - other).norm(dim=1) / other.norm(dim=1)).tolist())[0]
        for one, other in ((short, exact), (moved, short))
    )  # type: ignore[return-value]


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclasses.dataclass
class Compared:
    plain: Answers
    other: Answers
    off: dict[int, list[float]]  # by how much of its norm each state differs
    layers: int
    figure: str


def compared(
    program: ThinkerProgram | TalkerProgram,
    stage: str,
    size: str,
    path: str,
    device: str,
    fast: dict[str, Any],
    fed: Sequence[dict[int, Chunk]],
    outputs: tuple[str, ...],
) -> Compared:
    """Raises AssertionError where the states differ by more than rounding makes them."""
    count = len(WORDS)
    exact, worth = noise_is_worth(type(program), stage, size, device)
    factor = TIMES * max(1.0, exact / worth)
    program.load(context(stage, path, device, "bfloat16", count, KV))
    ctx = context(stage, path, device, "bfloat16", count, {**KV, **PLAIN})
    with plain_recorded(program) as plain:
        serve(program, ctx, fed, outputs)
    with plain_recorded(program, plain) as moved, noisy(program.decoder):
        serve(program, ctx, fed, outputs)
    begun = time.perf_counter()
    with stepped_recorded(program, plain, count) as other:
        serve(program, context(stage, path, device, "bfloat16", count, {**KV, **fast}), fed, outputs)
    spent = time.perf_counter() - begun
    off = apart(other, plain)
    found = quantiles(error for errors in off.values() for error in errors)
    noise = quantiles(error for errors in apart(moved, plain).values() for error in errors)
    said = (
        f"states off by {found[0]:.1e} of their norm, one in ten by {found[1]:.1e}; noise makes {noise[0]:.1e}, {noise[1]:.1e} and "
        f"{factor:.1f} times that is allowed (plain operators from float32 {exact:.1e}, noise {worth:.1e}, with {REFERENCE_LAYERS} layers)"
    )
    assert all(one <= factor * limit for one, limit in zip(found, noise, strict=True)), said
    return Compared(plain, other, off, program.decoder.config.layers, f"{said}; {spent:.1f} s with capture")


def near(chosen: int, best: int, scores: torch.Tensor, off: float) -> bool:
    """Whether scores that are off by that much of their norm can have put the one before the other."""
    return float(scores[best] - scores[chosen]) <= SPREAD * off * float(scores.std())


def scores_of(program: ThinkerProgram | TalkerProgram, state: torch.Tensor) -> torch.Tensor:
    """[vocab], what is never drawn at -inf."""
    scores = program.logits(state.to(program.device, torch.bfloat16)[None])[0]
    if program.suppressed_ids is not None:
        scores[program.suppressed_ids] = scores.min()
    scores[list(program.eos_ids)] = scores.min()
    return kept(scores)


@torch.no_grad()
def thinker(size: str, device: str, fast: dict[str, Any]) -> str:
    with checkpoint(size) as path:
        program, outputs = ThinkerProgram(), ("thinker->client", "thinker->talker")
        fed = [prompts(path)["processor->thinker"]]
        seen = compared(program, "thinker", size, path, device, fast, fed, outputs)
        same = 0
        for number, answer in seen.other.items():
            for state, token, expected in zip(answer.states, answer.tokens, seen.plain[number].tokens, strict=True):
                scores = scores_of(program, state)
                assert near(token, int(scores.argmax()), scores, EPSILON), "a token that its own state does not choose"
                same += token == expected
    total = len(WORDS) * STEPS
    return f"{total} positions, {seen.layers} layers, {same} tokens equal; {seen.figure}"


@torch.no_grad()
def talker(size: str, device: str, fast: dict[str, Any]) -> str:
    with checkpoint(size) as path:
        program = TalkerProgram()
        last = Chunk("thinker->talker", ThinkerTokens(tuple(range(20, 20 + STEPS)), True), {}, True)
        fed = [prompts(path)["processor->talker"], dict.fromkeys(range(len(WORDS)), last)]
        seen = compared(program, "talker", size, path, device, fast, fed, ("talker->code2wav",))
        frames = equal = alike = 0
        for number, answer in seen.other.items():
            expected = seen.plain[number]
            for place, frame in enumerate(expected.frames):
                found = answer.frames[place]
                scores = scores_of(program, answer.states[place])
                assert near(found[0], int(scores.argmax()), scores, EPSILON), "a code that its own state does not choose"
                differs = next((at for at, pair in enumerate(zip(frame, found, strict=True)) if pair[0] != pair[1]), len(frame))
                frames, equal, alike = frames + 1, equal + (differs == len(frame)), alike + differs
                if 0 < differs < len(frame):
                    scores = expected.scores[place][differs - 1]
                    off = seen.off[number][place] + RESIDUAL
                    assert near(found[differs], frame[differs], scores, off), (
                        f"code {differs} of frame {place}, and no near tie"
                    )
    return (
        f"{frames} frames of {len(frame)} codes, {seen.layers} layers, {equal} equal, {alike / frames:.1f} codes up to the first that "
        f"differs, each at a near tie; {seen.figure}"
    )


@torch.no_grad()
def code2wav(size: str, device: str, graphs: str, frames: int = 60) -> str:
    """Samples of three streams by the stage, a frame at a time: the fused form, and plain operators, against float32 ones."""
    samples = {}
    with checkpoint(size) as path:
        for dtype, form in (("float32", "off"), ("bfloat16", "off"), ("bfloat16", graphs)):
            stage = Code2WavStage(clock=lambda: 0.0)
            kernels = "auto" if form == "auto" else "torch"
            stage.load(
                context("code2wav", path, device, dtype, len(WORDS), {"load": "random", "graphs": form, "kernels": kernels})
            )
            samples[dtype, form] = _spoken(stage, frames)
            del stage
            free()
    exact, short, fused = (torch.cat(list(one.values())).double() for one in samples.values())
    assert float(exact.std()) > 30, "the model is silent: nothing is compared"
    unit = float(exact.std())
    rounded, other, between = (float((one - two).std()) / unit for one, two in ((short, exact), (fused, exact), (fused, short)))
    assert other <= 1.2 * rounded + 1e-3, f"the fused form is off by {other:.1e}, plain operators by {rounded:.1e}"
    assert between <= 2 * rounded + 1e-3, f"the two forms are {between:.1e} apart; rounding makes {rounded:.1e}"
    return f"{len(exact)} samples: off from float32 by {other:.1e} of their deviation, plain operators {rounded:.1e}; apart {between:.1e}"


def _spoken(stage: Code2WavStage, frames: int) -> dict[int, torch.Tensor]:
    """int16 samples of each stream."""
    generator = torch.Generator().manual_seed(1)
    codebook = stage._config.codebook_size
    for number in range(len(WORDS)):
        stage.open(request(number, SamplingParams(), ("talker->code2wav",), ("code2wav->client",)))
    pcm: dict[int, list[torch.Tensor]] = {}
    for place in range(frames):
        for number in range(len(WORDS)):
            codes = torch.randint(0, codebook, (1, stage._config.num_quantizers), generator=generator, dtype=torch.int16)
            stage.feed(number, Chunk("talker->code2wav", CodecFrames(1), {"codes": codes}, place == frames - 1))
        for output in run(stage):
            if "pcm" in output.tensors:
                pcm.setdefault(output.request_id, []).append(output.tensors["pcm"])
    return {number: torch.cat(pcm[number]) for number in sorted(pcm)}
