"""Rows that only prepare: behind all answers, in nobody's way, and not computed where nothing of it would be kept."""

from __future__ import annotations

import pytest

from omni_bus.payloads import TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.causal_lm import CausalLM
from omni_bus.stages.contract import Finished, Output
from tests.stages.ar.test_prefix_cache import BLOCK, MODES, Bench, fresh, model, prompt

__all__ = ["model"]  # the fixture
ANSWER, OTHER, AHEAD = 1, 2, 3  # request ids
FIVE = SamplingParams(max_tokens=5)


def ended(bench: Bench, number: int) -> bool:
    return any(isinstance(emission, Finished) for emission in bench.seen[number])


def open_ahead(bench: Bench, ids: list[int]) -> None:
    bench.open(AHEAD, prepare=True)
    bench.feed(AHEAD, ids)


@MODES
def test_answers_run_before_work_ahead_that_came_earlier(model: CausalLM, graphs: str) -> None:
    bench = Bench(model, graphs=graphs)
    ahead, answer = prompt(1, 5 * BLOCK), prompt(2, 3 * BLOCK)
    open_ahead(bench, ahead)
    bench.open(ANSWER, FIVE)
    bench.feed(ANSWER, answer)
    while not ended(bench, ANSWER):
        assert bench.computed <= len(answer), "the prompt of the answer, and none of the other"
        bench.step()
    assert bench.computed == len(answer) and not ended(bench, AHEAD)
    bench.run()
    assert ended(bench, AHEAD) and bench.computed == len(answer) + len(ahead)
    assert bench.ids[ANSWER] == fresh(model, answer, FIVE)
    bench.check_empty()


def test_work_ahead_that_has_begun_stops_for_an_answer_and_goes_on_behind_it(model: CausalLM) -> None:
    bench = Bench(model, max_prefill_tokens=2 * BLOCK)
    ahead, answer = prompt(3, 7 * BLOCK), prompt(4, BLOCK)
    open_ahead(bench, ahead)
    bench.step()
    assert bench.computed == 2 * BLOCK
    bench.open(ANSWER, FIVE)
    bench.feed(ANSWER, answer)
    while not ended(bench, ANSWER):
        bench.step()
    assert bench.computed == 2 * BLOCK + len(answer) and not ended(bench, AHEAD)
    bench.run()
    assert ended(bench, AHEAD) and bench.computed == len(ahead) + len(answer)
    assert bench.answer(OTHER, [*ahead, 7], FIVE) == fresh(model, [*ahead, 7], FIVE, number=OTHER)
    assert bench.computed == len(ahead) + len(answer) + 1, "what was prepared in two parts is there"
    bench.check_empty()


def test_an_answer_that_is_paused_leaves_the_stage_to_work_ahead(model: CausalLM) -> None:
    bench = Bench(model)
    bench.open(ANSWER, FIVE)
    bench.feed(ANSWER, prompt(5, BLOCK))
    bench.step()
    bench.stage.pause(ANSWER)
    open_ahead(bench, prompt(6, 3 * BLOCK))
    bench.run()
    assert ended(bench, AHEAD) and not ended(bench, ANSWER)
    bench.stage.resume(ANSWER)
    bench.run()
    assert ended(bench, ANSWER)
    bench.check_empty()


def test_work_ahead_does_not_keep_blocks_from_an_answer_that_waits_for_them(model: CausalLM) -> None:
    """Another answer is being written all the while: were the work ahead to wait for it, so would the second answer."""
    bench = Bench(model, max_prefill_tokens=2 * BLOCK, kv_blocks=20, max_length=20 * BLOCK)
    open_ahead(bench, prompt(7, 8 * BLOCK))
    bench.step()
    bench.open(OTHER, SamplingParams(max_tokens=9 * BLOCK))
    bench.feed(OTHER, prompt(8, BLOCK))
    bench.step()
    bench.open(ANSWER, SamplingParams(max_tokens=2))
    bench.feed(ANSWER, prompt(9, 6 * BLOCK))
    while not ended(bench, ANSWER):
        assert not ended(bench, OTHER), "it had to wait for the other answer"
        bench.step()
    assert ended(bench, AHEAD)
    bench.run()
    bench.check_empty()


@pytest.mark.parametrize("beyond", [0, BLOCK - 1])
def test_what_would_fill_no_block_is_not_computed(model: CausalLM, beyond: int) -> None:
    bench = Bench(model)
    known = prompt(10, 4 * BLOCK)
    bench.answer(ANSWER, known, FIVE, prepare=True)
    before = bench.computed
    open_ahead(bench, known + prompt(11, beyond))
    bench.run()
    assert bench.computed == before
    end, finished = bench.seen[AHEAD][-2:]
    assert isinstance(end, Output) and isinstance(end.payload, TextDelta) and end.last and end.payload.text == ""
    assert isinstance(finished, Finished)
    bench.check_empty()


def test_what_fills_one_block_more_is_computed(model: CausalLM) -> None:
    bench = Bench(model)
    known = prompt(12, 4 * BLOCK)
    bench.answer(ANSWER, known, FIVE, prepare=True)
    before = bench.computed
    open_ahead(bench, known + prompt(13, BLOCK))
    bench.run()
    assert bench.computed - before >= BLOCK and ended(bench, AHEAD)
    bench.check_empty()
