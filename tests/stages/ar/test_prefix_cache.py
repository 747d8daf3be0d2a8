"""KV blocks that outlive their rows: what is computed again and what is not, and answers that do not tell the difference."""

from __future__ import annotations

import random

import pytest
import torch

from omni_bus.deployment import EdgeConfig, StageConfig
from omni_bus.events import RequestOptions
from omni_bus.payloads import TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.causal_lm import CausalLM, CausalLMProgram, PromptIds, llama_model
from omni_bus.stages.ar.program import Row, StepTensors
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import Chunk, Consumed, Emission, Finished, Output, StageContext, StageError, StageRequest
from tests.support.device_draws import device_draws

OUT = "llm->client"
BLOCK = 4
MODES = pytest.mark.parametrize("graphs", ["off", "plain"])


@pytest.fixture(autouse=True)
def one_noise():
    """Both forms draw alike."""
    with device_draws():
        yield


class BothForms(CausalLMProgram):
    """A text model in the engine's both forms. `poisoned`: whose scores are not finite."""

    poisoned = False

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden) * (torch.nan if self.poisoned else 1)

    def graph_prepare(self, max_batch: int) -> None: ...

    def graph_reset(self, row: Row) -> None: ...

    def graph_embed(self, step: StepTensors) -> torch.Tensor:
        return self.embed(step.tokens)

    def graph_output(self, hidden: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores = self.logits(hidden)
        scores[:, 5] = scores[:, 5].masked_fill(step.no_eos, -torch.inf)
        return scores.argmax(dim=-1, keepdim=True), scores

    def graph_sampled(self, rows, output) -> None:
        self.sampled(rows, output[:, 0].tolist(), torch.empty(0))


@pytest.fixture(scope="session")
def model(tiny_llama, byte_tokenizer) -> CausalLM:
    weights = dict(tiny_llama.state_dict())
    return llama_model(tiny_llama.config.to_dict(), weights, byte_tokenizer, frozenset({5}), dtype=torch.float32, device="cpu")


class Bench:
    """A loaded stage, and what came out of it by request."""

    def __init__(self, model: CausalLM, *, max_batch: int = 8, graphs: str = "off", **options: object) -> None:
        self.program = BothForms(lambda ctx: model, text_edges=(OUT,))
        self.stage = ARStage(self.program)
        options = {"block_size": BLOCK, "graphs": graphs, **options}
        self.stage.load(
            StageContext(
                stage="llm",
                pipeline=None,  # type: ignore[arg-type]
                model_path="",
                device="cpu",
                config=StageConfig(devices=("cpu",), max_batch=max_batch, options=options),
                edges={OUT: EdgeConfig(credits=8)},
                progress=lambda fraction, what: None,
            )
        )
        assert self.stage._engine is not None
        cache = self.stage._engine.attention.cache
        for tensor in (cache._keys, cache._values):  # whatever is read before it is written is seen
            tensor[:, BLOCK:] = torch.nan
        self.ids: dict[int, list[int]] = {}
        self.seen: dict[int, list[Emission]] = {}
        self.usage: dict[int, dict[str, int]] = {}
        self.errors: dict[int, StageError] = {}

    def open(self, number: int, sampling: SamplingParams | None = None, *, prepare: bool = False) -> None:
        request = StageRequest(
            id=number,
            options=RequestOptions(seed=number, prepare=prepare),
            sampling=sampling or SamplingParams(max_tokens=8),
            inputs=("client->llm",),
            outputs=(OUT,),
            deadline=1e9,
        )
        self.ids[number], self.seen[number] = [], []
        self.stage.open(request)

    def feed(self, number: int, ids: list[int], last: bool = True) -> None:
        self.stage.feed(number, Chunk("client->llm", PromptIds(tuple(ids)), {}, last))

    def step(self) -> None:
        for emission in self.stage.step():
            number = emission.request_id
            self.seen[number].append(emission)
            match emission:
                case Output(payload=TextDelta() as delta):
                    self.ids[number] += delta.token_ids
                case Finished():
                    self.usage[number] = dict(emission.usage)
                case StageError():
                    self.errors[number] = emission

    def run(self) -> None:
        while self.stage.has_work():
            self.step()

    def answer(
        self, number: int, ids: list[int], sampling: SamplingParams | None = None, *, prepare: bool = False
    ) -> list[int]:
        """One request alone, from the beginning to the end."""
        self.open(number, sampling, prepare=prepare)
        self.feed(number, ids)
        self.run()
        return self.ids[number]

    @property
    def computed(self) -> int:
        return self.stage.stats().prompt_computed

    @property
    def cached(self) -> int:
        return self.stage.stats().prompt_cached

    def check_empty(self) -> None:
        stats = self.stage.stats()
        assert (stats.waiting, stats.running, stats.kv_blocks_used) == (0, 0, 0)
        assert not self.stage._rows and self.stage._scheduler is not None
        assert self.stage._scheduler.blocks.can_allocate(stats.kv_blocks_total)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(6, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def fresh(model: CausalLM, ids: list[int], sampling: SamplingParams | None = None, *, number: int = 0) -> list[int]:
    """The answer of an engine that keeps nothing."""
    return Bench(model, prefix_cache=False).answer(number, ids, sampling)


@MODES
@pytest.mark.parametrize("piece", [3, 16, 512])
def test_the_next_turn_computes_only_what_is_new(model, graphs, piece):
    bench = Bench(model, graphs=graphs, max_prefill_tokens=piece)
    history = prompt(1, 21)
    kept = 0  # positions in whole blocks that the turns before have left
    for turn in range(4):
        before = bench.computed
        answer = bench.answer(turn, history)
        assert answer == fresh(model, history)
        assert bench.usage[turn] == {"prompt_tokens": len(history), "completion_tokens": len(answer), "cached_tokens": kept}
        assert bench.computed - before == len(history) - kept
        history = [*history, *answer, *prompt(10 + turn, 5)]
        # The last token of an answer is never computed; of an answer that ended at its end token, it is that one.
        kept = (len(history) - 5 - 1) // BLOCK * BLOCK
    bench.check_empty()


def test_what_is_counted_is_what_the_decoder_sees(model):
    bench = Bench(model)
    seen: list[int] = []
    handle = bench.program.decoder.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    try:
        bench.answer(0, prompt(1, 30), SamplingParams(max_tokens=1))
        bench.answer(1, prompt(1, 30) + prompt(2, 3), SamplingParams(max_tokens=1))
    finally:
        handle.remove()
    assert seen == [30, 5] and (bench.computed, bench.cached) == (35, 28)


@MODES
@pytest.mark.parametrize("changed", [0, 1, 3, 4, 10, 19, 22, 23])
def test_exactly_the_changed_suffix_is_computed(model, graphs, changed):
    bench = Bench(model, graphs=graphs)
    ids = prompt(1, 24)
    bench.answer(0, ids)
    replaced = [*ids[:changed], (ids[changed] - 6 + 1) % 91 + 6, *ids[changed + 1 :]]
    deleted = [*ids[:changed], *ids[changed + 1 :], *prompt(2, 2)]
    truncated = ids[: max(changed, 1)]
    for number, other in enumerate((replaced, deleted, truncated), 1):
        same = next((at for at, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
        expected = min(same, len(other) - 1) // BLOCK * BLOCK
        assert bench.answer(number, other) == fresh(model, other)
        assert bench.usage[number]["cached_tokens"] == expected
        bench = Bench(model, graphs=graphs)
        bench.answer(0, ids)


@MODES
def test_of_a_prompt_that_is_kept_whole_the_last_block_is_computed(model, graphs):
    bench = Bench(model, graphs=graphs)
    for length in (1, 4, 5, 8):
        first = bench.answer(2 * length, prompt(length, length))
        assert bench.answer(2 * length + 1, prompt(length, length)) == first == fresh(model, prompt(length, length))
        assert bench.usage[2 * length + 1]["cached_tokens"] == (length - 1) // BLOCK * BLOCK


@MODES
def test_penalties_and_draws_see_the_whole_prompt(model, graphs):
    bench = Bench(model, graphs=graphs)
    ids = prompt(3, 19)
    bench.answer(99, ids)
    for number, sampling in enumerate(
        (
            SamplingParams(max_tokens=12, repetition_penalty=1.7),
            SamplingParams(max_tokens=12, temperature=0.8, top_k=20),
            SamplingParams(max_tokens=12, temperature=1.2, top_p=0.9, repetition_penalty=1.3, min_tokens=12),
        )
    ):
        expected = Bench(model, graphs=graphs, prefix_cache=False).answer(number, ids, sampling)
        assert bench.answer(number, ids, sampling) == expected
        assert bench.usage[number]["cached_tokens"] == 16


def test_rows_that_run_at_the_same_time_share(model):
    bench = Bench(model)
    ids = prompt(4, 16)
    bench.open(0, SamplingParams(max_tokens=20))
    bench.feed(0, [*ids, *prompt(5, 3)])
    while not bench.ids[0]:
        bench.step()
    alone = bench.stage.stats().kv_blocks_used
    bench.open(1, SamplingParams(max_tokens=20))
    bench.feed(1, [*ids, *prompt(6, 3)])
    while not bench.ids[1]:
        bench.step()
    assert bench.stage.stats().kv_blocks_used == 2 * alone - 4, "four blocks have two holders"
    bench.stage.cancel(0)
    assert bench.stage.stats().kv_blocks_used == alone
    bench.run()
    assert bench.ids[1] == fresh(model, [*ids, *prompt(6, 3)], SamplingParams(max_tokens=20))
    assert bench.usage[1]["cached_tokens"] == 16
    bench.check_empty()


def test_of_a_row_cancelled_half_way_the_full_blocks_are_kept(model):
    bench = Bench(model, max_prefill_tokens=6)
    bench.open(0)
    bench.feed(0, prompt(7, 40))
    for _ in range(3):
        bench.step()
    bench.stage.cancel(0)
    bench.check_empty()
    assert bench.computed == 18
    assert bench.answer(1, prompt(7, 40)) == fresh(model, prompt(7, 40))
    assert bench.usage[1]["cached_tokens"] == 16 and bench.computed == 18 + 24


def test_a_row_waits_for_the_room_that_it_has_to_fill_and_no_more(model):
    bench = Bench(model, kv_blocks=10)
    ids = prompt(8, 17)
    bench.open(0, SamplingParams(max_tokens=8))  # 6 blocks
    bench.feed(0, ids)
    bench.step()
    bench.open(1, SamplingParams(max_tokens=16))  # 8 blocks, of which 4 are there
    bench.feed(1, ids)
    bench.step()
    assert bench.stage.stats().running == 2 and bench.stage.stats().kv_blocks_used == 10
    bench.run()
    assert bench.ids[0] == fresh(model, ids) and bench.ids[1] == fresh(model, ids, SamplingParams(max_tokens=16))
    bench.check_empty()


def test_kept_blocks_that_are_free_are_not_room_for_their_own_row(model):
    bench = Bench(model, kv_blocks=8)
    ids = prompt(9, 17)
    bench.answer(0, ids, SamplingParams(max_tokens=1))  # leaves 4 blocks
    bench.open(1, SamplingParams(max_tokens=8))
    bench.feed(1, prompt(10, 6))  # 4 blocks: those without content
    bench.step()
    bench.open(2, SamplingParams(max_tokens=8))
    bench.feed(2, ids)  # 6 blocks, of which 4 are there and free: none is left for the others
    bench.step()
    assert bench.stage.stats().running == 1 and bench.stage.stats().waiting == 1
    bench.run()
    assert bench.ids[2] == fresh(model, ids) and bench.usage[2]["cached_tokens"] == 16
    bench.check_empty()


def test_without_the_option_nothing_is_kept(model):
    bench = Bench(model, prefix_cache=False)
    for number in range(2):
        bench.answer(number, prompt(1, 20))
        assert bench.usage[number].keys() == {"prompt_tokens", "completion_tokens"}
    assert (bench.computed, bench.cached) == (40, 0)


def test_what_gave_no_finite_scores_is_not_found_again(model):
    bench = Bench(model)
    bench.program.poisoned = True
    bench.answer(0, prompt(1, 20))
    assert 0 in bench.errors
    bench.program.poisoned = False
    assert bench.answer(1, prompt(1, 20)) == fresh(model, prompt(1, 20))
    assert bench.usage[1]["cached_tokens"] == 0
    bench.check_empty()


@MODES
@pytest.mark.parametrize("seed", range(3))
def test_conversations_under_pressure_answer_as_without_a_cache(model, graphs, seed):
    """More history than there are blocks: what is written over is computed again, and nothing else changes."""
    rng = random.Random(seed)
    bench = Bench(model, graphs=graphs, kv_blocks=30, max_prefill_tokens=rng.choice([5, 16, 512]), max_batch=3)
    histories = {talk: prompt(rng.randrange(3), rng.randint(2, 12)) for talk in range(5)}
    asked: dict[int, tuple[int, list[int], SamplingParams]] = {}
    busy: set[int] = set()
    number, cancelled = 0, 0
    while number < 60 or busy:
        ended = [one for one in list(busy) if one in bench.usage]
        for one in ended:
            talk, ids, sampling = asked[one]
            assert bench.ids[one] == fresh(model, ids, sampling, number=one)
            busy.discard(one)
            histories[talk] = [*ids, *bench.ids[one], *prompt(100 + one, rng.randint(1, 6))]
            if len(histories[talk]) > 60:
                histories[talk] = histories[talk][: rng.randint(1, 40)]  # deleted or truncated
        free = [talk for talk in histories if talk not in {asked[one][0] for one in busy}]
        if number < 60 and free and rng.random() < 0.6:
            talk = rng.choice(free)
            sampling = SamplingParams(max_tokens=rng.randint(1, 12), temperature=rng.choice([0, 0, 0.9]))
            asked[number] = talk, histories[talk], sampling
            busy.add(number)
            bench.open(number, sampling)
            bench.feed(number, histories[talk])
            number += 1
        if busy and rng.random() < 0.1:
            one = rng.choice(sorted(busy))
            if one not in bench.usage:
                bench.stage.cancel(one)
                busy.discard(one)
                cancelled += 1
        if busy and rng.random() < 0.2:
            one = rng.choice(sorted(busy))
            bench.stage.pause(one)
            bench.step()
            bench.stage.resume(one)
        bench.step()
    assert not bench.errors and bench.cached > 100 and cancelled
    bench.check_empty()


def test_a_storm_of_cancels_leaves_every_block_free_and_every_answer_right(model):
    rng = random.Random(5)
    bench = Bench(model, kv_blocks=40, max_prefill_tokens=7, max_batch=6)
    trunk = prompt(0, 40)
    for number in range(300):
        bench.open(number, SamplingParams(max_tokens=rng.randint(1, 10)), prepare=rng.random() < 0.2)
        ids = trunk[: rng.randint(1, 40)] + prompt(number % 7, rng.randint(1, 5))
        cut = rng.randint(0, len(ids))
        if cut:
            bench.feed(number, ids[:cut], last=False)
        for _ in range(rng.randint(0, 4)):
            bench.step()
        if rng.random() < 0.8:
            bench.feed(number, ids[cut:])
        for _ in range(rng.randint(0, 3)):
            bench.step()
        for one in range(max(0, number - 4), number + 1):
            if rng.random() < 0.5:
                bench.stage.cancel(one)
    for one in range(300):
        bench.stage.cancel(one)
    bench.check_empty()
    assert not bench.errors and bench.cached > 400
    for length in range(1, 41, 3):
        assert bench.answer(1000 + length, trunk[:length]) == fresh(model, trunk[:length])


@MODES
def test_a_prepared_prompt_is_computed_and_says_nothing(model, graphs):
    bench = Bench(model, graphs=graphs, max_prefill_tokens=7)
    bench.answer(0, prompt(1, 22), prepare=True)
    kinds = [type(emission) for emission in bench.seen[0]]
    assert kinds == [Consumed, Output, Finished]
    closing = bench.seen[0][1]
    assert isinstance(closing, Output) and closing.last and closing.payload == TextDelta("", (), "stop")
    assert bench.usage[0] == {"prompt_tokens": 22, "completion_tokens": 0, "cached_tokens": 0}
    assert bench.computed == 22
    bench.check_empty()
    ids = prompt(1, 22) + prompt(2, 3)
    assert bench.answer(1, ids) == fresh(model, ids)
    assert bench.usage[1]["cached_tokens"] == 20 and bench.computed == 22 + 5


def test_a_prompt_that_is_prepared_as_it_grows_is_computed_once(model):
    bench = Bench(model)
    ids = prompt(1, 40)
    for number, length in enumerate((3, 4, 9, 20, 20, 33)):
        bench.answer(number, ids[:length], prepare=True)
        assert not bench.ids[number]
    assert bench.answer(9, ids) == fresh(model, ids)
    assert bench.usage[9]["cached_tokens"] == 32
    bench.check_empty()


def test_a_prepared_prompt_in_pieces_ends_with_the_last(model):
    bench = Bench(model)
    bench.open(0, prepare=True)
    bench.feed(0, prompt(1, 9), last=False)
    bench.run()
    assert 0 not in bench.usage and bench.computed == 8, "the last position waits for the prompt's end"
    bench.feed(0, prompt(2, 9))
    bench.run()
    assert bench.usage[0]["prompt_tokens"] == 18 and bench.computed == 18
    bench.open(1, prepare=True)
    bench.feed(1, prompt(3, 9))
    bench.stage.cancel(1)
    bench.check_empty()


def test_preparing_takes_room_for_the_prompt_alone(model):
    bench = Bench(model, kv_blocks=8)
    bench.open(0, SamplingParams(max_tokens=200), prepare=True)
    bench.feed(0, prompt(1, 9))
    bench.open(1, SamplingParams(max_tokens=None), prepare=True)
    bench.feed(1, prompt(2, 18))
    bench.step()
    assert bench.usage.keys() == {0, 1}


def test_where_nothing_is_kept_nothing_is_prepared(model):
    bench = Bench(model, prefix_cache=False)
    bench.answer(0, prompt(1, 22), prepare=True)
    assert [type(emission) for emission in bench.seen[0]] == [Consumed, Output, Finished] and bench.computed == 0
    bench.check_empty()


def test_what_stands_behind_kept_blocks_is_computed_by_a_graph(model, monkeypatch):
    """Whole prompts, those behind kept blocks, and later pieces of long ones: nothing is left for the free form."""
    bench = Bench(model, graphs="plain", max_prefill_tokens=16)
    assert bench.stage._engine is not None
    monkeypatch.setattr(bench.stage._engine.attention, "plan", lambda spans: pytest.fail("computed freely"))
    ids = prompt(1, 40)
    bench.answer(0, ids)
    for number, (length, cached) in enumerate(((16, 12), (17, 16), (40, 36)), 1):
        assert bench.answer(number, ids[:length]) == fresh(model, ids[:length])
        assert bench.usage[number].get("cached_tokens", 0) == cached
    bench.check_empty()
