"""The engine: attention's kernel against its plain form, and decode by CUDA graphs against decode row by row."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from omni_bus.deployment import StageConfig
from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.attention import DecodeAttention
from omni_bus.stages.ar.causal_lm import PromptIds
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.ar.mlp import DenseConfig, MoEConfig
from omni_bus.stages.ar.program import Row, StepTensors
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import Chunk, StageContext, StageError, StageRequest

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SHAPES = {
    "thinker": (32, 4, 128),
    "talker": (16, 2, 128),
    "tiny32": (4, 2, 32),
    "tiny16": (4, 2, 16),
}  # heads, KV heads, head_dim
LENGTHS = (1, 17, 64, 65, 700, 4097)
BATCHES = (1, 3, 8, 16, 33, 64)


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, shape in SHAPES.items():
        for dtype in TOLERANCE:
            yield f"attention {name} {str(dtype)[6:]}", functools.partial(_attention, shape, dtype)
    for attention in ("torch", "triton"):
        for experts in (0, 8):
            yield f"decode by graphs, attention {attention}, {experts} experts", functools.partial(_decode, attention, experts)
        yield f"kept blocks, attention {attention}", functools.partial(_kept, attention)


def small_config(
    heads: int, kv_heads: int, head_dim: int, *, layers: int = 1, hidden: int = 64, experts: int = 0
) -> DecoderConfig:
    mlp = MoEConfig(experts=experts, top_k=2, intermediate=64) if experts else DenseConfig(intermediate=128)
    return DecoderConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        max_positions=8192,
        qk_norm=True,
        mrope_section=(head_dim // 4, head_dim // 8, head_dim // 8),
    )


def _attention(shape: tuple[int, int, int], dtype: torch.dtype) -> str:
    heads, kv_heads, head_dim = shape
    config, block_size = small_config(*shape), 16
    generator = torch.Generator(CUDA).manual_seed(0)
    pages = -(-max(LENGTHS) // block_size)
    cache = KVCache(config, blocks=max(BATCHES) * pages, block_size=block_size, dtype=dtype, device=CUDA)
    keys, values = cache.layer(0)
    worst, figures = 0.0, []
    forms = [
        DecodeAttention(config, cache, slots=max(BATCHES), max_length=pages * block_size, kernel=kernel)
        for kernel in (False, True)
    ]
    order = torch.randperm(max(BATCHES) * pages, generator=torch.Generator().manual_seed(1)) + 1
    for slot in range(1, max(BATCHES) + 1):
        for form in forms:
            form.admit(slot, order[(slot - 1) * pages : slot * pages].tolist())
    for batch in BATCHES:
        for lengths in [*([length] * batch for length in LENGTHS), [LENGTHS[row % len(LENGTHS)] for row in range(batch)]]:
            keys[block_size:].normal_(generator=generator)
            values[block_size:].normal_(generator=generator)
            packed = torch.randn(batch, heads + 2 * kv_heads, head_dim, dtype=dtype, device=CUDA, generator=generator)
            query, key, value = torch.split(packed, [heads, kv_heads, kv_heads], dim=1)
            slots = torch.arange(batch, 0, -1, device=CUDA)
            if batch > 2:
                slots[1] = 0  # a row that only fills the batch up
            on_device = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
            on_device[slots == 0] = 1
            results, written = [], []
            before = keys.clone(), values.clone()
            for form in forms:
                keys.copy_(before[0])
                values.copy_(before[1])
                form.begin(slots, on_device)
                results.append(form.attend(0, query, key, value).float())
                written.append((keys.clone(), values.clone()))
            error = difference(results[1], results[0])
            assert error <= TOLERANCE[dtype], f"batch {batch}, lengths {lengths[:6]}: differs by {error:.2e}"
            for plain, fused in zip(*written, strict=True):
                assert torch.equal(plain, fused), f"batch {batch}, lengths {lengths[:6]}: the cache differs"
            worst = max(worst, error)
            if batch in (1, 16, 64) and lengths[0] == lengths[-1] and lengths[0] in (700, 4097):
                form = forms[1]
                spent = graph_time(functools.partial(form.attend, 0, query, key, value))
                figures.append(f"{batch}x{lengths[0]}: {spent * 1e6:.1f}")
    return f"error {worst:.1e}; µs, rows x positions: " + ", ".join(figures)


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result - expected).abs() / (1 + expected.abs())).max().item()


def graph_time(call: Callable[[], object], repeats: int = 20) -> float:
    """Seconds of one call inside a graph of `repeats` of them."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


