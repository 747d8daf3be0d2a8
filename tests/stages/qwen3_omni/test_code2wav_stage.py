"""The Code2Wav stage: chunk sizes that follow the playback lead, batches, slots, ends, cancels — with a clock that the test moves."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_bus.deployment import EdgeConfig, StageConfig
from omni_bus.errors import OmniBusError, ProtocolViolation, StageFailed
from omni_bus.events import RequestOptions
from omni_bus.payloads import AudioDelta
from omni_bus.sampling import SamplingParams
from omni_bus.stages.contract import Chunk, Consumed, Finished, Output, StageContext, StageError, StageRequest
from omni_bus.stages.qwen3_omni import fixture
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.code2wav import IN_EDGE, OUT_EDGE, Code2WavStage
from omni_bus.stages.qwen3_omni.code2wav_model import to_pcm16
from omni_bus.stages.qwen3_omni.code2wav_shapes import Shapes
from omni_bus.stages.qwen3_omni.code2wav_streams import ChunkRule, Stream
from omni_bus.stages.qwen3_omni.payloads import CodecFrames
from omni_bus.stages.qwen3_omni.spec import PIPELINE


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A stage, the clock it reads, and what it emitted for each request."""

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        dtype: str = "float64",
        slots: int = 4,
        credits: int = 64,
        graphs: str = "auto",
        **edge: int,
    ) -> None:
        self.clock = Clock()
        self.stage = Code2WavStage(self.clock)
        self.progress: list[float] = []
        self.audio: dict[int, list[torch.Tensor]] = {}
        self.closed: set[int] = set()
        self.consumed: dict[int, int] = {}
        self.usage: dict[int, Any] = {}
        self.told: dict[int, int] = {}  # frames, in the deltas themselves
        self.failed: dict[int, str] = {}
        self.stage.load(
            StageContext(
                stage="code2wav",
                pipeline=PIPELINE,
                model_path=str(directory),
                device="cpu",
                config=StageConfig(devices=("cpu",), dtype=dtype, max_batch=slots, options={"graphs": graphs}),
                edges={IN_EDGE: EdgeConfig(credits=credits, options=dict(edge)), OUT_EDGE: EdgeConfig(credits=16)},
                progress=lambda fraction, text: self.progress.append(fraction),
            )
        )

    def open(self, *ids: int) -> None:
        for request_id in ids:
            self.stage.open(
                StageRequest(
                    id=request_id,
                    options=RequestOptions(modalities=("text", "audio")),
                    sampling=SamplingParams(),
                    inputs=(IN_EDGE,),
                    outputs=(OUT_EDGE,),
                    deadline=1e9,
                )
            )

    def feed(self, request_id: int, codes: torch.Tensor, *, last: bool = False) -> None:
        tensors = {"codes": codes} if codes.shape[0] else {}
        self.stage.feed(request_id, Chunk(IN_EDGE, CodecFrames(codes.shape[0]), tensors, last))

    def step(self) -> dict[int, int]:
        """Runs one step; frames decoded by request."""
        decoded: dict[int, int] = {}
        for emission in self.stage.step():
            request_id = emission.request_id
            assert request_id not in self.usage and request_id not in self.failed, "emitted after its end"
            match emission:
                case Output(edge=edge, payload=payload, tensors=tensors, last=last):
                    assert edge == OUT_EDGE and request_id not in self.closed
                    assert isinstance(payload, AudioDelta) and payload.sample_rate == 24_000
                    assert bool(payload.frames) == bool(tensors)
                    self.told[request_id] = self.told.get(request_id, 0) + payload.frames
                    if tensors:
                        pcm = tensors["pcm"]
                        assert pcm.dtype == torch.int16 and pcm.ndim == 1 and pcm.numel()
                        fresh = request_id not in self.audio
                        self.audio.setdefault(request_id, []).append(pcm)
                        decoded[request_id] = (pcm.numel() + (555 if fresh else 0)) // 1920
                    else:
                        assert last, "an empty delta that closes nothing"
                    if last:
                        self.closed.add(request_id)
                case Consumed(edge=edge, count=count):
                    assert edge == IN_EDGE and count > 0
                    self.consumed[request_id] = self.consumed.get(request_id, 0) + count
                case Finished(usage=usage):
                    assert request_id in self.closed
                    self.usage[request_id] = usage
                case StageError(error=error):
                    self.failed[request_id] = error.code
        return decoded

    def run(self) -> list[dict[int, int]]:
        steps = []
        while self.stage.has_work():
            steps.append(self.step())
        return steps

    def pcm(self, request_id: int) -> torch.Tensor:
        return torch.cat(self.audio[request_id])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("stage")
    fixture.write(path, "tiny", 0, lambda fraction, text: None)
    return path


