"""Sampling by counters: the noise is Philox, draws follow the distribution, and a row never notices its batch."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.device_sampler import MAX_FUSED_VOCAB, adjust, fine_gumbel, gumbel, philox, sample
from omni_bus.stages.ar.sampler import _warp

KNOBS = [(0.0, 50, 0.8), (1.0, 50, 0.8), (0.9, 50, 1.0), (1.0, 0, 1.0), (0.5, 0, 0.9), (2.0, 5, 0.3), (1.0, 10_000, 0.999)]


def arguments(rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 7) -> list[torch.Tensor]:
    """One seed, draw numbers 0 … rows-1, the same knobs for all."""
    return [
        torch.full((rows,), seed),
        torch.arange(rows),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
    ]


def mixed(rows: int) -> list[torch.Tensor]:
    """Knobs in turn, seeds over the whole range of 64 bits."""
    noise = torch.Generator().manual_seed(1)
    knobs = [KNOBS[row % len(KNOBS)] for row in range(rows)]
    return [
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=noise),
        torch.randint(0, 2**40, (rows,), generator=noise),
        torch.tensor([one[0] for one in knobs]),
        torch.tensor([one[1] for one in knobs]),
        torch.tensor([one[2] for one in knobs]),
    ]


def test_the_noise_is_philox() -> None:
    """Known answers of the authors' own tests (Random123, kat_vectors): the first word of the block of zeros, and that every part of key and counter counts."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert philox(zero, zero, 1).item() == 0x6627E8D5
    words = philox(torch.tensor([5, 5, 6]), torch.tensor([0, 2**32, 0]), 3000)
    assert len(words.unique()) > 8990, "seed, draw and column each change the word"
    assert int(words.min()) >= 0 and int(words.max()) < 2**32