class CountingProgram:
    """A random decoder that counts on greedily, in both forms. With `capture_layer` it keeps what it is shown of that layer."""

    eos_ids: frozenset[int] = frozenset()
    suppressed_ids: torch.Tensor | None = None
    deepstack_taps = 0
    max_length = 256

    def __init__(self, experts: int, capture_layer: int | None = None) -> None:
        self.capture_layer = capture_layer
        self.captured: dict[int, list[torch.Tensor]] = {}
        config = small_config(4, 2, 16, layers=3, experts=experts)
        generator = torch.Generator().manual_seed(5)
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
        tensors = {}
        for name, size in shapes.items():
            noise = torch.randn(size, generator=generator)
            tensors[name] = 1 + 0.3 * noise if len(size) == 1 else noise * size[-1] ** -0.5
        self.decoder = Decoder.from_tensors(config, tensors, dtype=torch.float32, device=CUDA)
        self.table = torch.randn(32, config.hidden, generator=generator).to(CUDA)
        self.head = torch.randn(32, config.hidden, generator=generator).to(CUDA)

    def load(self, ctx: StageContext) -> None:
        pass

    def start(self, row: Row) -> None:
        pass

    def feed(self, row: Row, chunk: Chunk) -> None:
        assert isinstance(chunk.payload, PromptIds)
        row.append_text(token_ids=chunk.payload.token_ids)
        row.close_prompt()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.table)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.head).float()

    def computed(self, row: Row, start: int, captured: torch.Tensor) -> None:
        parts = self.captured.setdefault(row.request.id, [])
        assert start == sum(map(len, parts)), "every position once, in order"
        parts.append(captured.clone())

    def sampled(self, rows: Sequence[Row], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        for row, token in zip(rows, tokens, strict=True):
            if row.finish_reason is None:
                row.append_text(token_ids=[token])
            else:
                row.finish({str(index): number for index, number in enumerate(row.output_ids)})

    def prepared(self, row: Row) -> None:
        raise AssertionError("nothing is prepared here")

    def graph_prepare(self, max_batch: int) -> None:
        pass

    def graph_reset(self, row: Row) -> None:
        pass

    def graph_embed(self, step: StepTensors) -> torch.Tensor:
        return self.embed(step.tokens)

    def graph_output(self, hidden: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores = self.logits(hidden)
        return scores.argmax(dim=-1, keepdim=True), scores

    def graph_sampled(self, rows: Sequence[Row], output: torch.Tensor) -> None:
        self.sampled(rows, output[:, 0].tolist(), output)

    def release(self, row: Row) -> None:
        pass


def _decode(attention: str, experts: int) -> str:
    """12 rows that begin at different steps, 64 tokens each; prompts in one piece and in many."""
    program, times = CountingProgram(experts), {}
    for piece in (16, 512):
        tokens = {}
        for graphs in ("off", "plain", "auto"):
            stage = _stage(program, graphs=graphs, attention=attention, max_prefill_tokens=piece)
            tokens[graphs], times[graphs] = _serve(stage, _id_prompts())
        assert all(len(set(row)) > 2 for row in tokens["off"].values())
        for graphs in ("plain", "auto"):
            assert tokens[graphs] == tokens["off"], f"pieces of {piece}: graphs = {graphs!r} gives other tokens"
    return "ms a step: " + ", ".join(f"{graphs} {spent * 1e3:.2f}" for graphs, spent in times.items())


def _kept(attention: str) -> str:
    """12 conversations of three turns: tokens and captured layer as without kept blocks, however the rest is computed."""
    answers: dict[str, list[dict[int, list[int]]]] = {}
    layers: dict[str, list[torch.Tensor]] = {}
    words = []
    for graphs in ("fresh", "off", "plain", "auto"):
        program = CountingProgram(8, capture_layer=2)
        how = {"graphs": "off", "prefix_cache": False} if graphs == "fresh" else {"graphs": graphs, "attention": attention}
        stage = _stage(program, kv_blocks=600, **how)
        history, answers[graphs], layers[graphs] = _id_prompts(most=8), [], []
        for turn in range(3):
            program.captured.clear()
            answer, _ = _serve(stage, history, tokens=32)
            answers[graphs].append(answer)
            layers[graphs] += [torch.cat(program.captured[number]) for number in sorted(history)]
            history = {number: [*ids, *answer[number], turn, number] for number, ids in history.items()}
        stats = stage.stats()
        assert bool(stats.prompt_cached) == (graphs != "fresh") and not stats.kv_blocks_used
        assert answers[graphs] == answers["fresh"], f"graphs = {graphs!r} gives other tokens"
        errors = [float((one - wanted).abs().max()) for one, wanted in zip(layers[graphs], layers["fresh"], strict=True)]
        assert max(errors) <= 1e-3, f"graphs = {graphs!r}: the captured layer is off by {max(errors):.1e}"
        words.append(f"{graphs}: {stats.prompt_computed} computed, {stats.prompt_cached} kept, error {max(errors):.0e}")
    return "; ".join(words)


def _id_prompts(*, most: int = 9) -> dict[int, list[int]]:
    """12 prompts of 1, 1 + most, … ids."""
    return {
        number: torch.randint(0, 32, (1 + most * number,), generator=torch.Generator().manual_seed(number)).tolist()
        for number in range(12)
    }


def _stage(program: CountingProgram, **options: object) -> ARStage:
    stage = ARStage(program)
    stage.load(
        StageContext(
            stage="check",
            pipeline=None,  # type: ignore[arg-type]
            model_path="",
            device=str(CUDA),
            config=StageConfig(devices=(str(CUDA),), max_batch=12, options={"kv_blocks": 256, **options}),
            edges={},
            progress=lambda fraction, what: None,
        )
    )
    return stage


def _serve(stage: ARStage, prompts: dict[int, list[int]], *, tokens: int = 64) -> tuple[dict[int, list[int]], float]:
    """The rows begin at different steps → their tokens, and seconds a step."""
    made: dict[int, list[int]] = {}
    steps, begin = 0, time.perf_counter()
    while stage.has_work() or steps < 40:
        if steps < 36 and steps % 3 == 0:
            number = steps // 3
            stage.open(
                StageRequest(
                    id=number,
                    options=RequestOptions(),
                    sampling=SamplingParams(max_tokens=tokens, temperature=0.0),
                    inputs=(),
                    outputs=(),
                    deadline=1e9,
                )
            )
            stage.feed(number, Chunk("in", PromptIds(tuple(prompts[number])), {}, True))
        for emission in stage.step():
            assert not isinstance(emission, StageError), emission
            made[emission.request_id] = [emission.usage[str(index)] for index in range(tokens)]  # type: ignore[union-attr]
        steps += 1
    assert len(made) == 12
    return made, (time.perf_counter() - begin) / steps
