"""sample_rows: each row as if it were alone, with transformers' own warpers as the reference."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.sampler import sample_rows

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.8),
    SamplingParams(temperature=0.9, top_k=50, top_p=1.0),
    SamplingParams(temperature=1.0, top_k=-1),
    SamplingParams(temperature=0.5, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.8),
]


def alone(scores: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    if not params.temperature:
        return int(scores.argmax())
    scores = scores[None]
    if params.temperature != 1.0:
        scores = TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.top_k and params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p and params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator))


def test_each_row_is_sampled_as_if_alone():
    noise = torch.Generator().manual_seed(0)
    ours = [torch.Generator().manual_seed(row) for row in range(len(PARAMS))]
    theirs = [torch.Generator().manual_seed(row) for row in range(len(PARAMS))]
    seen = set()
    for _ in range(40):
        scores = 3 * torch.randn(len(PARAMS), 2048, generator=noise)
        tokens = sample_rows(scores, PARAMS, ours)
        assert tokens.dtype == torch.int64
        assert tokens.tolist() == [alone(*row) for row in zip(scores, PARAMS, theirs, strict=True)]
        seen.update(tokens.tolist())
    assert len(seen) > 100
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine.get_state(), reference.get_state())


def test_a_greedy_row_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert sample_rows(torch.eye(3), [SamplingParams(temperature=0.0)] * 3, [generator] * 3).tolist() == [0, 1, 2]
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1.0, top_p=1e-6)])
def test_at_least_one_token_stays(params):
    scores = torch.randn(20, 100, generator=torch.Generator().manual_seed(1))
    generators = [torch.Generator().manual_seed(row) for row in range(20)]
    assert torch.equal(sample_rows(scores, [params] * 20, generators), scores.argmax(dim=-1))
