"""The engine through its stage contract: tokens equal to transformers', whatever else is in the batch; nothing is left behind."""

from __future__ import annotations

import random

import pytest
import torch

from omni_bus.deployment import EdgeConfig, StageConfig
from omni_bus.errors import CheckpointError, ModelRefused, StageFailed
from omni_bus.events import RequestOptions
from omni_bus.payloads import TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.causal_lm import CausalLM, CausalLMProgram, PromptIds, llama_model
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import Chunk, Consumed, Finished, Output, StageContext, StageError, StageRequest

EOS = 5
OUT = "llm->client"


@pytest.fixture(scope="session")
def model(tiny_llama, byte_tokenizer) -> CausalLM:
    return llama_model(
        tiny_llama.config.to_dict(),
        dict(tiny_llama.state_dict()),
        byte_tokenizer,
        frozenset({EOS}),
        dtype=torch.float32,
        device="cpu",
    )


class Driver:
    """A loaded stage, and what came out of it by request."""

    def __init__(self, program: CausalLMProgram, *, max_batch: int = 8, **options: int) -> None:
        self.stage = ARStage(program)
        self.stage.load(
            StageContext(
                stage="llm",
                pipeline=None,  # type: ignore[arg-type]
                model_path="",
                device="cpu",
                config=StageConfig(devices=("cpu",), max_batch=max_batch, options={"block_size": 4, **options}),
                edges={OUT: EdgeConfig(credits=8)},
                progress=lambda fraction, what: None,
            )
        )
        self.program = program
        self.ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.finish: dict[int, str] = {}
        self.usage: dict[int, dict[str, int]] = {}
        self.told: dict[int, list[dict[str, int]]] = {}  # usage so far, in each delta
        self.errors: dict[int, StageError] = {}
        self.consumed: dict[int, int] = {}

    def open(self, number: int, sampling: SamplingParams, seed: int | None = None) -> None:
        self.stage.open(
            StageRequest(
                id=number,
                options=RequestOptions(seed=seed),
                sampling=sampling,
                inputs=("client->llm",),
                outputs=(OUT,),
                deadline=1e9,
            )
        )
        self.ids[number], self.text[number] = [], ""

    def feed(self, number: int, ids: list[int], last: bool = True) -> None:
        self.stage.feed(number, Chunk("client->llm", PromptIds(tuple(ids)), {}, last))

    def add(self, number: int, ids: list[int], sampling: SamplingParams, seed: int | None = None) -> None:
        self.open(number, sampling, seed)
        self.feed(number, ids)

    def step(self) -> None:
        for emission in self.stage.step():
            number = emission.request_id
            assert number not in self.usage and number not in self.errors, "an emission after the end"
            match emission:
                case Output(payload=TextDelta() as delta):
                    self.told.setdefault(number, []).append(delta.usage)
                    self.ids[number] += delta.token_ids
                    self.text[number] += delta.text
                    assert emission.last == (delta.finish_reason is not None)
                    if delta.finish_reason is not None:
                        self.finish[number] = delta.finish_reason
                case Finished():
                    self.usage[number] = dict(emission.usage)
                case StageError():
                    self.errors[number] = emission
                case Consumed():
                    self.consumed[number] = self.consumed.get(number, 0) + emission.count

    def run(self) -> None:
        while self.stage.has_work():
            self.step()

    def check_empty(self) -> None:
        stats = self.stage.stats()
        assert (stats.waiting, stats.running, stats.kv_blocks_used) == (0, 0, 0)
        assert not self.stage._rows
        assert self.stage._scheduler is not None and self.stage._engine is not None
        assert not self.stage._engine.sampler._seen
        assert self.stage._scheduler.blocks.can_allocate(stats.kv_blocks_total)