@pytest.fixture(scope="module")
def expected(directory: pathlib.Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """PCM16 of transformers' one-pass decode in float64."""
    model = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeConfig.from_pretrained(directory).code2wav_config).eval()
    model.load_state_dict(Checkpoint(directory).tensors("code2wav."), strict=True)
    model = model.double()

    def decode(codes: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return to_pcm16(model(codes.T[None].long())[0, 0])

    return decode


def frames(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)


def test_one_stream_is_the_one_pass_waveform(directory: pathlib.Path, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    bench = Bench(directory)
    assert bench.progress[0] == 0.0 and bench.progress[-1] == 1.0
    codes = frames(60)
    bench.open(1)
    for index in range(60):
        bench.feed(1, codes[index : index + 1], last=index == 59)
        bench.run()
        bench.clock.now += 0.03
    assert torch.equal(bench.pcm(1), expected(codes))
    assert bench.closed == {1} and bench.consumed == {1: 60}
    assert bench.usage == {1: {"frames": 60, "samples": 60 * 1920 - 555}} and bench.told == {1: 60}
    assert bench.stage.stats().slots_used == 0 and not bench.stage.has_work()


def test_the_first_frame_goes_out_at_once_and_chunks_grow_with_the_lead(directory: pathlib.Path) -> None:
    bench = Bench(directory)
    bench.open(1)
    sizes = []
    for index in range(300):  # frames come ten times as fast as they are played
        bench.feed(1, frames(1, index))
        sizes += [step[1] for step in bench.run()]
        bench.clock.now += 0.008
    assert sizes[:3] == [1, 1, 1]
    assert max(sizes) == 25 and sizes == sorted(sizes), sizes
    assert len(sizes) < 40


def test_a_small_lead_never_waits(directory: pathlib.Path) -> None:
    bench = Bench(directory)
    bench.open(1)
    for index in range(40):  # frames come exactly as fast as they are played
        bench.feed(1, frames(1, index))
        assert bench.run() == [{1: 1}]
        bench.clock.now += 0.08


def test_waiting_ends_as_the_lead_melts(directory: pathlib.Path) -> None:
    bench = Bench(directory)
    bench.open(1)
    bench.feed(1, frames(50))
    bench.run()
    bench.feed(1, frames(3))
    assert not bench.stage.has_work()  # 4 s of lead: worth waiting for more
    wake = bench.stage.wake_at()
    assert wake is not None and wake > bench.clock.now
    bench.clock.now = wake - 0.01
    assert not bench.stage.has_work()
    bench.clock.now = wake + 0.001
    assert bench.stage.has_work()
    assert bench.step() == {1: 3}
    assert bench.stage.wake_at() is None, "nothing waits"


def test_the_last_chunk_flushes_what_waits(directory: pathlib.Path, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    bench = Bench(directory)
    codes = frames(53)
    bench.open(1)
    bench.feed(1, codes[:50])
    bench.run()
    bench.feed(1, codes[50:52])
    assert not bench.stage.has_work()
    bench.feed(1, codes[52:], last=True)
    assert bench.run() == [{1: 3}]
    assert bench.closed == {1} and torch.equal(bench.pcm(1), expected(codes))


def test_an_end_that_comes_after_the_last_frame_closes_with_an_empty_delta(directory: pathlib.Path) -> None:
    bench = Bench(directory)
    bench.open(1)
    bench.feed(1, frames(2))
    bench.run()
    assert bench.closed == set()
    bench.feed(1, frames(0), last=True)
    assert bench.stage.has_work() and bench.step() == {}
    assert bench.closed == {1} and bench.usage[1] == {"frames": 2, "samples": 2 * 1920 - 555} and bench.consumed == {1: 2}


def test_a_stream_without_frames_ends_empty(directory: pathlib.Path) -> None:
    bench = Bench(directory, slots=1)
    bench.open(1, 2)
    bench.feed(1, frames(5))
    bench.run()
    bench.feed(2, frames(0), last=True)
    bench.run()  # needs no slot: the only one is taken
    assert 2 in bench.closed and bench.usage[2] == {"frames": 0, "samples": 0} and bench.consumed[2] == 1
    assert 2 not in bench.audio


def test_a_backlog_goes_out_in_growing_chunks(directory: pathlib.Path) -> None:
    bench = Bench(directory, max_chunk_frames=16)
    bench.open(1)
    bench.feed(1, frames(60), last=True)
    assert [step[1] for step in bench.run()] == [1, 2, 4, 8, 16, 16, 13]


@pytest.mark.parametrize("first", [1, 3])
def test_the_first_chunk_has_the_configured_size(directory: pathlib.Path, first: int) -> None:
    bench = Bench(directory, first_chunk_frames=first)
    bench.open(1)
    for _ in range(first - 1):
        bench.feed(1, frames(1))
        assert not bench.stage.has_work()
    bench.feed(1, frames(4))
    assert bench.step() == {1: first}


def test_waiting_never_uses_up_the_producers_credit(directory: pathlib.Path) -> None:
    bench = Bench(directory, credits=4, first_chunk_frames=10)
    bench.open(1)
    held = 0
    for index in range(200):
        bench.feed(1, frames(1, index))
        held = max(held, index + 1 - bench.consumed.get(1, 0))
        bench.run()
    assert held <= 2
    assert bench.consumed[1] >= 199


@pytest.mark.parametrize("graphs", ["auto", "plain"])
def test_streams_that_run_together_equal_themselves_alone(
    directory: pathlib.Path, expected: Callable[[torch.Tensor], torch.Tensor], graphs: str
) -> None:
    bench = Bench(directory, slots=3, graphs=graphs)
    codes = {index: frames(20 + 7 * index, index) for index in range(6)}  # more streams than slots
    fed = dict.fromkeys(codes, 0)
    batches = set()
    tick = 0
    while len(bench.usage) < len(codes):
        if tick % 3 == 0 and tick // 3 < len(codes):
            bench.open(tick // 3)
        for index, stream in codes.items():
            if index <= tick // 3 and fed[index] < len(stream):
                count = 1 + (index + tick) % 3
                fed[index] += count
                bench.feed(index, stream[fed[index] - count : fed[index]], last=fed[index] >= len(stream))
        if bench.stage.has_work():
            batches.add(len(bench.step()))
            assert bench.stage.stats().slots_used <= 3
        bench.clock.now += 0.02
        tick += 1
        assert tick < 1000
    assert batches >= {1, 2, 3}
    for index, stream in codes.items():
        assert torch.equal(bench.pcm(index), expected(stream)), index
    assert bench.stage.stats().slots_used == 0


def test_the_smallest_lead_goes_first(directory: pathlib.Path) -> None:
    bench = Bench(directory, slots=4)
    bench.open(1, 2)
    bench.feed(1, frames(30))
    bench.run()
    bench.clock.now += 0.5
    bench.feed(2, frames(1))
    bench.run()
    bench.feed(1, frames(25, 1))  # 1 has about 1.9 s of lead, 2 hardly any
    bench.feed(2, frames(1, 1))
    assert bench.step() == {2: 1}
    bench.open(3)
    bench.feed(3, frames(1, 2))  # nothing emitted yet: its first audio comes before the others' next
    assert bench.step() == {3: 1}


def test_streams_without_a_slot_wait_for_one(directory: pathlib.Path, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    bench = Bench(directory, slots=1)
    codes = frames(4, 5)
    bench.open(1, 2)
    bench.feed(1, frames(1))
    bench.run()
    bench.feed(2, codes, last=True)
    assert not bench.stage.has_work()
    stats = bench.stage.stats()
    assert (stats.running, stats.waiting, stats.slots_used, stats.slots_total) == (1, 1, 1, 1)
    bench.feed(1, frames(1, 1), last=True)
    bench.run()
    assert bench.usage.keys() == {1, 2} and torch.equal(bench.pcm(2), expected(codes))


def test_a_cancelled_streams_slot_starts_clean(
    directory: pathlib.Path, expected: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    bench = Bench(directory, slots=1)
    bench.open(1)
    bench.feed(1, frames(30))
    bench.run()
    bench.stage.cancel(1)
    assert bench.stage.stats().slots_used == 0 and not bench.stage.has_work()
    bench.stage.cancel(1)  # unknown by now
    bench.feed(1, frames(1))  # on its way when the cancel came
    codes = frames(12, 9)
    bench.open(2)
    bench.feed(2, codes, last=True)
    bench.run()
    assert torch.equal(bench.pcm(2), expected(codes)) and bench.stage.stats().slots_used == 0


@pytest.mark.parametrize("graphs", ["auto", "plain"])
def test_a_paused_stream_leaves_the_batch_and_lends_its_slot(
    directory: pathlib.Path, expected: Callable[[torch.Tensor], torch.Tensor], graphs: str
) -> None:
    bench = Bench(directory, slots=1, graphs=graphs)
    slow, quick = frames(20, 1), frames(10, 2)
    bench.open(1, 2)
    bench.feed(1, slow[:5])
    bench.run()
    bench.stage.pause(1)
    bench.feed(1, slow[5:], last=True)
    assert not bench.stage.has_work()
    bench.feed(2, quick, last=True)
    bench.run()
    assert bench.usage.keys() == {2} and torch.equal(bench.pcm(2), expected(quick))
    bench.stage.resume(1)
    bench.run()
    assert torch.equal(bench.pcm(1), expected(slow)) and bench.stage.stats().slots_used == 0


def test_a_paused_end_waits_for_its_consumer(directory: pathlib.Path) -> None:
    bench = Bench(directory)
    bench.open(1)
    bench.stage.pause(1)
    bench.feed(1, frames(0), last=True)
    assert not bench.stage.has_work() and bench.step() == {}
    bench.stage.resume(1)
    bench.run()
    assert bench.closed == {1}


BAD_CHUNKS: list[tuple[CodecFrames, dict[str, torch.Tensor], type[OmniBusError]]] = [
    (CodecFrames(2), {}, ProtocolViolation),
    (CodecFrames(0), {}, ProtocolViolation),  # empty, and not the last
    (CodecFrames(2), {"codes": frames(3)}, ProtocolViolation),
    (CodecFrames(2), {"codes": frames(2)[:, :15]}, ProtocolViolation),
    (CodecFrames(1), {"codes": torch.full((1, 16), 256, dtype=torch.int16)}, StageFailed),
    (CodecFrames(1), {"codes": torch.full((1, 16), -1, dtype=torch.int16)}, StageFailed),
]


@pytest.mark.parametrize("case", range(len(BAD_CHUNKS)))
def test_a_bad_chunk_fails_its_own_request_only(
    directory: pathlib.Path, expected: Callable[[torch.Tensor], torch.Tensor], case: int
) -> None:
    payload, tensors, error = BAD_CHUNKS[case]
    bench = Bench(directory)
    bench.open(1, 2)
    codes = frames(6)
    bench.feed(1, frames(2))
    bench.feed(2, codes[:3])
    bench.run()
    with pytest.raises(error):
        bench.stage.feed(1, Chunk(IN_EDGE, payload, tensors, False))
    assert bench.stage.stats().slots_used == 1
    bench.feed(2, codes[3:], last=True)
    bench.run()
    assert torch.equal(bench.pcm(2), expected(codes)) and bench.stage.stats().slots_used == 0


def test_a_failed_step_fails_its_rows_only(
    directory: pathlib.Path, expected: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(directory)
    codes = frames(6)
    bench.open(1)
    bench.feed(1, codes[:3])
    bench.run()
    bench.open(2)
    bench.feed(2, frames(2))

    def out_of_memory(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(bench.stage._decoder, "decode", out_of_memory)
        bench.step()
    assert bench.failed == {2: "out_of_memory"} and bench.stage.stats().slots_used == 1
    bench.feed(1, codes[3:], last=True)
    bench.run()
    assert torch.equal(bench.pcm(1), expected(codes))


def test_a_lost_device_is_no_failure_of_some_rows(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(directory)
    bench.open(1)
    bench.feed(1, frames(2))

    def lost(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench.stage._decoder, "decode", lost)
    with pytest.raises(torch.AcceleratorError):
        bench.step()


def test_float32_stays_within_one_step_of_pcm16(
    directory: pathlib.Path, expected: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    bench = Bench(directory, dtype="float32")
    codes = frames(30, 3)
    bench.open(1)
    bench.feed(1, codes, last=True)
    bench.run()
    assert int((bench.pcm(1).int() - expected(codes).int()).abs().max()) <= 1


@pytest.mark.parametrize(
    ("lead", "wanted"), [(-3.0, 1), (0.0, 1), (0.16, 1), (0.31, 1), (0.33, 2), (1.0, 6), (4.1, 25), (100.0, 25)]
)
def test_half_of_the_lead_is_spent_on_waiting(lead: float, wanted: int) -> None:
    assert ChunkRule(first_frames=1, sizes=tuple(range(1, 26)), credits=64).wanted(lead) == wanted


def test_frames_are_cut_across_chunks_and_reported_when_used_up() -> None:
    stream = Stream(opened=0.0, emits=True)
    codes = frames(9)
    for part in codes.split([2, 3, 4]):
        stream.push(part)
    assert torch.equal(stream.pop(1), codes[:1]) and stream.unreported == 0
    assert torch.equal(stream.pop(5), codes[1:6]) and stream.unreported == 2
    assert torch.equal(stream.pop(3), codes[6:]) and stream.unreported == 3
    assert stream.buffered == 0 and stream.chunks_held == 0


CAPTURED = Shapes.captured(max_batch=64, first_frames=1, max_frames=25)


@pytest.mark.parametrize("lead", [0.0, 0.4, 0.9, 2.0, 3.9])
def test_waiting_for_a_captured_size_ends_when_the_clock_says_so(lead: float) -> None:
    rule = ChunkRule(first_frames=1, sizes=CAPTURED.frames, credits=64)
    stream = Stream(opened=0.0, emits=True)
    stream.emitted(1, int(lead * 24_000), 0.0)
    stream.push(frames(1))
    assert rule.wanted(lead) in CAPTURED.frames
    due = rule.due(stream)
    assert due is not None
    if rule.next(stream, 0.0):
        assert due <= 0.0
    else:
        assert rule.next(stream, due - 0.001) == 0 and rule.next(stream, due + 0.001) == 1


class CountingDecoder:
    """Takes as long as a GPU's steps do, by the test's clock, and makes silence."""

    def __init__(self, clock: Clock, shapes: Shapes) -> None:
        self.clock, self.shapes = clock, shapes
        self.sizes: list[tuple[int, int]] = []

    def decode(self, codes: torch.Tensor, slots: list[int], positions: list[int], *, fresh: bool) -> torch.Tensor:
        rows, count, _ = codes.shape
        assert count in self.shapes.frames and rows <= self.shapes.max_rows(count) and len(set(slots)) == rows
        assert all(bool(position) != fresh for position in positions)
        self.sizes.append((rows, count))
        self.clock.now += 0.0015 + 0.00003 * self.shapes.rows_for(rows) * count
        return torch.zeros(rows, count * 1920 - (555 if fresh else 0), dtype=torch.int16)

    def state_of(self, slot: int) -> list[torch.Tensor]:
        raise AssertionError("nobody is paused")

    def restore(self, slot: int, saved: list[torch.Tensor]) -> None:
        raise AssertionError("nobody is paused")


@pytest.mark.parametrize(("pace", "together"), [(1.0, True), (1.0, False), (1.3, True), (4.0, False)])
def test_64_streams_neither_fall_silent_nor_keep_a_new_one_waiting(
    directory: pathlib.Path, pace: float, together: bool
) -> None:
    """Frames come `pace` times as fast as they are played, new streams every 21 ms; `together`: all streams' frames at one time, as
    a Talker's step gives them."""
    bench = Bench(directory, slots=64)
    decoder = CountingDecoder(bench.clock, CAPTURED)
    bench.stage._decoder = decoder
    bench.stage._rule = ChunkRule(first_frames=1, sizes=CAPTURED.frames, credits=64)
    start, codes, streams, every = bench.clock.now, frames(1), range(64), 0.08 / pace
    came = {index: 0.021 * index for index in streams}  # the first frame
    came = {index: start + (math.ceil(at / every) * every if together else at) for index, at in came.items()}
    fed = dict.fromkeys(streams, 0)
    first: dict[int, float] = {}
    left = dict.fromkeys(streams, 0.0)  # when the listener will have heard all
    silence = 0.0
    while bench.usage.keys() != set(streams):
        due = [index for index in streams if fed[index] < 60 and came[index] + fed[index] * every <= bench.clock.now]
        for index in due:
            if not fed[index]:
                bench.open(index)
            fed[index] += 1
            bench.feed(index, codes, last=fed[index] == 60)
        if not bench.stage.has_work():
            bench.clock.now += 0.0005
            continue
        for index in bench.step():
            now, samples = bench.clock.now, bench.audio[index][-1].numel()
            first.setdefault(index, now)
            silence = max(silence, now - left[index] if left[index] else 0.0)
            left[index] = max(now, left[index]) + samples / 24_000
    # The first frame gives 57 ms of audio; where the next takes longer to come, that much silence cannot be helped, and a step's time.
    assert silence <= max(0.0, every - 1365 / 24_000 + 0.012)
    assert max(first[index] - came[index] for index in streams) < 0.02
    assert bench.clock.now - start < 64 * 0.021 + 60 * every + 0.5
    if pace > 1.0:
        assert max(count for _, count in decoder.sizes) > 1, "chunks grow"
    assert max(rows for rows, _ in decoder.sizes) >= (32 if together and pace == 1.0 else 2), "streams share steps"
