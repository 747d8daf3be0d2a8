"""Kept KV blocks of prompts with media: contents and positions on three axes decide, and the captured layer comes along."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
import torch

from omni_bus.deployment import StageConfig
from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.ar.mlp import MoEConfig
from omni_bus.stages.ar.program import Inputs, Row, StepTensors, isolated
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import Chunk, Finished, Output, StageContext, StageRequest

VOCAB, HIDDEN, BLOCK = 50, 48, 4
MODES = pytest.mark.parametrize("graphs", ["off", "plain"])


class Part(msgspec.Struct, frozen=True):
    """A piece of a prompt: ids of text, or a picture of height x width whose features and deepstack follow from `seed`."""

    ids: tuple[int, ...] = ()
    grid: tuple[int, int] = (0, 0)
    seed: int = 0
    named: bool = True  # whether the picture's content is told


class Prompt(msgspec.Struct, frozen=True):
    parts: tuple[Part, ...]


class Token(msgspec.Struct, frozen=True):
    id: int


def text(seed: int, count: int) -> Part:
    return Part(ids=tuple(torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()))


class PictureProgram:
    """Text and pictures in one sequence, as the Thinker has them; hands on what it captured of the prompt."""

    eos_ids: frozenset[int] = frozenset()
    suppressed_ids = None
    capture_layer = 2
    deepstack_taps = 3
    max_length = 160

    def __init__(self) -> None:
        config = DecoderConfig(
            hidden=HIDDEN,
            layers=3,
            heads=4,
            kv_heads=2,
            head_dim=32,
            mlp=MoEConfig(experts=4, top_k=2, intermediate=24),
            max_positions=self.max_length,
            rope_theta=1e6,
            rms_eps=1e-6,
            mrope_section=(6, 5, 5),
            qk_norm=True,
        )
        generator = torch.Generator().manual_seed(3)
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
        tensors = {}
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
        self.decoder = Decoder.from_tensors(config, tensors, dtype=torch.float32, device="cpu")
        self.table = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.captured: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def load(self, ctx) -> None: ...

    def start(self, row: Row) -> None:
        self.captured[row.request.id] = []

    def feed(self, row: Row, chunk: Chunk) -> None:
        assert isinstance(chunk.payload, Prompt)
        embeds, positions, deepstack, content, at = [], [], [], [], 0
        named = True
        for part in chunk.payload.parts:
            count = len(part.ids) or part.grid[0] * part.grid[1]
            if part.ids:
                embeds.append(self.table[list(part.ids)])
                positions.append(torch.arange(at, at + count).expand(3, -1))
                deepstack.append(torch.zeros(1, count, HIDDEN))
                content += part.ids
            else:
                generator = torch.Generator().manual_seed(part.seed)
                embeds.append(torch.randn(count, HIDDEN, generator=generator))
                deepstack.append(torch.randn(1, count, HIDDEN, generator=generator))
                width = part.grid[1]
                grid = torch.stack([torch.zeros(count), torch.arange(count) // width, torch.arange(count) % width]).long()
                positions.append(at + grid)
                digest = hashlib.blake2b(embeds[-1].numpy().tobytes(), digest_size=16).digest()
                content += [int.from_bytes(digest + number.to_bytes(4, "little"), "little") for number in range(count)]
                named = named and part.named
            at = int(positions[-1].max()) + 1
        row.append(
            Inputs(
                positions=torch.cat(positions, dim=1),
                embeds=torch.cat(embeds),
                deepstack=torch.cat(deepstack, dim=1) if any(part.grid[0] for part in chunk.payload.parts) else None,
                content=content if named else None,
            )
        )
        row.close_prompt()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.table[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table.T

    def computed(self, row: Row, start: int, captured: torch.Tensor) -> None:
        self.captured[row.request.id].append((start, captured.clone()))

    def sampled(self, rows, tokens, hidden) -> None:
        for row, token in zip(rows, tokens, strict=True):
            with isolated(row):
                row.emit("a->b", Token(token), last=row.finish_reason is not None)
                if row.finish_reason is not None:
                    row.finish({})
                else:
                    row.append_text(token_ids=[token])

    def prepared(self, row: Row) -> None:
        row.finish({})

    def release(self, row: Row) -> None: ...

    def graph_prepare(self, max_batch: int) -> None: ...

    def graph_reset(self, row: Row) -> None: ...

    def graph_embed(self, step: StepTensors) -> torch.Tensor:
        return self.embed(step.tokens)

    def graph_output(self, hidden: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores = self.logits(hidden)
        return scores.argmax(dim=-1, keepdim=True), scores

    def graph_sampled(self, rows, output) -> None:
        self.sampled(rows, output[:, 0].tolist(), torch.empty(0))


def spoil(cache: KVCache) -> None:
    """Whatever is read before it is written is seen."""
    cache._keys[:, cache.block_size :] = torch.nan
    cache._values[:, cache.block_size :] = torch.nan
    if cache.captured is not None:
        cache.captured[:] = torch.nan


class Bench:
    def __init__(self, *, graphs: str = "off", **options: object) -> None:
        self.program = PictureProgram()
        self.stage = ARStage(self.program)
        options = {"block_size": BLOCK, "graphs": graphs, **options}
        config = StageConfig(devices=("cpu",), max_batch=4, options=options)
        self.stage.load(
            StageContext(
                stage="s", pipeline=None, model_path="", device="cpu", config=config, edges={}, progress=lambda *_: None
            )  # type: ignore[arg-type]
        )
        assert self.stage._engine is not None
        if graphs == "plain":  # prompts behind kept blocks, pictures and pieces of either: nothing is left for the free form
            self.stage._engine.attention.plan = lambda spans: pytest.fail("computed freely")  # type: ignore[method-assign]
        spoil(self.stage._engine.attention.cache)
        self.cached: dict[int, int | None] = {}
        self.tokens: dict[int, list[int]] = {}

    def submit(self, number: int, parts: tuple[Part, ...], tokens: int = 8, *, prepare: bool = False) -> None:
        request = StageRequest(
            id=number,
            options=RequestOptions(prepare=prepare),
            sampling=SamplingParams(max_tokens=tokens),
            inputs=("in",),
            outputs=("a->b",),
            deadline=1e9,
        )
        self.tokens[number] = []
        self.stage.open(request)
        self.stage.feed(number, Chunk("in", Prompt(parts), {}, True))

    def run(self) -> None:
        while self.stage.has_work():
            for emission in self.stage.step():
                if isinstance(emission, Output):
                    assert isinstance(emission.payload, Token)
                    self.tokens[emission.request_id].append(emission.payload.id)
                elif isinstance(emission, Finished):
                    self.cached[emission.request_id] = emission.usage.get("cached_tokens")

    def answer(self, number: int, *parts: Part, tokens: int = 8, prepare: bool = False) -> list[int]:
        self.submit(number, parts, tokens, prepare=prepare)
        self.run()
        return self.tokens[number]

    def layer(self, number: int) -> torch.Tensor:
        """[prompt, hidden] of the captured layer, as the program had it: every position once, in order."""
        parts = self.program.captured[number]
        assert [start for start, _ in parts] == [sum(len(part) for _, part in parts[:index]) for index in range(len(parts))]
        return torch.cat([part for _, part in parts])


def check(bench: Bench, number: int, *parts: Part, cached: int | None) -> list[int]:
    """The answer and the captured layer are those of a stage that keeps nothing."""
    fresh = Bench(prefix_cache=False)
    tokens = bench.answer(number, *parts)
    assert tokens == fresh.answer(0, *parts)
    torch.testing.assert_close(bench.layer(number), fresh.layer(0), atol=1e-5, rtol=1e-5)
    assert bench.cached[number] == cached
    return tokens


@MODES
@pytest.mark.parametrize("piece", [5, 512])
def test_the_captured_layer_of_kept_blocks_is_handed_on_as_if_computed(graphs, piece):
    bench = Bench(graphs=graphs, max_prefill_tokens=piece)
    turn = (text(1, 7), Part(grid=(2, 3), seed=1), text(2, 6))
    answer = check(bench, 0, *turn, cached=0)
    # The next turn's prompt holds the answer: what decode steps have captured is there too.
    following = (*turn, Part(ids=tuple(answer)), text(3, 5))
    more = check(bench, 1, *following, cached=(19 + 7) // BLOCK * BLOCK)
    check(bench, 2, *following, Part(ids=tuple(more)), Part(grid=(3, 2), seed=2), text(4, 3), cached=(32 + 7) // BLOCK * BLOCK)
    check(bench, 3, *turn, cached=16)


@MODES
def test_a_prepared_prompt_brings_its_layer(graphs):
    bench = Bench(graphs=graphs)
    turn = (text(1, 7), Part(grid=(2, 3), seed=1), text(2, 6))
    assert bench.answer(0, *turn, prepare=True) == []
    check(bench, 1, *turn, text(3, 3), cached=16)


@MODES
def test_the_layer_of_a_text_alone_is_there_for_a_picture_behind_it(graphs):
    bench = Bench(graphs=graphs)
    check(bench, 0, text(1, 13), cached=0)
    check(bench, 1, text(1, 13), Part(grid=(2, 3), seed=1), text(2, 3), cached=12)


def test_other_features_in_the_same_place_are_another_prompt():
    bench = Bench()
    check(bench, 0, text(1, 6), Part(grid=(2, 3), seed=1), text(2, 6), cached=0)
    check(bench, 1, text(1, 6), Part(grid=(2, 3), seed=2), text(2, 6), cached=4)
    check(bench, 2, text(1, 6), Part(grid=(2, 3), seed=1), text(2, 6), cached=16)


def test_the_same_features_in_another_shape_are_another_prompt():
    """The features' digests are equal whatever the grid; only their positions differ, from where they do."""
    bench = Bench()
    check(bench, 0, text(1, 4), Part(grid=(2, 4), seed=1), text(2, 8), cached=0)
    check(bench, 1, text(1, 4), Part(grid=(4, 2), seed=1), text(2, 8), cached=4)
    check(bench, 2, text(1, 4), Part(grid=(1, 8), seed=1), text(2, 8), cached=8)