def driver(model: CausalLM, program: type[CausalLMProgram] = CausalLMProgram, **options: int) -> Driver:
    return Driver(program(lambda ctx: model, text_edges=(OUT,)), **options)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(6, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(tiny_llama, ids: list[int], *, seed: int = 0, **arguments) -> list[int]:
    """The new tokens of transformers' generate."""
    torch.manual_seed(seed)
    defaults = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": 0, "max_new_tokens": 24}
    out = tiny_llama.generate(torch.tensor([ids]), **{**defaults, **arguments})
    return out[0, len(ids) :].tolist()


def test_greedy_tokens_equal_transformers(tiny_llama, model):
    bus = driver(model)
    for number in range(6):
        bus.add(number, prompt(number, 3 + 5 * number), SamplingParams(max_tokens=24))
    bus.run()
    for number in range(6):
        expected = reference(tiny_llama, prompt(number, 3 + 5 * number))
        assert bus.ids[number] == expected
        assert bus.finish[number] == ("stop" if expected[-1] == EOS else "length")
        assert bus.usage[number] == {"prompt_tokens": 3 + 5 * number, "completion_tokens": len(expected), "cached_tokens": 0}
        first, *between, last = bus.told[number]
        assert first == {"prompt_tokens": 3 + 5 * number, "cached_tokens": 0} and last == bus.usage[number]
        assert not any(between)
        assert bus.text[number] == model.tokenizer.decode(expected, skip_special_tokens=True)
        assert bus.consumed[number] == 1
    bus.check_empty()


SAMPLED = [
    ({"temperature": 1.0}, {"top_k": 0}),
    ({"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "top_k": 5}),
    ({"temperature": 1.3, "top_p": 0.6}, {"temperature": 1.3, "top_p": 0.6, "top_k": 0}),
    (
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3},
    ),
    ({"temperature": 1.5, "top_k": 500, "top_p": 0.001}, {"temperature": 1.5, "top_k": 500, "top_p": 0.001}),
    ({"temperature": 2.0, "min_tokens": 12}, {"temperature": 2.0, "top_k": 0, "min_new_tokens": 12}),
]


@pytest.mark.parametrize(("ours", "theirs"), SAMPLED)
def test_sampled_tokens_equal_transformers_draw_for_draw(tiny_llama, model, ours, theirs):
    bus = driver(model)
    for seed in range(5):
        bus.add(seed, prompt(seed, 7 + seed), SamplingParams(max_tokens=24, **ours), seed=1000 + seed)
    bus.run()
    for seed in range(5):
        assert bus.ids[seed] == reference(tiny_llama, prompt(seed, 7 + seed), seed=1000 + seed, do_sample=True, **theirs)


def test_greedy_with_penalty_min_tokens_and_suppressed_ids_equals_transformers(tiny_llama, model):
    class Suppressing(CausalLMProgram):
        suppressed_ids = torch.tensor([7, 40, 41, 60])

    bus = driver(model, Suppressing)
    for seed in range(4):
        bus.add(seed, prompt(seed, 9), SamplingParams(max_tokens=24, repetition_penalty=1.4, min_tokens=6))
    bus.run()
    for seed in range(4):
        assert bus.ids[seed] == reference(
            tiny_llama, prompt(seed, 9), repetition_penalty=1.4, min_new_tokens=6, suppress_tokens=[7, 40, 41, 60]
        )


def test_a_stage_seed_goes_before_the_requests(model):
    bus = driver(model)
    bus.add(0, prompt(0, 5), SamplingParams(max_tokens=12, temperature=1.0, seed=4), seed=5)
    bus.add(1, prompt(0, 5), SamplingParams(max_tokens=12, temperature=1.0), seed=4)
    bus.add(2, prompt(0, 5), SamplingParams(max_tokens=12, temperature=1.0), seed=5)
    bus.run()
    assert bus.ids[0] == bus.ids[1] != bus.ids[2]


@pytest.mark.parametrize("piece", [1, 3, 7, 64])
def test_chunked_prefill_equals_whole_prefill(tiny_llama, model, piece):
    bus = driver(model, max_prefill_tokens=piece)
    for seed in range(3):
        bus.add(seed, prompt(seed, 29), SamplingParams(max_tokens=10))
    bus.run()
    for seed in range(3):
        assert bus.ids[seed] == reference(tiny_llama, prompt(seed, 29), max_new_tokens=10)


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_cancels_and_pauses_change_no_row(tiny_llama, model, seed):
    rng = random.Random(seed)
    bus = driver(model, max_batch=4, kv_blocks=64, max_length=80, max_prefill_tokens=6)
    sampled = SamplingParams(max_tokens=15, temperature=1.2, top_k=30, repetition_penalty=1.1)
    plans = {}
    for number in range(24):
        ids = prompt(seed * 100 + number, rng.randint(1, 30))
        plans[number] = (ids, SamplingParams(max_tokens=15) if number % 2 else sampled)
    todo, unfed, paused, cancelled = list(plans), {}, set(), set()
    while todo or unfed or paused or bus.stage.has_work():
        if todo and rng.random() < 0.5:
            number = todo.pop(0)
            bus.open(number, plans[number][1], seed=number)
            unfed[number] = list(plans[number][0])
        for number in list(unfed):  # prompts come in pieces
            if rng.random() < 0.5 and number in unfed:
                count = rng.randint(1, 12)
                part, unfed[number] = unfed[number][:count], unfed[number][count:]
                bus.feed(number, part, last=not unfed[number])
                if not unfed[number]:
                    del unfed[number]
        if rng.random() < 0.08:
            number = rng.choice(list(plans))
            if number not in todo and number not in bus.usage:
                bus.stage.cancel(number)
                cancelled.add(number)
                unfed.pop(number, None)
                paused.discard(number)
        if rng.random() < 0.3:
            number = rng.choice(list(plans))
            bus.stage.pause(number)
            paused.add(number)
        if paused and rng.random() < 0.5:
            number = rng.choice(sorted(paused))
            bus.stage.resume(number)
            paused.discard(number)
        bus.step()
    assert not bus.errors
    for number, (ids, params) in plans.items():
        if number in cancelled:
            continue
        arguments = {}
        if params is sampled:
            arguments = {"do_sample": True, "temperature": 1.2, "top_k": 30, "repetition_penalty": 1.1}
        assert bus.ids[number] == reference(tiny_llama, ids, seed=number, max_new_tokens=15, **arguments)
    assert len(bus.usage) == 24 - len(cancelled)
    bus.check_empty()


def test_rows_that_wait_leave_the_batch(model):
    bus = driver(model)
    bus.open(0, SamplingParams(max_tokens=4))
    bus.feed(0, prompt(0, 6), last=False)
    bus.add(1, prompt(1, 6), SamplingParams(max_tokens=40, ignore_eos=True))
    bus.run()
    assert len(bus.ids[1]) == 40 and not bus.ids[0]
    assert bus.stage.stats().running == 1  # row 0 keeps its blocks
    assert not bus.stage.has_work()
    bus.feed(0, [], last=True)
    assert bus.stage.has_work()
    bus.run()
    assert len(bus.ids[0]) == 4
    bus.check_empty()


def test_a_paused_row_stands_still_and_goes_on_where_it_was(tiny_llama, model):
    bus = driver(model)
    bus.add(0, prompt(0, 6), SamplingParams(max_tokens=20, ignore_eos=True))
    bus.add(1, prompt(1, 6), SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(5):
        bus.step()
    bus.stage.pause(0)
    before = list(bus.ids[0])
    bus.run()
    assert bus.ids[0] == before and len(bus.ids[1]) == 20
    bus.stage.resume(0)
    bus.run()
    assert bus.ids[0] == reference(tiny_llama, prompt(0, 6), max_new_tokens=20, eos_token_id=None)


def test_rows_wait_for_blocks_and_none_is_starved(tiny_llama, model):
    bus = driver(model, kv_blocks=12, max_length=48)  # room for two of the rows at a time
    for number in range(7):
        bus.add(number, prompt(number, 10), SamplingParams(max_tokens=14))
    most = 0
    while bus.stage.has_work():
        bus.step()
        most = max(most, bus.stage.stats().running)
        assert bus.stage.stats().kv_blocks_used <= 12
    assert most == 2
    for number in range(7):
        assert bus.ids[number] == reference(tiny_llama, prompt(number, 10), max_new_tokens=14)
    bus.check_empty()


def test_every_decoding_row_gets_a_token_in_every_step(model):
    bus = driver(model)
    for number in range(6):
        bus.add(number, prompt(number, 4), SamplingParams(max_tokens=20, ignore_eos=True))
    for step in range(1, 12):
        bus.step()
        assert [len(bus.ids[number]) for number in range(6)] == [step] * 6


def test_decoding_goes_on_while_a_long_prompt_is_computed(model):
    bus = driver(model, max_prefill_tokens=8)
    bus.add(0, prompt(0, 4), SamplingParams(max_tokens=30, ignore_eos=True))
    bus.step()
    bus.add(1, prompt(1, 80), SamplingParams(max_tokens=2, ignore_eos=True))
    for step in range(10):
        assert not bus.ids[1]
        bus.step()
        assert len(bus.ids[0]) == 2 + step
    assert len(bus.ids[1]) == 1


def test_max_length_ends_the_output(tiny_llama, model):
    bus = driver(model, max_length=32)
    bus.add(0, prompt(0, 20), SamplingParams(ignore_eos=True))
    bus.run()
    assert bus.finish[0] == "length"
    assert bus.ids[0] == reference(tiny_llama, prompt(0, 20), max_new_tokens=12, eos_token_id=None)


@pytest.mark.parametrize("length", [32, 33, 200])
def test_a_prompt_that_can_never_fit_is_refused_with_figures(model, length):
    bus = driver(model, kv_blocks=8)
    bus.open(0, SamplingParams(max_tokens=4))
    with pytest.raises(ModelRefused, match=rf"{length} positions.* 32"):
        bus.feed(0, prompt(0, length))
    bus.check_empty()
    bus.add(1, prompt(0, 31), SamplingParams(max_tokens=4))
    bus.run()
    assert len(bus.ids[1]) == 1


def test_an_empty_prompt_is_refused(model):
    bus = driver(model)
    bus.open(0, SamplingParams())
    with pytest.raises(ModelRefused, match="empty"):
        bus.feed(0, [])
    bus.check_empty()


def test_stop_token_ids_end_the_output(tiny_llama, model):
    expected = reference(tiny_llama, prompt(3, 8), eos_token_id=None)
    token = expected[6]
    bus = driver(model)
    bus.add(0, prompt(3, 8), SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(token,)))
    bus.run()
    assert bus.ids[0] == expected[: expected.index(token) + 1]
    assert bus.finish[0] == "stop"


def test_a_stop_string_ends_the_output_before_it_is_sent(tiny_llama, model):
    expected = reference(tiny_llama, prompt(3, 8), eos_token_id=None)
    text = model.tokenizer.decode(expected, skip_special_tokens=True)
    stop = text[9:12]
    bus = driver(model)
    bus.add(0, prompt(3, 8), SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop, "never there")))
    bus.run()
    assert bus.text[0] == text[: text.index(stop)]
    assert bus.ids[0] == expected[: len(bus.ids[0])] and len(bus.ids[0]) < 24
    assert bus.finish[0] == "stop"
    bus.check_empty()


