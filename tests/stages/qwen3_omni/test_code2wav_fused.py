"""The fused form of Code2Wav, uncaptured and by plain operators, equals transformers' one pass as the model does; the sizes it is
captured for; and the stage on top of it."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_bus.stages.qwen3_omni import code2wav_config, code2wav_fused, fixture
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.code2wav_decoder import ModelDecoder
from omni_bus.stages.qwen3_omni.code2wav_fused import FusedCode2Wav
from omni_bus.stages.qwen3_omni.code2wav_graphs import GraphedDecoder
from omni_bus.stages.qwen3_omni.code2wav_model import PREFIX, Code2Wav, to_pcm16
from omni_bus.stages.qwen3_omni.code2wav_ops import FusedRows, TorchOps
from omni_bus.stages.qwen3_omni.code2wav_shapes import Shapes
from omni_bus.stages.qwen3_omni.json_fields import Section

CPU = torch.device("cpu")
SLOTS, MAX_FRAMES = 5, 12


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("fused")
    fixture.write(path, "tiny", 3, lambda fraction, text: None)
    return path


def load(directory: pathlib.Path, dtype: torch.dtype, slots: int = 0) -> Code2Wav:
    config = code2wav_config.parse(Section(json.loads((directory / "config.json").read_text())).section("code2wav_config"))
    return Code2Wav.load(Checkpoint(directory), config, slots=slots, dtype=dtype, device=CPU)


def fuse(directory: pathlib.Path, dtype: torch.dtype) -> FusedCode2Wav:
    """With NaN in every state: a fresh stream must not read what its slot held."""
    model = FusedCode2Wav(load(directory, dtype), TorchOps(), slots=SLOTS, max_frames=MAX_FRAMES)
    for state in (*model._state, *model._rings):
        state.fill_(torch.nan)
    return model


def graphed(directory: pathlib.Path, dtype: torch.dtype) -> GraphedDecoder:
    shapes = Shapes.captured(max_batch=SLOTS, first_frames=1, max_frames=MAX_FRAMES)
    decoder = GraphedDecoder(fuse(directory, dtype), shapes, slots=SLOTS, device=CPU)
    decoder.prepare(lambda fraction, text: None)
    return decoder


def one_pass(directory: pathlib.Path, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    model = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeConfig.from_pretrained(directory).code2wav_config).eval()
    model.load_state_dict(Checkpoint(directory).tensors(PREFIX), strict=True)
    with torch.no_grad():
        waveform: torch.Tensor = model.to(dtype)(codes.T[None].long())[0, 0]
    return waveform


def random_codes(frames: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (frames, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)


def pieces_of(total: int, size: int | None) -> Iterator[int]:
    pick = random.Random(0)
    while total:
        count = min(total, size or pick.randint(1, MAX_FRAMES))
        yield count
        total -= count


@pytest.mark.parametrize(("size", "wide"), [(1, 16), (4, 16), (None, 16), (None, code2wav_fused.WIDE), (None, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_fused_form_gives_the_one_pass_waveform(
    directory: pathlib.Path, dtype: torch.dtype, size: int | None, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code2wav_fused, "WIDE", wide)
    model, codes, slot = fuse(directory, dtype), random_codes(90, 7), torch.tensor([2], dtype=torch.int32)
    out, position = [], 0
    for index, count in enumerate(pieces_of(len(codes), size)):
        at = torch.tensor([position], dtype=torch.int32)
        rows = FusedRows(slot, 2 * slot + index % 2, at, not position)
        out.append(model.decode(codes[None, position : position + count].int(), rows, pcm=False)[0])
        position += count
    streamed, whole = torch.cat(out), one_pass(directory, codes, dtype)
    assert streamed.dtype == dtype and float(whole.std()) > 0.05
    torch.testing.assert_close(streamed, whole, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-5)
    others = [row for row in range(2 * SLOTS + 2) if row // 2 != 2]
    assert all(bool(state[others].isnan().all()) for state in model._state), "another slot's state was touched"


def test_staggered_streams_in_filled_up_batches_are_themselves_alone(directory: pathlib.Path) -> None:
    """Batches of three run in four rows; streams come and go, and a slot is taken by another stream."""
    decoder = graphed(directory, torch.float64)
    plain = ModelDecoder(load(directory, torch.float64, slots=SLOTS), decoder.shapes, CPU)
    streams = {seed: random_codes(30, seed) for seed in range(1, 8)}
    heard: dict[int, list[torch.Tensor]] = {seed: [] for seed in streams}
    done = dict.fromkeys(streams, 0)
    slot_of: dict[int, int] = {}
    waiting, pick = list(streams), random.Random(5)
    batches = set()
    while waiting or slot_of:
        fresh = bool(waiting) and len(slot_of) < SLOTS and (not slot_of or pick.random() < 0.5)
        if fresh:
            free = [slot for slot in range(SLOTS) if slot not in slot_of.values()]
            new = [waiting.pop(0) for _ in range(min(len(waiting), len(free), pick.randint(1, 3)))]
            slot_of.update(zip(new, free, strict=False))
            batch, count = new, 1
        else:
            batch = pick.sample(sorted(slot_of), pick.randint(1, len(slot_of)))
            left = min(len(streams[seed]) - done[seed] for seed in batch)
            count = pick.choice([size for size in decoder.shapes.frames if size <= left])
        batches.add(len(batch))
        codes = torch.stack([streams[seed][done[seed] : done[seed] + count] for seed in batch])
        slots, positions = [slot_of[seed] for seed in batch], [done[seed] for seed in batch]
        pcm = decoder.decode(codes, slots, positions, fresh=fresh)
        assert torch.equal(pcm, plain.decode(codes, slots, positions, fresh=fresh))
        for seed, samples in zip(batch, pcm, strict=True):
            heard[seed].append(samples)
            done[seed] += count
            if done[seed] == len(streams[seed]):
                del slot_of[seed]
    assert batches >= {1, 2, 3}
    for seed, codes in streams.items():
        assert torch.equal(torch.cat(heard[seed]), to_pcm16(one_pass(directory, codes, torch.float64))), seed


def test_a_saved_state_goes_on_in_another_slot(directory: pathlib.Path) -> None:
    decoder, codes = graphed(directory, torch.float64), random_codes(14, 4)
    first = decoder.decode(codes[None, :1], [0], [0], fresh=True)
    second = decoder.decode(codes[None, 1:2], [0], [1], fresh=False)
    saved = decoder.state_of(0)
    decoder.decode(random_codes(1, 9)[None], [3], [0], fresh=True)  # slot 3 stands at its other half
    decoder.restore(3, saved)
    rest = decoder.decode(codes[None, 2:], [3], [2], fresh=False)
    whole = to_pcm16(one_pass(directory, codes, torch.float64))
    assert torch.equal(torch.cat((first, second, rest), 1)[0], whole)


def test_samples_that_were_handed_out_stay(directory: pathlib.Path) -> None:
    decoder = graphed(directory, torch.float64)
    one = decoder.decode(random_codes(1, 1)[None], [0], [0], fresh=True)
    before = one.clone()
    decoder.decode(random_codes(1, 2)[None], [1], [0], fresh=True)
    assert torch.equal(one, before)


@pytest.mark.parametrize(("max_batch", "first", "most"), list(itertools.product((1, 5, 32, 64, 200), (1, 2, 3), (3, 25, 40))))
def test_every_batch_there_may_be_has_a_captured_size(max_batch: int, first: int, most: int) -> None:
    shapes = Shapes.captured(max_batch=max_batch, first_frames=first, max_frames=most)
    steps = set(shapes.all())
    assert len(steps) < 80
    assert shapes.frames[0] == 1 and shapes.frames[-1] == most and first in shapes.frames
    for frames in shapes.frames:
        assert shapes.max_rows(frames) * frames <= shapes.step_frames or shapes.max_rows(frames) == 1
        for count in range(1, shapes.max_rows(frames) + 1):
            rows = shapes.rows_for(count)
            assert count <= rows < 2 * count + 16
            assert (rows, frames, False) in steps
            assert frames > first or (rows, frames, True) in steps


def test_any_size_holds_all() -> None:
    shapes = Shapes.any_size(max_batch=6, first_frames=2, max_frames=9)
    assert shapes.frames == tuple(range(1, 10)) and shapes.max_rows(9) == 6 and shapes.rows_for(5) == 5


def test_a_slots_state_has_the_size_that_the_memory_plan_counts(directory: pathlib.Path) -> None:
    model = fuse(directory, torch.float32)
    values = sum(state.numel() for state in (*model._state, *model._rings))
    assert values == (SLOTS + 1) * code2wav_config.slot_values(model.config, MAX_FRAMES)
