"""The Thinker's encoders, part by part: on the card as on the CPU, kept parts as new ones, and the time of a part at the real size."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable, Iterator

import torch

from bench.gpu_checks.loading import directory
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.config import read_config
from omni_bus.stages.qwen3_omni.encoder_units import chunk_width
from omni_bus.stages.qwen3_omni.media_rows import Encoded
from omni_bus.stages.qwen3_omni.random_weights import RandomCheckpoint
from omni_bus.stages.qwen3_omni.thinker_encoders import ThinkerEncoders

CARD = torch.device("cuda:0")
TOLERANCE = 5e-3  # of the largest value: convolutions on the card round their factors to TF32
LENGTHS = ((33,), (100, 63), (800, 800, 417))
PATCH_VALUES = 3 * 2 * 16 * 16


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "tiny encoders as on the CPU", tiny
    for windows in (1, 5, 10):
        yield f"{windows} audio windows at the real size", functools.partial(timed_audio, windows)
    yield "a picture of a megapixel at the real size", timed_picture


def encoders(path: pathlib.Path, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> ThinkerEncoders:
    return ThinkerEncoders(read_config(str(path)).thinker, checkpoint, dtype=dtype, device=device)


def tiny() -> str:
    worst, parts = 0.0, 0
    with directory("tiny", weights=True) as path:
        host, card = (encoders(path, Checkpoint(path), torch.float32, device) for device in (torch.device("cpu"), CARD))
        generator = torch.Generator().manual_seed(0)
        for lengths in LENGTHS:
            windows = [torch.randn(128, length, generator=generator) for length in lengths]
            width = chunk_width(lengths)
            worst = max(worst, _compare(host.audio(windows, width), card.audio(windows, width)))
            worst = max(worst, _compare(card.audio(windows[:1], width), card.audio(windows, width)[:1]))
            parts += len(lengths)
        patches = [torch.randn(4 * 6, PATCH_VALUES, generator=generator) for _ in range(3)]
        worst = max(worst, _compare(host.vision(patches, [(1, 4, 6)] * 3), card.vision(patches, [(1, 4, 6)] * 3)))
    return f"{parts + 3} parts, off by {worst:.1e} of the largest value at most"


def _compare(one: list[Encoded], other: list[Encoded]) -> float:
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        for left, right in ((a.rows, b.rows), (a.deepstack, b.deepstack)):
            if left is not None and right is not None:
                off = float((left.cpu() - right.cpu()).abs().max() / left.abs().max())
                assert off < TOLERANCE, f"{tuple(left.shape)} off by {off:.1e}"
                worst = max(worst, off)
    return worst


def timed_audio(count: int) -> str:
    with directory("full", weights=False) as path:
        made = encoders(path, RandomCheckpoint(path), torch.bfloat16, CARD)
        windows = [torch.randn(128, 800) for _ in range(count)]
        queued, taken = _time(lambda: made.audio(windows, 100))
    size = made.audio(windows[:1], 100)[0].bytes
    return f"{taken:.1f} ms, {queued:.1f} ms of the host; a window is {size >> 10} KiB"


def timed_picture() -> str:
    with directory("full", weights=False) as path:
        made = encoders(path, RandomCheckpoint(path), torch.bfloat16, CARD)
        patches = [torch.randn(64 * 64, PATCH_VALUES)]
        queued, taken = _time(lambda: made.vision(patches, [(1, 64, 64)]))
    size = made.vision(patches, [(1, 64, 64)])[0].bytes
    return f"{taken:.1f} ms, {queued:.1f} ms of the host; it is {size >> 20} MiB"


def _time(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds until all is queued, and until it is done; medians of nine."""
    queued, done = [], []
    for turn in range(11):
        torch.cuda.synchronize(CARD)
        began = time.perf_counter()
        work()
        middle = time.perf_counter()
        torch.cuda.synchronize(CARD)
        if turn >= 2:
            queued.append((middle - began) * 1e3)
            done.append((time.perf_counter() - began) * 1e3)
    return sorted(queued)[4], sorted(done)[4]
