"""Inputs made when they are computed: the same tokens, each row made once and none that kept blocks hold, and a failure stays its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from omni_bus.errors import InvalidRequest
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.causal_lm import CausalLMProgram
from omni_bus.stages.ar.program import Inputs, Row
from omni_bus.stages.contract import Chunk
from tests.stages.ar.test_engine import Driver, driver, model, prompt, reference  # noqa: F401

LAZY = 11  # rows of each prompt, from its second position on, that are made late
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@dataclasses.dataclass
class Rows:
    """The embeddings of a stretch of the prompt, made on demand."""

    program: LazyLM
    token_ids: list[int]

    def __call__(self, begin: int, end: int) -> tuple[torch.Tensor, None]:
        wanted = self.token_ids[begin:end]
        assert len(wanted) == end - begin > 0
        self.program.made += [(begin, end)]
        if self.program.poison in wanted:
            raise InvalidRequest("this picture cannot be read")
        return self.program.embed(torch.tensor(wanted)), None


class LazyLM(CausalLMProgram):
    """A text model whose prompt has a stretch that stands for media."""

    poison = -1

    def load(self, ctx: object) -> None:
        super().load(ctx)  # type: ignore[arg-type]
        self.made: list[tuple[int, int]] = []

    def feed(self, row: Row, chunk: Chunk) -> None:
        ids = list(self.prompt_ids(row, chunk))
        row.append_text(token_ids=ids[:1])
        middle = ids[1 : 1 + LAZY]
        positions = torch.arange(1, 1 + LAZY).expand(3, LAZY)
        row.append(Inputs(positions=positions, lazy=Rows(self, middle), content=[2**200 + token for token in middle]))
        row.append_text(token_ids=ids[1 + LAZY :])
        row.consume(chunk.edge)
        row.close_prompt()
        row.data.prompt_tokens = row.length


def lazy(model: object, **options: int) -> Driver:  # noqa: F811
    return driver(model, LazyLM, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", [1, 2, 5, 64])
@pytest.mark.parametrize("graphs", ["off", "plain"])
def test_rows_made_piece_by_piece_give_the_same_tokens(tiny_llama, model, piece: int, graphs: str) -> None:  # noqa: F811
    run = lazy(model, max_prefill_tokens=piece, graphs=graphs)
    for number in range(4):
        run.add(number, prompt(number, 20), GREEDY)
    run.run()
    for number in range(4):
        assert run.ids[number] == reference(tiny_llama, prompt(number, 20), max_new_tokens=12)
    rows = sorted(row for begin, end in run.program.made for row in range(begin, end))  # type: ignore[attr-defined]
    assert rows == sorted([*range(LAZY)] * 4), "each row of each prompt once"
    run.check_empty()


def test_rows_in_kept_blocks_are_not_made(tiny_llama, model) -> None:  # noqa: F811
    run = lazy(model)
    ids = prompt(7, 20)
    for number, last in enumerate((ids[-1], ids[-1], 9)):
        run.program.made.clear()  # type: ignore[attr-defined]
        run.add(number, [*ids[:-1], last], GREEDY)
        run.run()
        assert run.ids[number] == reference(tiny_llama, [*ids[:-1], last], max_new_tokens=12)
        assert run.program.made == ([(0, LAZY)] if number == 0 else [])  # type: ignore[attr-defined]
    changed = [*ids[:9], 6 if ids[9] != 6 else 7, *ids[10:]]  # two of the blocks of 4 are still the same
    run.program.made.clear()  # type: ignore[attr-defined]
    run.add(9, changed, GREEDY)
    run.run()
    assert run.program.made == [(7, LAZY)]  # type: ignore[attr-defined]
    assert run.ids[9] == reference(tiny_llama, changed, max_new_tokens=12)


def test_rows_that_cannot_be_made_fail_their_request_alone(tiny_llama, model) -> None:  # noqa: F811
    run = lazy(model)
    bad = prompt(3, 20)
    run.program.poison = next(token for token in bad[1 : 1 + LAZY] if token not in prompt(1, 20) + prompt(2, 20))  # type: ignore[attr-defined]
    run.add(1, prompt(1, 20), GREEDY)
    run.step()
    run.add(3, bad, GREEDY)
    run.add(2, prompt(2, 20), GREEDY)
    run.run()
    assert run.errors.keys() == {3} and run.errors[3].error.message == "this picture cannot be read"
    for number in (1, 2):
        assert run.ids[number] == reference(tiny_llama, prompt(number, 20), max_new_tokens=12)
    run.check_empty()
