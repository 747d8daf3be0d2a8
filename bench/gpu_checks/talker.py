"""The Talker's frame: device sampling and the residual codes' attention against their plain forms, speech by CUDA graphs against
speech on the CPU, and what one frame costs at the real size."""

from __future__ import annotations

import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.support.stage_pipeline import Trace

from bench.gpu_checks import layers
from omni_bus.deployment import StageConfig
from omni_bus.spec import load_pipeline
from omni_bus.stages.ar import device_sampler, ops
from omni_bus.stages.ar.attention import ContiguousAttention
from omni_bus.stages.ar.decoder import DecoderConfig
from omni_bus.stages.ar.mlp import DenseConfig
from omni_bus.stages.ar.program import StepTensors
from omni_bus.stages.contract import StageContext
from omni_bus.stages.qwen3_omni import fixture
from omni_bus.stages.qwen3_omni.talker import TalkerProgram

CUDA = torch.device("cuda")
STAGES = ("processor", "thinker", "talker")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SCORES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # of the norm, behind five layers
BATCHES = (1, 2, 4, 8, 32, 64)


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    for dtype in TOLERANCE:
        yield f"sampler {str(dtype)[6:]}", functools.partial(_sampler, dtype)
    for dtype in TOLERANCE:
        yield f"attention of a frame {str(dtype)[6:]}", functools.partial(_attention, dtype)
    for dtype in TOLERANCE:
        yield f"fused scores {str(dtype)[6:]}", functools.partial(_fused_scores, dtype)
    yield "speech by graphs, greedy", functools.partial(_speech, False)
    yield "speech by graphs, sampled", functools.partial(_speech, True)
    yield "no host synchronisation in graph_output", _without_synchronisation
    yield "a frame with dependent launches and without", _dependent_frame
    for fused in (True, False):
        yield f"time of a frame's codes, {'fused' if fused else 'by operators'}", functools.partial(_frame_time, fused)


def _graph_time(call: Callable[[], object], repeats: int) -> float:
    """Seconds of one call inside a graph of `repeats` of them, the best of five."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best / repeats


def _knobs(rows: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Seeds, draws, temperature, top_k and top_p of every kind in turn."""
    kinds = [(0.0, 50, 0.8), (1.0, 50, 0.8), (0.9, 50, 1.0), (1.0, 0, 1.0), (0.5, 0, 0.9), (2.0, 5, 0.3), (1.0, 9999, 0.999)]
    said = [kinds[row % len(kinds)] for row in range(rows)]
    return [
        torch.randint(0, 2**63 - 1, (rows,), generator=generator),
        torch.randint(0, 2**40, (rows,), generator=generator),
        torch.tensor([one[0] for one in said]),
        torch.tensor([one[1] for one in said]),
        torch.tensor([one[2] for one in said]),
    ]


def _sampler(dtype: torch.dtype) -> str:
    """Equal tokens, but where two are so near to a tie that the rounding of a logarithm or a sum decides."""
    generator = torch.Generator().manual_seed(0)
    drawn = different = 0
    for vocab in (7, 300, 2048, 3072, 4096):
        for on_cpu in (True, False, False, False):
            rows = 32 if on_cpu else 512
            scores = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)
            knobs = _knobs(rows, generator)
            on_device = [one.to(CUDA) for one in knobs]
            kernel = device_sampler.sample(scores.to(CUDA), *on_device).cpu()
            assert int(kernel.min()) >= 0 and int(kernel.max()) < vocab
            where = (scores, *knobs) if on_cpu else (scores.to(CUDA), *on_device)
            drawn += rows
            different += int((device_sampler.sample_plain(*where).cpu() != kernel).sum())
    words = device_sampler.philox(torch.tensor([3]), torch.tensor([2**33 + 5]), 4096)
    assert torch.equal(
        words, device_sampler.philox(torch.tensor([3], device=CUDA), torch.tensor([2**33 + 5], device=CUDA), 4096).cpu()
    )
    seen = torch.rand(300, 3072, generator=generator) > 0.5
    said = (torch.randint(0, 300, (256,), generator=generator), torch.rand(256, generator=generator) + 0.5)
    flags = [torch.rand(size, generator=generator) > 0.7 for size in (3072, 3072, 256)]
    scores = torch.randn(256, 3072, generator=generator).to(dtype)
    plain = device_sampler.adjust_plain(scores, seen, *said, *flags)
    kernel = device_sampler.adjust(scores.to(CUDA), seen.to(CUDA), *(one.to(CUDA) for one in (*said, *flags)))
    assert torch.equal(plain, kernel.cpu()), "adjusted scores differ"
    assert different <= drawn * 2e-4, f"{different} of {drawn} tokens differ"
    figures = []
    for rows in BATCHES:
        scores = torch.randn(rows, 2048, device=CUDA, dtype=dtype)
        knobs = [torch.full((rows,), one, device=CUDA) for one in (7, 3, 1.0, 50, 0.8)]
        spent = _graph_time(functools.partial(device_sampler.sample, scores, *knobs), 20)
        figures.append(f"{rows}: {spent * 1e6:.1f}")
    return f"{different} of {drawn} tokens differ; µs of rows x 2048, top_k 50, top_p 0.8: " + ", ".join(figures)


