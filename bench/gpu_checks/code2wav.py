"""Code2Wav: each kernel against its plain form, streams in captured batches against one pass on the CPU, and the time of a step."""

from __future__ import annotations

import functools
import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import cast

import torch

from omni_bus.stages.qwen3_omni import code2wav_config, fixture, fixture_config
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.code2wav_config import Code2WavConfig
from omni_bus.stages.qwen3_omni.code2wav_fused import FusedCode2Wav
from omni_bus.stages.qwen3_omni.code2wav_graphs import GraphedDecoder
from omni_bus.stages.qwen3_omni.code2wav_layers import CausalConv, Rows, Snake
from omni_bus.stages.qwen3_omni.code2wav_model import Code2Wav, to_pcm16
from omni_bus.stages.qwen3_omni.code2wav_ops import FusedRows, Join, Ops, SnakeScale, TorchOps
from omni_bus.stages.qwen3_omni.code2wav_shapes import Shapes
from omni_bus.stages.qwen3_omni.code2wav_transformer import LayerScale
from omni_bus.stages.qwen3_omni.json_fields import Section

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # of the largest value
SLOTS, FRAMES = 7, 60
BY_KERNEL = ((8, 1), (2, 4), (32, 1), (8, 4), (4, 8), (32, 8))
TIMED = ((1, 1), (1, 2), (1, 4), (8, 1), (8, 4), (16, 4), (32, 2), (32, 8), (64, 1), (64, 4), (16, 12), (8, 25))


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    for dtype in TOLERANCE:
        for name, check in OPERATORS.items():
            yield f"{name} {str(dtype)[6:]}", functools.partial(_operator, check, dtype)
    for kernels in ("triton", "torch"):
        for frames in (1, 4, 12, None):
            yield f"samples in chunks of {frames or 'any size'}, {kernels}", functools.partial(_samples, kernels, frames)
        yield f"staggered streams by graphs, {kernels}", functools.partial(_staggered, kernels)
    yield "real size, bfloat16 against plain operators", _real_size
    yield "time of a step, triton", functools.partial(_times, "triton")
    yield "time of a step, torch", functools.partial(_times, "torch")
    yield "time of a step by kernel, triton", _times_by_kernel


def _ops(kernels: str) -> Ops:
    if kernels == "torch":
        return TorchOps()
    from omni_bus.stages.qwen3_omni.code2wav_triton import TritonOps

    return TritonOps()


# ---- kernels

Operator = Callable[[Ops, Callable[..., torch.Tensor], bool], list[torch.Tensor]]


def _operator(check: Operator, dtype: torch.dtype) -> str:
    worst = 0.0
    for fresh in (True, False):
        results = []
        for kernels in ("torch", "triton"):
            generator = torch.Generator(CUDA).manual_seed(0)
            make = functools.partial(_random, generator, dtype)
            results.append(check(_ops(kernels), make, fresh))
        torch.cuda.synchronize()
        for plain, fused in zip(*results, strict=True):
            assert plain.shape == fused.shape and plain.dtype == fused.dtype
            assert bool(fused.isfinite().all())
            wide, other = plain.double(), fused.double()
            worst = max(worst, float((wide - other).abs().max()) / max(1.0, float(wide.abs().max())))
    assert worst <= TOLERANCE[dtype], f"off by {worst:.1e} of the largest value"
    return f"max error {worst:.1e}"


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator, device=CUDA) * scale).to(dtype)


def _rows(fresh: bool, count: int = 3) -> FusedRows:
    slots = torch.tensor([2, 4, 1][:count], dtype=torch.int32, device=CUDA)
    positions = torch.tensor([0, 0, 0] if fresh else [3, 100, 4099], dtype=torch.int32, device=CUDA)[:count]
    return FusedRows(slots, slots * 2 + 1, positions, fresh)


def _snakes(make: Callable[..., torch.Tensor], channels: int) -> SnakeScale:
    return SnakeScale(make(channels, scale=0.3).float().exp(), make(channels, scale=0.3).float().exp())


def _join(ops: Ops, make: Callable[..., torch.Tensor], fresh: bool) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    hows = ((Join(), 6), (Join(taps=7, dilation=9), 54), (Join(head=not fresh, taps=2), 1), (Join(), 0))
    for channels in (96, 768):
        for how, past in hows:
            for snake in (None, _snakes(make, channels)):
                for residual in (None, make(3, 33, channels)):
                    kept = make(10, past, channels)
                    out += [*ops.join(make(3, 33, channels), kept, _rows(fresh), how, snake, residual)]
                    out += [kept] if past else []
    return out