class Faulty(CausalLMProgram):
    """Embedding token 1 raises; token 2 becomes NaN; sampling for a row of 3 fails in the way `how` says."""

    suppressed_ids = torch.tensor([1, 2, 3])
    how = ""
    draws = 0

    def embed(self, token_ids):
        if (token_ids == 1).any():
            raise RuntimeError("secret detail")
        return torch.where((token_ids == 2)[:, None], torch.nan, super().embed(token_ids))

    def sampled(self, rows, tokens, hidden):
        bad = [row for row in rows if row.penalty_ids[0] == 3]
        for row in rows:  # as a code predictor would
            if self.how and row.generator is not None:
                torch.rand(1, generator=row.generator)
        if bad and self.how == "whole":
            raise RuntimeError("secret detail")
        super().sampled(rows, tokens, hidden)

    def _sampled(self, row, token):
        super()._sampled(row, token)
        if row.penalty_ids[0] == 3 and self.how == "row":
            raise RuntimeError("secret detail")


@pytest.mark.parametrize(("first", "how"), [(1, ""), (2, ""), (3, "whole"), (3, "row")])
def test_a_row_that_fails_takes_no_other_with_it(tiny_llama, model, first, how, caplog):
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)

    def run(broken: bool) -> Driver:
        bus = driver(model, Faulty)
        bus.program.how = how
        for number in range(3):
            bus.add(number, prompt(number, 8), params, seed=number)
        for _ in range(4):
            bus.step()
        if broken:
            bus.add(9, [first, *prompt(9, 5)], params, seed=9)
        bus.add(3, prompt(3, 8), params, seed=3)
        bus.run()
        return bus

    good, bad = run(False), run(True)
    assert all(good.ids[number] == bad.ids[number] and len(good.ids[number]) == 12 for number in range(4))
    error = bad.errors[9].error
    assert error.code == "stage_failed" and error.status == 500 and "secret" not in error.message
    assert list(bad.errors) == [9] and "request 9" in caplog.text
    bad.check_empty()