def _attention(dtype: torch.dtype) -> str:
    from omni_bus.stages.ar import triton_contiguous

    generator = torch.Generator(CUDA).manual_seed(0)
    worst, figures = 0.0, []
    for heads, kv_heads, head_dim in ((16, 8, 128), (4, 2, 32), (4, 2, 24)):
        config = DecoderConfig(
            hidden=64,
            layers=1,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=DenseConfig(intermediate=64),
            max_positions=64,
        )
        for rows in (1, 3, 64):
            plain = ContiguousAttention(config, rows=rows, capacity=16, dtype=dtype, device=CUDA)
            keys, values = torch.zeros_like(plain.keys), torch.zeros_like(plain.values)
            plain.reset(rows)
            for count in (2, *[1] * 14):
                start = plain.extend(count)
                packed = torch.randn(
                    rows * count, heads + 2 * kv_heads, head_dim, dtype=dtype, device=CUDA, generator=generator
                )
                query, key, value = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
                expected = plain.attend(0, query.contiguous(), key.contiguous(), value.contiguous())
                call = functools.partial(
                    triton_contiguous.attend, query, key, value, keys[0], values[0], rows=rows, start=start
                )
                worst = max(worst, (call().float() - expected.float()).abs().max().item())
                assert worst <= TOLERANCE[dtype], f"{rows} rows, position {start}: differs by {worst:.2e}"
                assert torch.equal(plain.keys, keys) and torch.equal(plain.values, values), "the cache differs"
            if head_dim == 128:
                figures.append(f"{rows}: {_graph_time(call, 20) * 1e6:.1f}")
    return f"error {worst:.1e}; µs of the last position, rows: " + ", ".join(figures)


@torch.no_grad()
def _fused_scores(dtype: torch.dtype) -> str:
    """The code predictor's two forms on the same inputs, position by position: scores and caches."""
    program = _talker("full" if dtype == torch.bfloat16 else "tiny", str(dtype)[6:])
    predictor = program.code_predictor
    cache, width = predictor.cache, predictor.decoder.config.hidden
    generator = torch.Generator(CUDA).manual_seed(0)
    worst = 0.0
    for rows in (1, 2, 7, 16, 17, 32, 48, 64):
        pieces = [torch.randn(rows, count, width, dtype=dtype, device=CUDA, generator=generator) for count in (2, *[1] * 14)]
        scores, caches = [], []
        for fused in (False, True):
            predictor.fused = fused
            cache.reset(rows)
            scores.append([predictor._scores(piece, predictor.heads[0]).float() for piece in pieces])
            caches.append((cache.keys[:, :rows].float(), cache.values[:, :rows].float()))
        for at, (plain, kernel) in enumerate(zip(*scores, strict=True)):
            error = ((plain - kernel).norm() / plain.norm()).item()
            assert error <= SCORES[dtype], f"{rows} rows, piece {at}: scores differ by {error:.2e} of their norm"
            worst = max(worst, error)
        for plain, kernel in zip(*caches, strict=True):
            error = ((plain - kernel).norm() / plain.norm()).item()
            assert error <= SCORES[dtype], f"{rows} rows: the cache differs by {error:.2e} of its norm"
    return f"scores differ by up to {worst:.1e} of their norm"