def test_the_noise_is_finite_and_standard() -> None:
    noise = gumbel(torch.arange(100), torch.arange(100), 4096)
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01 and abs(float(noise.var()) - 1.6449) < 0.02


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), KNOBS[1:])
def test_draws_follow_the_warped_softmax(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square against the softmax of what top_k and top_p leave in; nothing else is ever drawn."""
    draws = 20_000
    scores = 2 * torch.randn(1, 60, generator=torch.Generator().manual_seed(3))
    expected = _warp(scores, temperature, top_k, top_p).softmax(dim=-1)[0] * draws
    tokens = sample(scores.expand(draws, -1), *arguments(draws, temperature=temperature, top_k=top_k, top_p=top_p))
    counts = torch.bincount(tokens, minlength=60).float()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    rare = torch.stack((counts[~common].sum(), expected[~common].sum()))
    chi = ((counts[common] - expected[common]) ** 2 / expected[common]).sum()
    if rare[1] > 0:
        chi += (rare[0] - rare[1]) ** 2 / rare[1]
    freedom = int(common.sum())
    assert chi < freedom + 4 * (2 * freedom) ** 0.5 + 4, (chi, freedom)


def test_draws_of_one_row_are_independent() -> None:
    """Pairs of successive draws over a fair table of 8: chi-square with 56 degrees of freedom, and between neighbouring seeds too."""
    for other in (arguments(20_001)[:2], [torch.arange(20_001), torch.full((20_001,), 3)]):
        knobs = arguments(20_001)[2:]
        tokens = sample(torch.zeros(20_001, 8), *other, *knobs)
        pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64).float()
        assert ((pairs - 312.5) ** 2 / 312.5).sum() < 110


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = 35
    scores = 3 * torch.randn(rows, 500, generator=torch.Generator().manual_seed(2))
    knobs = mixed(rows)
    together = sample(scores, *knobs)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(4))
    assert torch.equal(sample(scores[order], *[one[order] for one in knobs]), together[order])
    for row in range(rows):
        alone = sample(scores[row : row + 1], *[one[row : row + 1] for one in knobs])
        assert alone.item() == together[row].item()


def test_greedy_and_narrow_rows_take_the_best() -> None:
    scores = torch.randn(50, 300, generator=torch.Generator().manual_seed(5))
    best = scores.argmax(dim=-1)
    for knobs in ({"temperature": 0.0, "top_k": 50}, {"top_k": 1}, {"top_p": 1e-6}):
        assert torch.equal(sample(scores, *arguments(50, **knobs)), best)


def test_what_is_left_in_is_what_transformers_leaves_in() -> None:
    """On random scores, over many draws, the support equals that of the CPU sampler, whose reference is transformers."""
    noise = torch.Generator().manual_seed(6)
    for params in (SamplingParams(temperature=8.0, top_k=6), SamplingParams(temperature=8.0, top_k=20, top_p=0.5)):
        scores = torch.randn(1, 40, generator=noise)
        left = _warp(scores, params.temperature or 0, params.top_k or 0, params.top_p or 1.0).isfinite()[0]
        knobs = arguments(3000, temperature=8.0, top_k=params.top_k or 0, top_p=params.top_p or 1.0)
        assert torch.equal(torch.bincount(sample(scores.expand(3000, -1), *knobs), minlength=40) > 0, left)


def test_scores_of_minus_infinity_are_never_drawn() -> None:
    scores = torch.zeros(2000, 16)
    scores[:, ::2] = -torch.inf
    tokens = sample(scores, *arguments(2000, top_k=12, top_p=0.99))
    assert (tokens % 2 == 1).all()


def test_scores_are_adjusted_as_by_transformers() -> None:
    noise = torch.Generator().manual_seed(8)
    scores, penalty = torch.randn(3, 20, generator=noise), torch.tensor([1.0, 1.3, 0.7])
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [0, 2, 4, 6]])
    seen = torch.zeros(9, 20, dtype=torch.bool)
    slots = torch.tensor([4, 8, 1])
    seen[slots] = torch.zeros(3, 20, dtype=torch.bool).scatter(1, ids, True)
    banned, ending = torch.zeros(20, dtype=torch.bool), torch.zeros(20, dtype=torch.bool)
    banned[10:12], ending[5] = True, True
    got = adjust(scores, seen, slots, penalty, banned, ending, torch.tensor([True, False, True]))
    for row in range(3):
        expected = RepetitionPenaltyLogitsProcessor(float(penalty[row]))(ids[row : row + 1], scores[row : row + 1].clone())
        expected[0, [10, 11] if row == 1 else [5, 10, 11]] = -torch.inf
        assert torch.equal(got[row : row + 1], expected)


def test_noise_of_many_columns_is_standard_and_has_no_ties() -> None:
    vocab = 152_064
    noise = fine_gumbel(torch.arange(8), torch.arange(8), vocab)
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01 and abs(float(noise.var()) - 1.6449) < 0.02
    high = noise[noise > 6].sort().values
    assert len(high) > 2000 and len(high.unique()) > 0.99 * len(high), "the highest decide, and tell each other apart"
    words = philox(torch.arange(8), torch.arange(8), vocab)
    exact = -(-torch.log1p(-(words.double() + 0.5) * 2.0**-32)).log()
    wrong = (noise - exact).abs()
    assert float(wrong[exact > 0].max()) < 3e-5 and float(wrong.max()) < 0.02, "coarse only where it is lowest"


def test_draws_from_a_long_row_follow_the_warped_softmax() -> None:
    """Above MAX_FUSED_VOCAB: the share of ten likely columns among 4,100, and nothing that top_p leaves out."""
    vocab, draws = 4100, 1500
    scores = torch.full((1, vocab), -4.0)
    scores[0, ::410] = torch.linspace(1, 4, 10)
    assert vocab > MAX_FUSED_VOCAB
    for top_k, top_p in ((0, 1.0), (10, 1.0), (0, 0.4)):
        expected = _warp(scores, 1.0, top_k, top_p).softmax(dim=-1)[0]
        counts = torch.zeros(vocab)
        for begin in range(0, draws, 500):
            knobs = arguments(500, top_k=top_k, top_p=top_p, seed=begin)
            counts += torch.bincount(sample(scores.expand(500, -1), *knobs), minlength=vocab)
        assert counts[expected == 0].sum() == 0
        likely = expected > 1e-3
        groups = torch.stack((counts[likely], expected[likely] * draws))
        groups = torch.cat((groups, draws - groups.sum(1, keepdim=True)), dim=1) if top_k == 0 and top_p == 1 else groups
        chi = ((groups[0] - groups[1]) ** 2 / groups[1]).sum()
        freedom = groups.shape[1]
        assert chi < freedom + 4 * (2 * freedom) ** 0.5 + 4, (top_k, top_p, chi)