def _conv(ops: Ops, make: Callable[..., torch.Tensor], fresh: bool) -> list[torch.Tensor]:
    out = []
    for channels in (96, 192, 8):
        for dilation in (1, 9):
            joined = make(3, 200 + 6 * dilation, channels)
            weight = make(7, channels, channels, scale=(7 * channels) ** -0.5)
            out.append(ops.conv(joined, weight, make(channels, scale=0.1), dilation, _snakes(make, channels)))
    return out


def _last_conv(ops: Ops, make: Callable[..., torch.Tensor], fresh: bool) -> list[torch.Tensor]:
    weight, bias, joined = make(7, 96, scale=0.02), make(1, scale=0.1), make(3, 5006, 96)
    samples = ops.last_conv(joined, weight, bias, False)
    pcm = ops.last_conv(joined, weight, bias, True)
    assert int((pcm.int() - to_pcm16(samples).int()).abs().max()) <= 1
    return [samples]


def _depthwise_norm(ops: Ops, make: Callable[..., torch.Tensor], fresh: bool) -> list[torch.Tensor]:
    joined, weight = make(3, 14, 1024), make(7, 1024, scale=0.4)
    return [ops.depthwise_norm(joined, weight, make(1024), make(1024), make(1024), 1e-6)]


def _add_norm(ops: Ops, make: Callable[..., torch.Tensor], fresh: bool) -> list[torch.Tensor]:
    x, y, scale, weight = make(3, 5, 1024), make(3, 5, 1024), make(1024), make(1024)
    return [*ops.add_norm(x, y, scale, weight, 1e-5), *ops.add_norm(x, None, None, weight, 1e-5)]


def _attention(ops: Ops, make: Callable[..., torch.Tensor], fresh: bool) -> list[torch.Tensor]:
    out = []
    for heads, kv_heads, head_dim, window in ((16, 16, 64, 72), (4, 2, 16, 8)):
        rates = 1.0 / 10_000 ** (torch.arange(0, head_dim, 2, device=CUDA).float() / head_dim)
        for steps in (1, 4, 25):
            ring = window - 1 + 25
            keys, values = make(5, ring, kv_heads, head_dim), make(5, ring, kv_heads, head_dim)
            queries = ops.rotate(make(3, steps, heads + 2 * kv_heads, head_dim), keys, values, _rows(fresh), rates)
            out += [queries, keys, values, ops.attend(queries, keys, values, _rows(fresh), window)]
    return out


def _swiglu(ops: Ops, make: Callable[..., torch.Tensor], fresh: bool) -> list[torch.Tensor]:
    return [ops.swiglu(make(3, 5, 6144))]


OPERATORS: dict[str, Operator] = {
    "join": _join,
    "conv": _conv,
    "last conv": _last_conv,
    "depthwise norm": _depthwise_norm,
    "add norm": _add_norm,
    "rotate and attend": _attention,
    "swiglu": _swiglu,
}


# ---- streams of a tiny model, float32


@functools.cache
def _directory() -> pathlib.Path:
    path = pathlib.Path(tempfile.mkdtemp(prefix="code2wav-check-"))
    fixture.write(path, "tiny", 5, lambda fraction, text: None)
    return path


def _parsed(fields: dict[str, object]) -> Code2WavConfig:
    return code2wav_config.parse(Section(fields).section("code2wav_config"))


def _tiny(dtype: torch.dtype, device: torch.device, slots: int) -> Code2Wav:
    config = _parsed(json.loads((_directory() / "config.json").read_text()))
    return Code2Wav.load(Checkpoint(_directory()), config, slots=slots, dtype=dtype, device=device)