def _codes(trace: Trace) -> list[list[int]]:
    frames = [output.tensors["codes"] for output in trace.chunks.get("talker->code2wav", []) if output.payload.count]
    return torch.cat(frames).cpu().tolist() if frames else []


def _text(trace: Trace) -> list[int]:
    return [token for payload in trace.payloads("thinker->talker") for token in payload.token_ids]


def _speech(sampled: bool) -> str:
    """The tiny checkpoint in float32. Greedy: equal to the CPU. Sampled: a request alone equal to the same in a batch."""
    from tests.support.qwen3_omni import CASES, options
    from tests.support.stage_pipeline import StagePipeline

    names = ("text", "history", "audio", "image", "image_audio")
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch) / "tiny"
        fixture.write(directory, "tiny", 2, lambda fraction, detail: None)
        spec = load_pipeline("qwen3_omni")
        card = StagePipeline(spec, str(directory), STAGES, device="cuda", dtype="float32", max_batch=8)
        other = card if sampled else StagePipeline(spec, str(directory), STAGES, device="cpu", dtype="float32", max_batch=8)
        request = options(seed=5, max_frames=24) if sampled else options()
        together = {}
        for index, name in enumerate(names):
            together[name] = card.submit(index, *CASES[name].chat(), options=request)
            for _ in range(index % 3):
                card.step()
        begin = time.perf_counter()
        card.run()
        spent = time.perf_counter() - begin
        frames = 0
        for index, name in enumerate(names):
            alone = other.submit(100 + index, *CASES[name].chat(), options=request)
            other.run()
            assert together[name].error is None and alone.error is None, (name, together[name].error, alone.error)
            assert _text(together[name]) == _text(alone), f"{name}: the text differs"
            ours, theirs = _codes(together[name]), _codes(alone)
            same = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
            assert ours == theirs, f"{name}: frame {same} of {len(theirs)} differs, {len(ours)} frames"
            frames += len(ours)
    return f"{len(names)} requests, {frames} frames equal; {spent * 1e3:.0f} ms together"