def test_a_picture_whose_content_is_not_told_shares_nothing():
    bench = Bench()
    for number in range(2):
        check(bench, number, text(1, 8), Part(grid=(2, 3), seed=1, named=False), text(2, 6), cached=None)
    check(bench, 2, text(1, 8), Part(grid=(2, 3), seed=1), text(2, 6), cached=0)


def test_rows_with_and_without_kept_blocks_run_beside_each_other():
    bench, fresh = Bench(max_prefill_tokens=9, kv_blocks=40), Bench(prefix_cache=False)
    trunk = (text(1, 5), Part(grid=(3, 3), seed=1))
    bench.answer(100, *trunk, prepare=True)
    prompts = {number: (*trunk, text(10 + number, 2 + number)) if number % 2 else (text(number, 9),) for number in range(12)}
    for number, parts in prompts.items():
        bench.submit(number, parts, tokens=3 + number % 5)
    bench.run()
    for number, parts in prompts.items():
        assert bench.tokens[number] == fresh.answer(number, *parts, tokens=3 + number % 5)
        torch.testing.assert_close(bench.layer(number), fresh.layer(number), atol=1e-5, rtol=1e-5)
        assert bench.cached[number] == (12 if number % 2 else 0)
    assert bench.stage.stats().kv_blocks_used == 0
