"""Decode steps of fixed size give what the engine's free form gives, token for token, whoever else is in the batch."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from omni_bus.deployment import EdgeConfig, StageConfig
from omni_bus.errors import ConfigError
from omni_bus.events import RequestOptions
from omni_bus.payloads import TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.causal_lm import CausalLM, CausalLMProgram, PromptIds, llama_model
from omni_bus.stages.ar.graphs import bucket_sizes
from omni_bus.stages.ar.program import Row, StepTensors, isolated
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import Chunk, Finished, Output, StageContext, StageError, StageRequest
from tests.support.device_draws import device_draws

OUT = "llm->client"


@pytest.fixture(scope="session")
def model(tiny_llama, byte_tokenizer) -> CausalLM:
    weights = dict(tiny_llama.state_dict())
    return llama_model(tiny_llama.config.to_dict(), weights, byte_tokenizer, frozenset({5}), dtype=torch.float32, device="cpu")


@pytest.fixture(autouse=True)
def one_noise():
    """Both forms draw alike."""
    with device_draws():
        yield


class GraphedLM(CausalLMProgram):
    """A text model in both forms: the best score on the device, everything else from the scores."""

    steps: list[int]

    def graph_prepare(self, max_batch: int) -> None:
        self.steps = []  # sizes of the batches that were run
        self.resets: list[tuple[int, int]] = []

    def graph_reset(self, row: Row) -> None:
        self.resets.append((row.request.id, row.slot))

    def graph_embed(self, step: StepTensors) -> torch.Tensor:
        return self.embed(step.tokens)

    def graph_output(self, hidden: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.steps.append(len(hidden))
        scores = self.logits(hidden)
        return scores.argmax(dim=-1, keepdim=True), scores

    def graph_sampled(self, rows, output) -> None:
        tokens = output[:, 0].tolist()
        super().sampled(rows, tokens, torch.empty(0))

    def sampled(self, rows, tokens, hidden) -> None:
        assert not hasattr(self, "steps"), "this form is not to be used here"
        super().sampled(rows, tokens, hidden)


class SlotLM(GraphedLM):
    """Feeds back, besides the token, something that only the device knows, kept under the row's slot; the last prompt position comes
    as an embedding; samples on the device, and reports what it saw there."""

    def graph_prepare(self, max_batch: int) -> None:
        super().graph_prepare(max_batch)
        self.kept = torch.zeros(max_batch + 1, self.decoder.config.hidden)

    def graph_reset(self, row: Row) -> None:
        super().graph_reset(row)
        self.kept[row.slot] = 0

    def feed(self, row: Row, chunk: Chunk) -> None:
        ids = list(self.prompt_ids(row, chunk))
        row.append_text(token_ids=ids[:-1])
        row.append_text(embeds=self.embed(torch.tensor(ids[-1:])))
        row.close_prompt()

    def graph_embed(self, step: StepTensors) -> torch.Tensor:
        return self.embed(step.tokens) + self.kept[step.slots]

    def graph_output(self, hidden: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.steps.append(len(hidden))
        scores = self.logits(hidden)
        scores = torch.where(step.temperature[:, None] > 0, -scores, scores)
        banned = step.no_eos[:, None] & F.one_hot(torch.tensor(5), 97).bool()
        token = scores.masked_fill(banned, -torch.inf).argmax(dim=-1)
        self.kept.index_add_(0, step.slots, 0.1 * hidden)
        seen = (step.slots, step.seeds, step.draws, step.top_k, (step.top_p * 1000).long(), (step.penalty * 1000).long())
        return torch.stack((token, *seen), dim=1), None

    def graph_sampled(self, rows, output) -> None:
        for row, numbers in zip(rows, output.tolist(), strict=True):
            with isolated(row):
                params = row.request.sampling
                wanted = (row.slot, row.seed, len(row.output_ids) - 1, params.top_k or 0)
                assert tuple(numbers[1:5]) == wanted
                assert numbers[5:7] == [round(1000 * (params.top_p or 1)), round(1000 * (params.repetition_penalty or 1))]
                assert numbers[0] == row.output_ids[-1]
                super()._sampled(row, numbers[0])


class Driver:
    def __init__(
        self, model: CausalLM, program: type[CausalLMProgram], *, max_batch: int = 8, ahead: bool = False, **options: object
    ) -> None:
        self.ahead = ahead
        self.program = program(lambda ctx: model, text_edges=(OUT,))
        self.stage = ARStage(self.program)
        self.progress: list[float] = []
        self.stage.load(
            StageContext(
                stage="llm",
                pipeline=None,  # type: ignore[arg-type]
                model_path="",
                device="cpu",
                config=StageConfig(devices=("cpu",), max_batch=max_batch, options={"block_size": 4, **options}),
                edges={OUT: EdgeConfig(credits=8)},
                progress=lambda fraction, what: self.progress.append(fraction),
            )
        )
        self.ids: dict[int, list[int]] = {}
        self.ended: dict[int, Finished | StageError] = {}

    def open(self, number: int, sampling: SamplingParams) -> None:
        request = StageRequest(
            id=number,
            options=RequestOptions(seed=number),
            sampling=sampling,
            inputs=("client->llm",),
            outputs=(OUT,),
            deadline=1e9,
        )
        self.stage.open(request)
        self.ids[number] = []

    def feed(self, number: int, ids: list[int], last: bool = True) -> None:
        self.stage.feed(number, Chunk("client->llm", PromptIds(tuple(ids)), {}, last))

    def add(self, number: int, ids: list[int], sampling: SamplingParams) -> None:
        self.open(number, sampling)
        self.feed(number, ids)

    def step(self) -> None:
        for emission in self.stage.step():
            match emission:
                case Output(payload=TextDelta() as delta):
                    self.ids[emission.request_id] += delta.token_ids
                case Finished() | StageError():
                    self.ended[emission.request_id] = emission
        if self.ahead:
            self.stage.ahead()

    def run_while_work(self) -> None:
        while self.stage.has_work():
            self.step()

    def run(self) -> None:
        self.run_while_work()
        assert self.stage.stats().running == self.stage.stats().kv_blocks_used == 0


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(6, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


KINDS = (
    SamplingParams(max_tokens=18),
    SamplingParams(max_tokens=25, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.1, top_k=20, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(max_tokens=15, repetition_penalty=1.5),
    SamplingParams(max_tokens=15, min_tokens=9, stop_token_ids=(5,)),
    SamplingParams(max_tokens=25, temperature=0.8, top_p=0.95, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.3, repetition_penalty=0.8, min_tokens=20, stop_token_ids=(5, 7)),
)


def traffic(bus: Driver, seed: int, kinds=KINDS) -> set[int]:
    """Rows that come and go at different times; returns those that were cancelled."""
    rng = random.Random(seed)
    todo, cancelled = list(range(20)), set()
    while todo or bus.stage.has_work():
        if todo and rng.random() < 0.6:
            number = todo.pop(0)
            bus.add(number, prompt(number, 2 + number * 7 % 23), kinds[number % len(kinds)])
        if rng.random() < 0.05 and bus.ids:
            number = rng.choice(list(bus.ids))
            if number not in bus.ended:
                cancelled.add(number)
                bus.stage.cancel(number)
        bus.step()
    return cancelled


AHEAD = pytest.mark.parametrize("ahead", [False, True])


@AHEAD
@pytest.mark.parametrize("piece", [5, 512])
def test_steps_of_fixed_size_give_the_same_tokens(model, piece, ahead):
    stepped = Driver(model, GraphedLM, graphs="plain", max_prefill_tokens=piece, ahead=ahead)
    free = Driver(model, CausalLMProgram, max_prefill_tokens=piece)
    for bus in (stepped, free):
        for number in range(20):
            bus.add(number, prompt(number, 2 + number * 7 % 23), KINDS[number % len(KINDS)])
        bus.run()
    assert stepped.ids == free.ids and len({len(ids) for ids in free.ids.values()}) > 2
    assert {type(end) for end in stepped.ended.values()} == {Finished}
    assert set(stepped.program.steps) <= {1, 2, 4, 8} and 8 in stepped.program.steps
    assert stepped.progress == sorted(stepped.progress) and stepped.progress[-1] == 1.0


@AHEAD
@pytest.mark.parametrize("seed", range(3))
def test_arrivals_and_cancels_change_no_row(model, seed, ahead):
    stepped = Driver(model, GraphedLM, graphs="plain", max_batch=5, kv_blocks=64, max_length=80, ahead=ahead)
    cancelled = traffic(stepped, seed)
    free = Driver(model, CausalLMProgram)
    for number in range(20):
        free.add(number, prompt(number, 2 + number * 7 % 23), KINDS[number % len(KINDS)])
    free.run()
    for number in set(range(20)) - cancelled:
        assert stepped.ids[number] == free.ids[number]
    assert {slot for _, slot in stepped.program.resets} == {1, 2, 3, 4, 5}
    assert len(stepped.program.resets) >= 20 - len(cancelled)


@AHEAD
@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_under_a_slot_belongs_to_its_row_alone(model, seed, ahead):
    kinds = (*KINDS[:3], SamplingParams(max_tokens=15, temperature=0.5, top_k=7, min_tokens=15))
    together = Driver(model, SlotLM, graphs="plain", max_batch=6, ahead=ahead)
    cancelled = traffic(together, seed, kinds)
    assert not any(isinstance(end, StageError) for end in together.ended.values())
    for number in set(range(20)) - cancelled:
        alone = Driver(model, SlotLM, graphs="plain", max_batch=1)
        alone.add(number, prompt(number, 2 + number * 7 % 23), kinds[number % len(kinds)])
        alone.run()
        assert together.ids[number] == alone.ids[number]
        assert len(alone.ids[number]) == 15 or number % 4 != 3, "min_tokens keeps the end token away"


def test_a_prompts_last_position_as_an_embedding_is_a_row_of_a_step(model):
    bus = Driver(model, SlotLM, graphs="plain")
    bus.add(0, prompt(0, 9), SamplingParams(max_tokens=4, ignore_eos=True))
    before = len(bus.program.steps)
    for _ in range(5):
        bus.step()
    assert 0 in bus.ended and len(bus.ids[0]) == 4
    assert bus.program.steps[before:] == [1, 1, 1, 1], "four tokens by decode steps: none by a tail"


def test_a_step_does_not_wait_for_a_long_prompt(model):
    bus = Driver(model, GraphedLM, graphs="plain", max_prefill_tokens=8)
    bus.add(0, prompt(0, 4), SamplingParams(max_tokens=60, ignore_eos=True))
    bus.step()
    bus.add(1, prompt(1, 80), SamplingParams(max_tokens=2, ignore_eos=True))
    sizes = []
    while 1 not in bus.ended:
        before = len(bus.ids[0])
        bus.step()
        sizes.append(len(bus.ids[0]) - before)
    assert sizes[:20] == [1, 0] * 10, "decode and prefill take turns"


@AHEAD
@pytest.mark.parametrize("how", ["prompt", "nan", "step", "program", "row"])
def test_a_row_that_fails_in_a_step_takes_no_other_with_it(model, how, caplog, ahead):
    class Faulty(GraphedLM):
        def embed(self, token_ids):
            embeds = super().embed(token_ids)
            return torch.where((token_ids == 2)[:, None] & (how == "prompt"), torch.nan, embeds)

        def graph_embed(self, step):
            embeds = super().graph_embed(step)
            if how == "step" and bool((step.seeds == 9).any() & (step.draws > 3).any()):
                raise RuntimeError("secret detail")
            return torch.where((step.seeds == 9)[:, None] & (how == "nan"), torch.nan, embeds)

        def graph_sampled(self, rows, output):
            if how == "program" and any(row.request.id == 9 and len(row.output_ids) > 3 for row in rows):
                raise RuntimeError("secret detail")
            super().graph_sampled(rows, output)

        def _sampled(self, row, token):
            super()._sampled(row, token)
            if how == "row" and row.request.id == 9 and len(row.output_ids) > 3:
                raise RuntimeError("secret detail")

    def run(broken: bool) -> Driver:
        bus = Driver(model, Faulty, graphs="plain", ahead=ahead)
        for number in range(4):
            bus.add(number, prompt(number, 8), SamplingParams(max_tokens=12, temperature=0.8 * number, ignore_eos=True))
        if broken:
            bus.add(9, [2, *prompt(9, 5)], SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True))
        bus.run()
        return bus

    good, bad = run(False), run(True)
    assert all(good.ids[number] == bad.ids[number] and len(good.ids[number]) == 12 for number in range(4))
    error = bad.ended[9]
    assert isinstance(error, StageError) and "secret" not in error.error.message and "request 9" in caplog.text
    assert [number for number, end in bad.ended.items() if isinstance(end, StageError)] == [9]


def test_the_next_step_is_begun_before_this_ones_results_are_sent(model):
    """All rows of a step, and only where nobody else has something to compute; its results come with the next call."""
    bus = Driver(model, GraphedLM, graphs="plain", max_prefill_tokens=8, ahead=True)
    for number in range(3):
        bus.add(number, prompt(number, 4), SamplingParams(max_tokens=20, ignore_eos=True))

    def tokens_of_a_step() -> list[int]:
        rows = [bus.stage._rows[number] for number in range(3)]
        before = [len(row.output_ids) for row in rows]
        bus.step()
        return [len(row.output_ids) - count for row, count in zip(rows, before, strict=True)]

    while tokens_of_a_step() != [1, 1, 1]:
        pass
    assert bus.stage._engine.has_begun and bus.stage.has_work()
    before = len(bus.program.steps)
    assert tokens_of_a_step() == [1, 1, 1] and len(bus.program.steps) == before + 1, "one step a call: the next one's"

    bus.stage.pause(0)
    assert tokens_of_a_step() == [1, 1, 1], "what has begun is still given"
    assert tokens_of_a_step() == [0, 1, 1], "and no more than that"
    bus.stage.resume(0)

    bus.add(3, prompt(3, 20), SamplingParams(max_tokens=3, ignore_eos=True))
    assert tokens_of_a_step() == [0, 1, 1], "it had begun when the prompt came"
    assert not bus.stage._engine.has_begun, "a prompt waits"
    assert tokens_of_a_step() == [0, 0, 0], "it goes first"
    bus.run()
    free = Driver(model, CausalLMProgram)
    for number in range(4):
        count, length = (3, 20) if number == 3 else (20, 4)
        free.add(number, prompt(number, length), SamplingParams(max_tokens=count, ignore_eos=True))
    free.run()
    assert bus.ids == free.ids


def test_where_more_rows_run_than_a_step_holds_none_is_begun_ahead(model):
    bus = Driver(model, GraphedLM, graphs="plain", ahead=True)
    bus.stage._engine.graphs.max_rows = 2
    for number in range(3):
        bus.add(number, prompt(number, 4), SamplingParams(max_tokens=5 + 5 * number, ignore_eos=True))
    begun = []
    while bus.stage.has_work():
        bus.step()
        begun.append((bus.stage._engine.has_begun, len(bus.stage._scheduler.running)))
    assert {rows for begins, rows in begun if begins} == {1, 2} and (False, 3) in begun


def test_who_leaves_while_a_step_is_on_its_way_leaves_alone(model):
    """Its slot and its blocks go to the next row at once, and what was computed for it to nobody."""
    bus = Driver(model, SlotLM, graphs="plain", max_batch=2, kv_blocks=16, max_length=24, ahead=True)
    for number in range(2):
        bus.add(number, prompt(number, 6), SamplingParams(max_tokens=12, ignore_eos=True))
    for _ in range(4):
        bus.step()
    assert bus.stage._engine.has_begun
    bus.stage.cancel(0)
    bus.add(2, prompt(2, 9), SamplingParams(max_tokens=12, ignore_eos=True))
    before = len(bus.ids[0])
    bus.run()
    assert len(bus.ids[0]) == before and 0 not in bus.ended
    for number in (1, 2):
        alone = Driver(model, SlotLM, graphs="plain", max_batch=1)
        alone.add(number, prompt(number, 6 if number == 1 else 9), SamplingParams(max_tokens=12, ignore_eos=True))
        alone.run()
        assert bus.ids[number] == alone.ids[number]


def test_a_prompt_is_computed_in_the_size_that_holds_it_and_the_rest_changes_nothing(model):
    """Several prompts in one pass, in more and fewer positions than a size has, are those of a pass each."""
    together = Driver(model, GraphedLM, graphs="plain")
    prompts = together.stage._engine.prompts
    assert prompts is not None and sorted(prompts._sizes) == [16, 32, 64, 96, 128, 192, 256]
    free = Driver(model, CausalLMProgram)
    for lengths in ((1,), (16,), (17,), (3, 60, 1, 30), (70, 90, 96)):
        numbers = range(len(together.ids), len(together.ids) + len(lengths))
        for number, length in zip(numbers, lengths, strict=True):
            for bus in (together, free):
                bus.add(number, prompt(number, length), SamplingParams(max_tokens=3, ignore_eos=True))
        together.step()
        assert all(len(together.ids[number]) == 1 for number in numbers)
        together.run()
        free.run()
    assert together.ids == free.ids


def test_bucket_sizes_are_bounded_by_the_batch():
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(5) == (1, 2, 4, 5)
    assert bucket_sizes(64) == bucket_sizes(200) == (1, 2, 4, 8, 16, 24, 32, 48, 64)


def test_on_the_cpu_rows_are_computed_freely_unless_told_otherwise_and_the_kernel_needs_a_gpu(model):
    bus = Driver(model, GraphedLM)
    assert bus.stage._engine is not None and bus.stage._engine.graphs is None
    with pytest.raises(ConfigError, match="GPU"):
        Driver(model, GraphedLM, attention="triton")


def test_of_a_prompt_of_known_length_all_is_computed_but_the_last_position(model):
    """The Talker's way: everything is there but what is spoken first."""

    class Late(SlotLM):
        def feed(self, row: Row, chunk: Chunk) -> None:
            ids = list(self.prompt_ids(row, chunk))
            if chunk.last:
                row.append_text(embeds=self.embed(torch.tensor(ids)))
                row.close_prompt()
            else:
                row.prompt_length = len(ids) + 1
                row.append_text(token_ids=ids)

    bus = Driver(model, Late, graphs="plain")
    bus.open(0, SamplingParams(max_tokens=3, ignore_eos=True))
    bus.feed(0, prompt(0, 9), last=False)
    bus.run_while_work()
    (row,) = bus.stage._rows.values()
    assert row.computed == row.length == 9 and not row.output_ids
    bus.feed(0, [7], last=True)
    before = len(bus.program.steps)
    bus.run()
    assert bus.program.steps[before:] == [1, 1, 1], "the last position is a row of a decode step"
    whole = Driver(model, SlotLM, graphs="plain")
    whole.add(0, [*prompt(0, 9), 7], SamplingParams(max_tokens=3, ignore_eos=True))
    whole.run()
    assert bus.ids == whole.ids


def test_a_prompt_that_does_not_fit_beside_others_begins_the_next_step_whole(model):
    bus = Driver(model, GraphedLM, graphs="plain", max_prefill_tokens=20)
    for number, length in enumerate((9, 9, 9, 50, 3)):
        bus.add(number, prompt(number, length), SamplingParams(max_tokens=1))
    first = []
    while bus.stage.has_work():
        bus.step()
        first.append(sorted(bus.ended))
    assert first == [[0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