@functools.cache
def _streams() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Seed → codes and the waveform of one pass on the CPU, in float32."""
    model = _tiny(torch.float32, CPU, 1)
    out = {}
    for seed in range(12):
        codes = torch.randint(0, 256, (FRAMES, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
        out[seed] = codes, model.decode(codes[None], Rows(torch.tensor([0]), torch.tensor([0]), True))[0]
    return out


def _samples(kernels: str, frames: int | None) -> str:
    model = FusedCode2Wav(_tiny(torch.float32, CUDA, 0), _ops(kernels), slots=SLOTS, max_frames=12)
    pick, worst = random.Random(0), 0.0
    codes, whole = _streams()[0]
    slots = torch.tensor([3], dtype=torch.int32, device=CUDA)
    pieces, position, turn = [], 0, 0
    while position < FRAMES:
        count = min(FRAMES - position, frames or pick.randint(1, 12))
        at = torch.tensor([position], dtype=torch.int32, device=CUDA)
        rows = FusedRows(slots, slots * 2 + turn, at, not position)
        pieces.append(model.decode(codes[None, position : position + count].int().to(CUDA), rows, pcm=False)[0].cpu())
        position, turn = position + count, 1 - turn
    worst = float((torch.cat(pieces) - whole).abs().max())
    assert worst <= 2e-5, f"samples differ by {worst:.1e}"
    return f"max error {worst:.1e}, largest sample {float(whole.abs().max()):.2f}"


def _staggered(kernels: str) -> str:
    """Streams come and go, in batches of many sizes, each by a captured graph."""
    shapes = Shapes.captured(max_batch=SLOTS, first_frames=2, max_frames=12)
    model = FusedCode2Wav(_tiny(torch.float32, CUDA, 0), _ops(kernels), slots=SLOTS, max_frames=12)
    decoder = GraphedDecoder(model, shapes, slots=SLOTS, device=CUDA)
    decoder.prepare(lambda fraction, text: None)
    streams, pick = _streams(), random.Random(1)
    waiting, slot_of, done = list(streams), dict[int, int](), dict.fromkeys(streams, 0)
    heard: dict[int, list[torch.Tensor]] = {seed: [] for seed in streams}
    steps = 0
    while waiting or slot_of:
        free = [slot for slot in range(SLOTS) if slot not in slot_of.values()]
        fresh = bool(waiting and free) and (not slot_of or pick.random() < 0.5)
        if fresh:
            batch = [waiting.pop(0) for _ in range(min(len(waiting), len(free), pick.randint(1, 3)))]
            slot_of.update(zip(batch, free, strict=False))
            count = pick.randint(1, 2)
        else:
            batch = pick.sample(sorted(slot_of), pick.randint(1, len(slot_of)))
            left = min(FRAMES - done[seed] for seed in batch)
            count = pick.choice([size for size in shapes.frames if size <= left])
        codes = torch.stack([streams[seed][0][done[seed] : done[seed] + count] for seed in batch])
        pcm = decoder.decode(codes, [slot_of[seed] for seed in batch], [done[seed] for seed in batch], fresh=fresh)
        steps += 1
        for seed, samples in zip(batch, pcm, strict=True):
            heard[seed].append(samples)
            done[seed] += count
            if done[seed] == FRAMES:
                del slot_of[seed]
        if not fresh and slot_of and free and pick.random() < 0.2:  # a stream moves to another slot
            seed = pick.choice(sorted(slot_of))
            saved = decoder.state_of(slot_of[seed])
            slot_of[seed] = next(slot for slot in range(SLOTS) if slot not in slot_of.values())
            decoder.restore(slot_of[seed], saved)
    worst = max(int((torch.cat(heard[seed]).int() - to_pcm16(whole).int()).abs().max()) for seed, (_, whole) in streams.items())
    assert worst <= 1, f"PCM16 differs by {worst}"
    return f"{len(streams)} streams in {steps} steps: PCM16 within {worst}"


# ---- real size


def _full(dtype: torch.dtype) -> Code2Wav:
    """Random weights at the real size, made on the card: scales that keep the signal alive from the codes to the samples."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Code2Wav(_parsed(fixture_config.full(lambda token: 1)))
    model = model.to_empty(device=CUDA).to(dtype)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                fan_in = parameter.numel() // parameter.shape[0]
                if isinstance(module, torch.nn.ConvTranspose1d):
                    fan_in = parameter.shape[0] * parameter.shape[2] // module.stride[0]
                torch.nn.init.normal_(parameter, std=1.0 if isinstance(module, torch.nn.Embedding) else fan_in**-0.5)
            elif isinstance(module, Snake | LayerScale) or name == "bias":
                torch.nn.init.normal_(parameter, std=0.1)
            else:
                torch.nn.init.ones_(parameter)
    last = cast(CausalConv, model.decoder[-1]).conv.weight
    torch.nn.init.normal_(last, std=1e-4)
    probe = FusedCode2Wav(model, TorchOps(), slots=1, max_frames=12)
    codes = torch.randint(0, model.config.codebook_size, (1, 12, 16), device=CUDA, dtype=torch.int32)
    slots = torch.tensor([1], dtype=torch.int32, device=CUDA)
    samples = probe.decode(codes, FusedRows(slots, slots * 2, slots * 0, True), pcm=False)
    torch.nn.init.normal_(last, std=1e-4 * 0.15 / float((samples - samples.mean()).std()))
    return model.eval()


