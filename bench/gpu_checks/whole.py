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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from bench.bare_stages import WORDS, checkpoint, context, instead, prompts, request, run, serve
from bench.recorded_forms import EPSILON, Answers, kept, noisy, plain_recorded, stepped_recorded
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.attention import PagedAttention, Span
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.contract import Chunk
from omni_bus.stages.qwen3_omni import random_weights
from omni_bus.stages.qwen3_omni.code2wav import Code2WavStage
from omni_bus.stages.qwen3_omni.payloads import CodecFrames, ThinkerTokens
from omni_bus.stages.qwen3_omni.talker import TalkerProgram
from omni_bus.stages.qwen3_omni.thinker import ThinkerProgram

REFERENCE_LAYERS = 5
STEPS = 16
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
        serve(program, ctx, fed, outputs, STEPS)
    with plain_recorded(program, plain) as moved, noisy(program.decoder):
        serve(program, ctx, fed, outputs, STEPS)
    begun = time.perf_counter()
    with stepped_recorded(program, plain, count) as other:
        serve(program, context(stage, path, device, "bfloat16", count, {**KV, **fast}), fed, outputs, STEPS)
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
