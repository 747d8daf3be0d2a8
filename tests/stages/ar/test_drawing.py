"""Draws of the engine on the device: what a row has seen, prompt and output, and what is never said."""

from __future__ import annotations

import numpy as np
import torch

from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.drawing import Drawing
from omni_bus.stages.ar.program import Row, StepTensors
from omni_bus.stages.ar.sampler import Sampler
from omni_bus.stages.contract import StageRequest

VOCAB = 50
CPU = torch.device("cpu")


def row(slot: int, *, penalty_ids: list[int], output_ids: list[int], **sampling: float) -> Row:
    request = StageRequest(
        id=slot, options=RequestOptions(), sampling=SamplingParams(**sampling), inputs=(), outputs=(), deadline=1e9
    )
    return Row(request, None, slot=slot, penalty_ids=penalty_ids, output_ids=output_ids, seed=slot)


def step(rows: list[Row]) -> tuple[StepTensors, torch.Tensor]:
    params = [one.request.sampling for one in rows]
    tensors = StepTensors(
        slots=torch.tensor([one.slot for one in rows]),
        positions=torch.zeros(3, len(rows), dtype=torch.int64),
        tokens=torch.zeros(len(rows), dtype=torch.int64),
        seeds=torch.tensor([one.seed for one in rows]),
        draws=torch.tensor([len(one.output_ids) for one in rows]),
        top_k=torch.tensor([one.top_k or 0 for one in params]),
        temperature=torch.tensor([one.temperature or 0.0 for one in params]),
        top_p=torch.tensor([1.0 if one.top_p is None else one.top_p for one in params]),
        penalty=torch.tensor([one.repetition_penalty or 1.0 for one in params]),
        no_eos=torch.zeros(len(rows), dtype=torch.bool),
    )
    return tensors, torch.tensor([one.output_ids[-1] if one.output_ids else 0 for one in rows])


def draw(drawing: Drawing, rows: list[Row], scores: torch.Tensor) -> list[int]:
    drawing.see(rows)
    output = torch.stack((scores.argmax(dim=-1), torch.arange(len(rows))), dim=1)
    tokens, finite = drawing.draw(output, scores.clone(), *step(rows))
    assert tokens[:, 1].tolist() == output[:, 1].tolist() and finite.all()
    return tokens[:, 0].tolist()


def test_the_penalty_falls_on_prompt_and_output_as_in_the_other_form() -> None:
    """Scores so close that the penalty decides; a prompt that grows, a slot used again, a step run twice."""
    drawing, sampler = Drawing(VOCAB, 4, None, CPU), Sampler(frozenset(), None)
    noise = torch.Generator().manual_seed(3)
    for turn in range(3):
        rows = [
            row(1, penalty_ids=[turn, 7, VOCAB + 3], output_ids=[], repetition_penalty=3.0),
            row(2 + turn % 2, penalty_ids=[30], output_ids=[], repetition_penalty=0.2),
            row(4, penalty_ids=[5], output_ids=[]),
        ]
        for one in rows:
            drawing.admit(one)
        for number in range(20):
            scores = 1 + 0.1 * torch.rand(3, VOCAB, generator=noise)
            expected = sampler.process(scores, rows).argmax(dim=-1).tolist()
            assert draw(drawing, rows, scores) == expected
            assert draw(drawing, rows, scores) == expected, "once more, as where a step failed"
            for one, token in zip(rows, expected, strict=True):
                one.output_ids.append(token)
            if number == 7:
                rows[0].penalty_ids.extend([11, 12])
        assert len(set(rows[0].output_ids)) == 20, "nothing twice"
        assert len(set(rows[1].output_ids)) == 1, "always the same"
        for one in rows:
            sampler.release(one)


def test_what_is_suppressed_is_never_drawn() -> None:
    drawing = Drawing(VOCAB, 2, torch.tensor([4, 9]), CPU)
    rows = [row(1, penalty_ids=[], output_ids=[], temperature=1.0), row(2, penalty_ids=[], output_ids=[])]
    assert drawing.wanted(np.zeros(2, np.float32), np.ones(2, np.float32)), "even where all are greedy"
    scores = torch.full((2, VOCAB), -30.0)
    scores[:, [4, 9]] = 10.0
    scores[:, 6] = 0.0
    assert draw(drawing, rows, scores) == [6, 6]


def test_rows_that_take_their_best_score_need_no_draw() -> None:
    drawing = Drawing(VOCAB, 2, None, CPU)
    one = np.ones(2, np.float32)
    assert not drawing.wanted(0 * one, one)
    assert drawing.wanted(np.array([0, 0.5], np.float32), one) and drawing.wanted(0 * one, np.array([1, 1.1], np.float32))


def test_a_greedy_row_is_told_the_same_beside_one_that_is_drawn() -> None:
    """Of equal scores the step's own choice stands, whichever it was."""
    drawing = Drawing(VOCAB, 2, None, CPU)
    rows = [row(1, penalty_ids=[], output_ids=[]), row(2, penalty_ids=[], output_ids=[], temperature=1.0)]
    tokens, _ = drawing.draw(torch.tensor([[17, 0], [17, 0]]), torch.zeros(2, VOCAB), *step(rows))
    assert tokens[0, 0] == 17


def test_a_row_without_a_finite_score_is_named() -> None:
    drawing = Drawing(VOCAB, 2, None, CPU)
    rows = [row(slot, penalty_ids=[], output_ids=[], temperature=1.0) for slot in (1, 2)]
    scores = torch.zeros(2, VOCAB)
    scores[1] = torch.nan
    _, finite = drawing.draw(torch.zeros(2, 1, dtype=torch.int64), scores, *step(rows))
    assert finite.tolist() == [[True], [False]]