def _real_size() -> str:
    """Both forms in bfloat16 against the plain one in float32: the kernels must be no further away."""
    wide = _full(torch.float32)
    codes = torch.randint(0, 2048, (2, 60, 16), device=CUDA, dtype=torch.int32)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=CUDA)

    def streamed(model: FusedCode2Wav) -> torch.Tensor:
        out, position, turn = [], 0, 0
        for count in (1, 2, 1, 4, 8, 12, 12, 12, 8):
            rows = FusedRows(slots, slots * 2 + turn, torch.full_like(slots, position), not position)
            out.append(model.decode(codes[:, position : position + count], rows, pcm=False).float())
            position, turn = position + count, 1 - turn
        return torch.cat(out, 1)

    exact = streamed(FusedCode2Wav(wide, TorchOps(), slots=2, max_frames=12))
    assert float(exact.std()) > 1e-3 and bool(exact.isfinite().all())
    same = streamed(FusedCode2Wav(wide, _ops("triton"), slots=2, max_frames=12))
    narrow = wide.to(torch.bfloat16)
    off = {}
    for kernels in ("torch", "triton"):
        found = streamed(FusedCode2Wav(narrow, _ops(kernels), slots=2, max_frames=12))
        off[kernels] = float((found - exact).std() / exact.std())
    rounding = float((same - exact).abs().max())
    assert rounding <= 1e-4, f"in float32 the kernels differ by {rounding:.1e}"
    assert off["triton"] <= 1.2 * off["torch"] + 1e-3, (
        f"error of the kernels {off['triton']:.3f}, of plain operators {off['torch']:.3f}"
    )
    return f"bf16 error {off['triton']:.4f} of the signal (plain {off['torch']:.4f}); float32 {rounding:.1e}; std {float(exact.std()):.2f}"


def _times(kernels: str) -> str:
    """Step times as a stage sees them: codes on the host to samples on the host. Full size, bfloat16."""
    most = 64
    model = FusedCode2Wav(_full(torch.bfloat16), _ops(kernels), slots=most, max_frames=25)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    shapes = Shapes.captured(max_batch=most, first_frames=1, max_frames=25)
    decoder = GraphedDecoder(model, shapes, slots=most, device=CUDA)
    began = time.perf_counter()
    decoder.prepare(lambda fraction, text: None)
    captured = time.perf_counter() - began
    lines = [
        f"captured {len(decoder._steps)} steps in {captured:.1f} s, {(torch.cuda.memory_reserved() - before) / 1e6:.0f} MB"
    ]
    for rows, frames, fresh in ((1, 1, True), (16, 1, True), *((rows, frames, False) for rows, frames in TIMED)):
        codes = torch.randint(0, 2048, (rows, frames, 16), dtype=torch.int16)
        taken = []
        for turn in range(25):
            began = time.perf_counter()
            decoder.decode(codes, list(range(rows)), [0 if fresh else 100 + turn * frames] * rows, fresh=fresh)
            taken.append(time.perf_counter() - began)
        median = statistics.median(taken[5:])
        name = f"{rows}x{frames}{' fresh' if fresh else ''}"
        lines.append(f"{name}: {median * 1e3:.2f} ms, {rows * frames * 0.08 / median:.0f} audio-s/s")
    print("\n".join(lines), flush=True)
    return "; ".join(lines)


def _times_by_kernel() -> str:
    """What the device spends a step on, kernel by kernel, at 8, 32 and 256 frames: more frames must not cost more a frame."""
    most = 64
    model = FusedCode2Wav(_full(torch.bfloat16), _ops("triton"), slots=most, max_frames=25)
    shapes = Shapes.captured(max_batch=most, first_frames=1, max_frames=25)
    decoder = GraphedDecoder(model, shapes, slots=most, device=CUDA, capture=False)
    lines, turns = [], 5
    for rows, frames in BY_KERNEL:
        step = decoder._step(rows, frames, False)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(turns):
                step()
            torch.cuda.synchronize()
        spent = sorted((event.self_device_time_total / turns, event.count / turns, event.key) for event in seen.key_averages())
        total = sum(us for us, _, _ in spent)
        assert total > 0, "the profiler saw no kernel"
        lines.append(f"{rows}x{frames}: {total / 1e3:.2f} ms, {total / (rows * frames):.0f} us a frame")
        print(lines[-1])
        for us, count, name in reversed(spent[-12:]):
            print(f"    {us:>8.1f} us in {count:.0f}: {name[:110]}")
    return "; ".join(lines)