@functools.cache
def _talker(size: str, dtype: str) -> TalkerProgram:
    """With random weights made on the card: "full" is the real size."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="talker-"))
    fixture.write(directory, size, 0, lambda fraction, detail: None, weights=False, vocabulary="tiny")
    program = TalkerProgram()
    spec = load_pipeline("qwen3_omni")
    program.load(
        StageContext(
            stage="talker",
            pipeline=spec,
            model_path=str(directory),
            device="cuda",
            config=StageConfig(devices=("cuda",), dtype=dtype, max_batch=max(BATCHES), options={"load": "random"}),
            edges={},
            progress=lambda fraction, detail: None,
        )
    )
    program.graph_prepare(max(BATCHES))
    return program


def _step(rows: int) -> StepTensors:
    return StepTensors(
        slots=torch.arange(1, rows + 1, device=CUDA),
        positions=torch.full((3, rows), 9, device=CUDA),
        tokens=torch.full((rows,), 17, device=CUDA),
        seeds=torch.arange(rows, device=CUDA),
        draws=torch.full((rows,), 3, device=CUDA),
        top_k=torch.full((rows,), 50, device=CUDA),
        temperature=torch.full((rows,), 0.9, device=CUDA),
        top_p=torch.ones(rows, device=CUDA),
        penalty=torch.full((rows,), 1.05, device=CUDA),
        no_eos=torch.zeros(rows, dtype=torch.bool, device=CUDA),
    )


@torch.no_grad()
def _without_synchronisation() -> str:
    program = _talker("full", "bfloat16")
    hidden = torch.randn(4, program.decoder.config.hidden, dtype=torch.bfloat16, device=CUDA)
    step = _step(4)
    program.graph_output(hidden, step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        program.graph_embed(step)
        program.graph_output(hidden, step)
        program.prompts.first_speech(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "graph_embed, graph_output and the prompt's last row"


@torch.no_grad()
def _dependent_frame() -> str:
    """Frame after frame from other states and with other draws, without a pause: the same codes and the same sums of embeddings, bit
    for bit, whether kernels start early or not."""
    program = _talker("full", "bfloat16")
    program.code_predictor.fused = True
    width = program.decoder.config.hidden
    generator = torch.Generator(CUDA).manual_seed(1)
    distinct = []
    for rows, small in ((1, 0), (2, 0), (8, 0), (64, 0), (8, 8), (64, 64)):
        states = torch.randn(layers.REPLAYS, rows, width, dtype=torch.bfloat16, device=CUDA, generator=generator)
        results = []
        for on in (True, False):
            hidden, step = torch.empty_like(states[0]), _step(rows)
            step.temperature[1::3] = 0.0
            frame = torch.empty(rows, 16, dtype=torch.int64, device=CUDA)

            def forward(hidden: torch.Tensor = hidden, step: StepTensors = step, frame: torch.Tensor = frame) -> None:
                frame.copy_(program.graph_output(hidden, step)[0])

            before, ops.SMALL_ROWS = ops.SMALL_ROWS, range(1, small + 1)
            try:
                with layers.dependent_launches(on):
                    graph = layers.captured(forward)
            finally:
                ops.SMALL_ROWS = before
            frames = torch.empty(layers.REPLAYS, *frame.shape, dtype=torch.int64, device=CUDA)
            sums = torch.empty_like(states)
            program._slots.seen.zero_()
            for index in range(layers.REPLAYS):
                hidden.copy_(states[index])
                step.draws.add_(1)
                graph.replay()
                frames[index].copy_(frame)
                sums[index].copy_(program._slots.frame_sum[step.slots])
            torch.cuda.synchronize()
            results.append((frames, sums))
        (ours, our_sums), (plain, plain_sums) = results
        residual = ours[:, :, 1:]  # code 0 may be the end's
        assert int(residual.min()) >= 0 and int(residual.max()) < 2048, f"codes from {residual.min()} to {residual.max()}"
        assert not torch.equal(ours, plain.roll(1, 0)), "every frame is the same: nothing could differ"
        distinct.append(f"{rows}: {len(set(residual.flatten().tolist()))}")
        wrong = int((ours != plain).flatten(1).any(1).sum())
        assert not wrong, f"{rows} rows: {wrong} of {layers.REPLAYS} frames differ"
        assert torch.equal(our_sums, plain_sums), f"{rows} rows: the embeddings' sums differ"
    return f"{layers.REPLAYS} frames in a row each: equal; distinct codes of rows: " + ", ".join(distinct)


@torch.no_grad()
def _frame_time(fused: bool) -> str:
    """graph_output alone: code 0, fifteen residual codes, the sum of their embeddings; without the Talker's own decoder."""
    program = _talker("full", "bfloat16")
    program.code_predictor.fused = fused
    figures = []
    for rows in BATCHES:
        times = []
        hidden = torch.randn(rows, program.decoder.config.hidden, dtype=torch.bfloat16, device=CUDA)
        step = _step(rows)
        program._slots.seen.zero_()
        frame, _ = program.graph_output(hidden, step)
        assert frame.shape == (rows, 16) and int(frame.min()) >= 0 and int(frame.max()) < 2048
        program._slots.seen.zero_()
        again, _ = program.graph_output(hidden, step)
        assert torch.equal(frame, again), "the same draw gives another frame"
        for on in (True, False):
            with layers.dependent_launches(on):
                times.append(_graph_time(functools.partial(program.graph_output, hidden, step), 1) * 1e3)
        before, ops.SMALL_ROWS = ops.SMALL_ROWS, layers.NO_ROWS
        try:
            times.append(_graph_time(functools.partial(program.graph_output, hidden, step), 1) * 1e3)
        finally:
            ops.SMALL_ROWS = before
        figures.append(f"{rows}: {times[0]:.3f} ({times[1]:.3f}, {times[2]:.3f})")
    return "ms (with no kernel started early, without the small batches' kernel), rows: " + ", ".join(figures)
