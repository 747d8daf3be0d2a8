"""Draws from a text model's whole vocabulary: the kernels against torch's operators, in a graph as outside, and how long they take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from bench.gpu_checks.engine import CUDA, CountingProgram, _id_prompts, _stage, graph_time
from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar import device_sampler
from omni_bus.stages.ar.causal_lm import PromptIds
from omni_bus.stages.ar.drawing import Drawing
from omni_bus.stages.ar.program import StepTensors
from omni_bus.stages.contract import Chunk, StageError, StageRequest

VOCAB = 152_064
KNOBS = (  # temperature, top_k, top_p
    (0.0, 50, 0.8),
    (1.0, 50, 0.8),
    (0.9, 50, 1.0),
    (1.0, 0, 1.0),
    (0.7, 0, 0.9),
    (2.0, 5, 0.3),
    (1.0, 10_000, 0.999),
    (1.0, 1, 1.0),
)
SPREADS = (0.05, 1.0, 4.0)  # of the scores: nearly flat, as a random model's, as a trained one's
DIFFERENT = 5e-3  # of all draws, where a rounding decides: two noisy scores, or what top_p still leaves in


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    for dtype in (torch.float32, torch.bfloat16):
        yield f"draws from {VOCAB} scores, {str(dtype)[6:]}", functools.partial(_parity, dtype)
    yield "a row's draw does not depend on its batch", _batches
    yield "sampled rows by graphs", _rows
    yield "time of a draw", _times


def knobs(rows: int, draws: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Seeds, numbers of draws, temperatures, top_k and top_p, on the GPU."""
    chosen = [KNOBS[row % len(KNOBS)] for row in range(rows)]
    made = [
        torch.randint(0, 2**63 - 1, (rows,), generator=generator),
        torch.full((rows,), draws),
        *(torch.tensor([one[index] for one in chosen]) for index in range(3)),
    ]
    return [one.to(CUDA) for one in made]


def _parity(dtype: torch.dtype) -> str:
    generator, noise = torch.Generator().manual_seed(0), torch.Generator(CUDA).manual_seed(0)
    different = drawn = 0
    for spread in SPREADS:
        for number, rows in enumerate((1, 3, 64, 64, 64)):
            scores = (spread * torch.randn(rows, VOCAB, device=CUDA, generator=noise)).to(dtype)
            scores[:, ::11] = -torch.inf
            given = knobs(rows, number, generator)
            kernel = device_sampler.sample(scores, *given)
            plain = device_sampler.sample_plain(scores, *given)
            exact = (given[2] == 0) | (given[3] == 1)
            best = scores.float().gather(1, kernel[:, None])[:, 0] == scores.float().amax(1)
            assert bool(best[exact].all()), "a greedy row takes no best score"
            different += int((kernel != plain)[~exact].sum())
            drawn += int((~exact).sum())
    assert different <= DIFFERENT * drawn, f"{different} of {drawn} draws differ"
    return f"{different} of {drawn} draws differ"


def _batches() -> str:
    generator, noise = torch.Generator().manual_seed(1), torch.Generator(CUDA).manual_seed(1)
    scores = torch.randn(64, VOCAB, device=CUDA, generator=noise)
    given = knobs(64, 3, generator)
    together = device_sampler.sample(scores, *given)
    for row in range(64):
        alone = device_sampler.sample(scores[row : row + 1], *[one[row : row + 1] for one in given])
        assert alone.item() == together[row].item(), f"row {row}"
    again = device_sampler.sample(scores.flip(0), *[one.flip(0) for one in given]).flip(0)
    assert torch.equal(again, together)
    return "64 rows alone, together and in reverse"


class WideProgram(CountingProgram):
    """With more scores than a row of the small kernel has."""

    def __init__(self) -> None:
        super().__init__(0)
        generator = torch.Generator().manual_seed(6)
        size = 3 * device_sampler.MAX_FUSED_VOCAB + 17
        self.table, self.head = (torch.randn(size, self.decoder.config.hidden, generator=generator).to(CUDA) for _ in range(2))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.head).float()


def _rows() -> str:
    """12 rows with knobs of all kinds that begin at different steps: tokens of replayed graphs as of the same operators one by one,
    and as of a row alone."""
    program, made = WideProgram(), {}
    for graphs, alone in (("plain", False), ("auto", False), ("auto", True)):
        stage, tokens = _stage(program, graphs=graphs), {}
        for number, ids in _id_prompts().items():
            temperature, top_k, top_p = KNOBS[number % len(KNOBS)]
            sampling = SamplingParams(
                max_tokens=48, temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=1 + 0.1 * (number % 3)
            )
            request = StageRequest(
                id=number, options=RequestOptions(seed=number), sampling=sampling, inputs=(), outputs=(), deadline=1e9
            )
            stage.open(request)
            stage.feed(number, Chunk("in", PromptIds(tuple(ids)), {}, True))
            while stage.has_work() and (alone or number == 11):
                _collect(stage.step(), tokens)
            _collect(stage.step(), tokens)
        assert len(tokens) == 12
        made[graphs, alone] = tokens
    assert made["plain", False] == made["auto", False], "graphs give other tokens than their operators"
    assert made["auto", True] == made["auto", False], "a row alone gives other tokens"
    distinct = len({token for row in made["auto", True].values() for token in row})
    assert distinct > 200
    return f"12 rows of 48 tokens, {distinct} different ones"


def _collect(emissions: object, tokens: dict[int, list[int]]) -> None:
    for emission in emissions:  # type: ignore[attr-defined]
        assert not isinstance(emission, StageError), emission
        tokens[emission.request_id] = [emission.usage[str(index)] for index in range(48)]


def _times() -> str:
    figures = []
    drawing = Drawing(VOCAB, 64, None, CUDA)
    for rows in (1, 4, 16, 64):
        scores = 2 * torch.randn(rows, VOCAB, device=CUDA)
        output = torch.zeros(rows, 1, dtype=torch.int64, device=CUDA)
        step = StepTensors(
            slots=torch.arange(1, rows + 1, device=CUDA),
            positions=torch.zeros(3, rows, dtype=torch.int64, device=CUDA),
            tokens=torch.zeros(rows, dtype=torch.int64, device=CUDA),
            seeds=torch.arange(rows, device=CUDA),
            draws=torch.arange(rows, device=CUDA),
            top_k=torch.full((rows,), 50, device=CUDA),
            temperature=torch.full((rows,), 0.7, device=CUDA),
            top_p=torch.full((rows,), 0.9, device=CUDA),
            penalty=torch.ones(rows, device=CUDA),
            no_eos=torch.zeros(rows, dtype=torch.bool, device=CUDA),
        )
        free = dataclasses.replace(step, top_k=0 * step.top_k, top_p=torch.ones(rows, device=CUDA))
        given = (step.seeds, step.draws, step.temperature, step.top_k, step.top_p)
        spent = [
            graph_time(functools.partial(drawing.draw, output, scores, step, step.tokens), 10),
            graph_time(functools.partial(drawing.draw, output, scores, free, step.tokens), 10),
            graph_time(functools.partial(device_sampler.sample_plain, scores, *given), 3),
        ]
        figures.append(f"{rows}: " + " / ".join(f"{one * 1e6:.0f}" for one in spent))
    return "µs of rows, top_k 50 and top_p 0.9 / neither / the first by operators: " + ", ".join(figures)
