"""What one form of the AR engine draws, and from what: recorded position by position, each fed what another form drew, if wanted."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.bare_stages import instead
from omni_bus.stages.ar.attention import ContiguousAttention
from omni_bus.stages.ar.decoder import Decoder
from omni_bus.stages.ar.graphs import bucket_sizes
from omni_bus.stages.ar.program import Row
from omni_bus.stages.qwen3_omni.talker import TalkerProgram
from omni_bus.stages.qwen3_omni.thinker import ThinkerProgram

EPSILON = torch.finfo(torch.bfloat16).eps  # 2**-7: from one number to the next, so that a rounding moves it by 2**-8 at most


@dataclasses.dataclass
class Answer:
    """What one form made of one request; tensors on the CPU, in float32."""

    states: list[torch.Tensor] = dataclasses.field(default_factory=list)  # [hidden] each, post-norm: what a token is drawn from
    tokens: list[int] = dataclasses.field(default_factory=list)
    frames: list[list[int]] = dataclasses.field(default_factory=list)  # the Talker's: 16 codes each
    sums: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of a frame's embeddings: [hidden], where it was made
    scores: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of a frame's residual codes: [15, vocab]


Answers = dict[int, Answer]


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