def test_what_fails_on_input_is_raised_and_leaves_nothing(model):
    class Refusing(CausalLMProgram):
        def prompt_ids(self, row, chunk):
            if row.request.id == 1:
                raise ZeroDivisionError
            return super().prompt_ids(row, chunk)

    bus = driver(model, Refusing)
    bus.add(0, prompt(0, 8), SamplingParams(max_tokens=3))
    bus.open(1, SamplingParams())
    with pytest.raises(StageFailed):
        bus.feed(1, prompt(1, 4))
    bus.feed(1, prompt(1, 4))  # what was still on its way
    bus.run()
    assert list(bus.usage) == [0]
    bus.check_empty()


def test_unknown_ids_are_ignored(model):
    bus = driver(model)
    bus.stage.cancel(5)
    bus.stage.pause(5)
    bus.stage.resume(5)
    bus.feed(5, [1])
    assert not bus.stage.has_work() and list(bus.stage.step()) == []


def test_output_on_a_closed_edge_is_not_sent(model):
    bus = Driver(CausalLMProgram(lambda ctx: model, text_edges=("llm->tts", OUT)))
    bus.add(0, prompt(0, 8), SamplingParams(max_tokens=3))
    edges = set()
    while bus.stage.has_work():
        edges |= {emission.edge for emission in bus.stage.step() if isinstance(emission, Output)}
    assert edges == {OUT}


def test_a_llama_config_of_either_spelling_and_one_that_lacks_something():
    from omni_bus.stages.ar.causal_lm import llama_config

    old = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "rope_theta": 5e4,
    }
    new = {key: value for key, value in old.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e4}
    assert llama_config(old) == llama_config(new)
    assert llama_config(old).kv_heads == 6 and llama_config(old).head_dim == 8 and llama_config(old).rope_theta == 5e4
    with pytest.raises(CheckpointError, match="hidden_size"):
        llama_config({key: value for key, value in old.items() if key != "hidden_size"})
    with pytest.raises(CheckpointError, match="scaled"):
        llama_config({**old, "rope_scaling": {"rope_type": "llama3"}})
