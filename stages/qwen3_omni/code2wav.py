"""The Code2Wav stage: codec frames in, 16-bit audio out, several streams a step.

A step takes the stream with the smallest playback lead and fills the batch with others, in order of their lead, that are as far
(at their beginning, or not) and have a chunk of about the same length to decode. A stream that has not begun to speak has less lead
than any that has audio left to play, and on a GPU no step takes more than a few milliseconds, so first packets never queue behind
large chunks. A stream holds one of `max_batch` state slots from its first frame on; when none is free, a stream whose consumer has
stopped it gives up its own and gets its state back later.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from omni_bus.errors import ProtocolViolation, StageFailed
from omni_bus.payloads import AudioDelta
from omni_bus.stages import failures
from omni_bus.stages.contract import (
    Chunk,
    Consumed,
    Emission,
    Finished,
    Output,
    StageContext,
    StageError,
    StageRequest,
    StageStats,
)
from omni_bus.stages.qwen3_omni import code2wav_config
from omni_bus.stages.qwen3_omni.code2wav_config import Code2WavConfig
from omni_bus.stages.qwen3_omni.code2wav_decoder import ModelDecoder, SlotDecoder
from omni_bus.stages.qwen3_omni.code2wav_fused import FusedCode2Wav
from omni_bus.stages.qwen3_omni.code2wav_graphs import GraphedDecoder
from omni_bus.stages.qwen3_omni.code2wav_model import PREFIX, Code2Wav
from omni_bus.stages.qwen3_omni.code2wav_ops import Ops, TorchOps
from omni_bus.stages.qwen3_omni.code2wav_shapes import Shapes
from omni_bus.stages.qwen3_omni.code2wav_streams import ChunkRule, Stream
from omni_bus.stages.qwen3_omni.json_fields import Section
from omni_bus.stages.qwen3_omni.options import Code2WavOptions, Kernels
from omni_bus.stages.qwen3_omni.payloads import CodecFrames
from omni_bus.stages.qwen3_omni.spec import SAMPLE_RATE, CodecEdgeOptions
from omni_bus.stages.qwen3_omni.weights import WEIGHTS_SHARE, open_checkpoint

IN_EDGE = "talker->code2wav"
OUT_EDGE = "code2wav->client"

log = logging.getLogger(__name__)


class Code2WavStage:
    """`clock` gives seconds, monotonic."""

    _decoder: SlotDecoder
    _config: Code2WavConfig
    _rule: ChunkRule

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._streams: dict[int, Stream] = {}  # by request id, in the order they were opened
        self._free: collections.deque[int] = collections.deque()
        self._slots = 0
        self._batch = 0  # rows of the last step

    def load(self, ctx: StageContext) -> None:
        ctx.progress(0.0, "reading Code2Wav")
        checkpoint = open_checkpoint(ctx, PREFIX)
        self._config = code2wav_config.parse(Section(checkpoint.json("config.json")).section("code2wav_config"))
        edge = ctx.edge_options(IN_EDGE, CodecEdgeOptions)
        options = ctx.options(Code2WavOptions)
        device, dtype = torch.device(ctx.device), getattr(torch, ctx.config.dtype)
        fused = options.graphs == "plain" or (options.graphs == "auto" and device.type == "cuda")
        self._slots = ctx.config.max_batch
        if ctx.state_bytes is not None:
            one = code2wav_config.slot_values(self._config, edge.max_chunk_frames if fused else 0) * dtype.itemsize
            self._slots = max(1, min(self._slots, ctx.state_bytes // one))
        self._free = collections.deque(range(self._slots))
        sizes = Shapes.captured if fused else Shapes.any_size
        shapes = sizes(max_batch=self._slots, first_frames=edge.first_chunk_frames, max_frames=edge.max_chunk_frames)
        self._rule = ChunkRule(
            edge.first_chunk_frames, shapes.frames, ctx.edges[IN_EDGE].credits, self._config.frame_samples / SAMPLE_RATE
        )
        model = Code2Wav.load(checkpoint, self._config, slots=0 if fused else self._slots, dtype=dtype, device=device)
        ctx.progress(WEIGHTS_SHARE, "warming up Code2Wav")
        if fused:
            joined = FusedCode2Wav(model, _ops(device, options.kernels), slots=self._slots, max_frames=shapes.frames[-1])
            decoder = GraphedDecoder(joined, shapes, slots=self._slots, device=device)
            decoder.prepare(lambda fraction, text: ctx.progress(WEIGHTS_SHARE + (1 - WEIGHTS_SHARE) * fraction, text))
            self._decoder = decoder
        else:
            self._decoder = ModelDecoder(model, shapes, device)
            silence = torch.zeros(1, edge.first_chunk_frames, self._config.num_quantizers, dtype=torch.int16)
            for position, fresh in ((0, True), (edge.first_chunk_frames, False)):
                self._decoder.decode(silence, [0], [position], fresh=fresh)
        ctx.progress(1.0, "Code2Wav is ready")

    def open(self, request: StageRequest) -> None:
        self._streams[request.id] = Stream(self._clock(), emits=OUT_EDGE in request.outputs)

    def feed(self, request_id: int, chunk: Chunk) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        try:
            self._take(stream, chunk)
        except (ProtocolViolation, StageFailed):
            self.cancel(request_id)
            raise

    def cancel(self, request_id: int) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None and stream.slot is not None:
            self._free.append(stream.slot)

    def pause(self, request_id: int) -> None:
        if request_id in self._streams:
            self._streams[request_id].paused = True

    def resume(self, request_id: int) -> None:
        if request_id in self._streams:
            self._streams[request_id].paused = False

    def has_work(self) -> bool:
        return any(map(self._drained, self._streams.values())) or bool(self._next_batch(self._clock()))

    def wake_at(self) -> float | None:
        """When the first stream's lead will have shrunk so far that what it holds is no longer worth keeping back."""
        now = self._clock()
        times = (self._rule.due(stream) for stream in self._streams.values() if not stream.paused)
        # One that is due already waits for a slot, which only an event can free.
        return min((due for due in times if due is not None and due > now), default=None)

    def step(self) -> Iterable[Emission]:
        out: list[Emission] = []
        for request_id in [request_id for request_id, stream in self._streams.items() if self._drained(stream)]:
            stream = self._streams[request_id]
            self._end(request_id, stream, out, [Output(request_id, OUT_EDGE, AudioDelta(SAMPLE_RATE), last=True)])
        batch = self._next_batch(self._clock())
        self._batch = len(batch)
        if batch:
            try:
                self._run(batch, out)
            except RuntimeError as error:  # torch: no memory, a failed kernel; these rows' state is lost, the others' is not
                failures.raise_if_device_is_lost(error)
                log.exception("decoding %d streams failed", len(batch))
                told = failures.for_client(error, "decoding the audio failed").info()
                for request_id, _ in batch:
                    self.cancel(request_id)
                    out.append(StageError(request_id, told))
        return out

    def stats(self) -> StageStats:
        running = sum(stream.slot is not None for stream in self._streams.values())
        return StageStats(
            waiting=len(self._streams) - running,
            running=running,
            queued=sum(stream.buffered for stream in self._streams.values()),
            per_step=self._slots * self._rule.sizes[-1],
            batch=self._batch,
            slots_used=self._slots - len(self._free),
            slots_total=self._slots,
        )

    def _take(self, stream: Stream, chunk: Chunk) -> None:
        """Buffer a chunk's frames. Their ids are checked here, while they are on the CPU: on a GPU a bad one would end the process."""
        assert isinstance(chunk.payload, CodecFrames)
        stream.closed |= chunk.last
        if not chunk.payload.count and chunk.last:
            stream.unreported += 1
            return
        codes = chunk.tensors.get("codes")
        if codes is None or not codes.numel() or tuple(codes.shape) != (chunk.payload.count, self._config.num_quantizers):
            found = "none" if codes is None else list(codes.shape)
            raise ProtocolViolation(
                f"codec frames have shape {found}, not [{chunk.payload.count}, {self._config.num_quantizers}]"
            )
        if int(codes.min()) < 0 or int(codes.max()) >= self._config.codebook_size:
            raise StageFailed("a codec frame holds an id outside its codebook")
        stream.push(codes)

    def _drained(self, stream: Stream) -> bool:
        """Its last chunk brought no frame, and nothing is left to decode: only the end is still to be told."""
        return stream.closed and not stream.buffered and not stream.paused

    def _next_batch(self, now: float) -> list[tuple[int, int]]:
        """(request id, frames) of the next step, every row with as many frames; empty = nothing can run.

        Each row has a slot or will get one, so there are never more than `max_batch`.
        """
        ready = []
        for request_id, stream in self._streams.items():
            if not stream.paused and (frames := self._rule.next(stream, now)):
                ready.append((stream.lead(now), request_id, frames))
        ready.sort()
        available = len(self._free) + sum(self._can_park(stream) for stream in self._streams.values())
        batch: list[int] = []
        fresh, count = False, 0
        most = 1
        for _, request_id, frames in ready:
            stream = self._streams[request_id]
            if stream.slot is None and not available:
                continue
            if len(batch) == most:
                break
            if not batch:
                fresh, count = not stream.frames, frames
                most = self._decoder.shapes.max_rows(count)
            elif fresh != (not stream.frames) or not count <= frames <= 2 * count:
                continue
            batch.append(request_id)
            available -= stream.slot is None
        return [(request_id, count) for request_id in batch]

    def _run(self, batch: Sequence[tuple[int, int]], out: list[Emission]) -> None:
        streams = [self._streams[request_id] for request_id, _ in batch]
        slots = [self._slot(stream) for stream in streams]
        codes = torch.stack([stream.pop(count) for stream, (_, count) in zip(streams, batch, strict=True)])
        pcm = self._decoder.decode(codes, slots, [stream.frames for stream in streams], fresh=not streams[0].frames)
        now = self._clock()
        for (request_id, count), stream, samples in zip(batch, streams, pcm, strict=True):
            stream.emitted(count, samples.shape[0], now)
            last = stream.closed and not stream.buffered
            audio = Output(request_id, OUT_EDGE, AudioDelta(SAMPLE_RATE, frames=count), {"pcm": samples}, last)
            if last:
                self._end(request_id, stream, out, [audio])
                continue
            if stream.emits:
                out.append(audio)
            self._report(request_id, stream, out)

    def _report(self, request_id: int, stream: Stream, out: list[Emission]) -> None:
        if stream.unreported:
            out.append(Consumed(request_id, IN_EDGE, stream.unreported))
            stream.unreported = 0

    def _end(self, request_id: int, stream: Stream, out: list[Emission], closing: list[Output]) -> None:
        """The request's last emissions; its slot is free from here on."""
        self.cancel(request_id)
        if stream.emits:
            out.extend(closing)
        self._report(request_id, stream, out)
        out.append(Finished(request_id, {"frames": stream.frames, "samples": stream.samples}))

    def _can_park(self, stream: Stream) -> bool:
        return stream.paused and stream.slot is not None

    def _slot(self, stream: Stream) -> int:
        """The stream's slot; a new one is taken from the free ones, or from a paused stream, whose state is put aside."""
        if stream.slot is None:
            if not self._free:
                paused = next(other for other in self._streams.values() if self._can_park(other))
                assert paused.slot is not None
                paused.parked = self._decoder.state_of(paused.slot)
                self._free.append(paused.slot)
                paused.slot = None
            stream.slot = self._free.popleft()
            if stream.parked is not None:
                self._decoder.restore(stream.slot, stream.parked)
                stream.parked = None
        return stream.slot


def _ops(device: torch.device, kernels: Kernels) -> Ops:
    if device.type != "cuda" or kernels == "torch":
        return TorchOps()
    from omni_bus.stages.qwen3_omni.code2wav_triton import TritonOps

    return TritonOps()
