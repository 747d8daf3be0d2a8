"""Steps of a batch of fixed size: every input in one copy, the whole step as one CUDA graph, every result in one copy back.

A batch of n rows runs in the smallest bucket that holds it, filled up with rows in slot 0. Two graphs a bucket: `decode` (embed →
decoder → output) and `tail` (output alone, for rows whose prompt was computed outside); where the program gives scores, one more
behind each, for batches with a row that wants more than its best score. Not captured, the same operators run one by one: so on the
CPU, where tests hold the equality with the engine's other form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from omni_bus.stages.ar.attention import DecodeAttention
from omni_bus.stages.ar.capture import Capture
from omni_bus.stages.ar.drawing import Drawing
from omni_bus.stages.ar.program import GraphedProgram, Inputs, Row, StepTensors
from omni_bus.stages.ar.transfer import ids_to_device

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)

Result = tuple[torch.Tensor, torch.Tensor | None]  # int64 [B, M + 1], the last column: finite; scores [B, vocab]


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """A step that is on its way."""

    count: int  # rows
    result: torch.Tensor  # int64 [at least rows, M + 1] on the host, once it has landed
    scores: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """What a step gave for its rows."""

    output: torch.Tensor  # int64 [rows, M] on the host, as GraphedProgram.graph_output has it
    finite: list[bool]  # whether the row's hidden state was
    scores: torch.Tensor | None  # [rows, vocab] on the device as the program gave them, valid until the next step

    def of(self, rows: Sequence[int]) -> Drawn:
        """Of some of the rows."""
        if len(rows) == len(self.finite):
            return self
        scores = None if self.scores is None else self.scores.index_select(0, ids_to_device(rows, self.scores.device))
        return Drawn(self.output[list(rows)], [self.finite[row] for row in rows], scores)


def bucket_sizes(max_batch: int) -> tuple[int, ...]:
    """Up to max_batch, itself included; a batch above the largest size runs in several steps."""
    largest = min(max_batch, _SIZES[-1])
    return (*(size for size in _SIZES if size < largest), largest)


class StepGraphs:
    def __init__(self, program: GraphedProgram, attention: DecodeAttention, *, max_batch: int) -> None:
        self.program = program
        self.attention = attention
        parameter = next(program.decoder.parameters())
        self.device = parameter.device
        self._done = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call, unused-ignore]
        self._seeds = np.zeros(max_batch + 1, np.int64)
        self._top_k = np.zeros(max_batch + 1, np.int64)
        self._temperature = np.zeros(max_batch + 1, np.float32)
        self._top_p = np.ones(max_batch + 1, np.float32)
        self._penalty = np.ones(max_batch + 1, np.float32)
        self._min_tokens = np.zeros(max_batch + 1, np.int64)
        self._drawing: Drawing | None = None  # where the program gives scores
        self._max_batch = max_batch
        self._admitted = 0  # rows, in total: a slot is another row's, with other figures, only behind one more
        program.graph_prepare(max_batch)
        hidden = program.decoder.config.hidden
        self._buckets = [_Bucket(size, hidden, parameter.dtype, self.device) for size in bucket_sizes(max_batch)]
        self.max_rows = self._buckets[-1].size

    def prepare(self, capture: Capture, progress: Callable[[float, str], None]) -> None:
        """Run every step, and capture it on a GPU."""
        for number, bucket in enumerate(reversed(self._buckets)):
            bucket.fill_up(0)
            bucket.device.copy_(bucket.host)
            bucket.decode = self._form(capture, bucket, self._forward(bucket))
            bucket.tail = self._form(capture, bucket, self._output(bucket))
            progress((number + 1) / len(self._buckets), f"decode steps of {bucket.size} rows")

    def admit(self, row: Row) -> None:
        """The row has got its slot and its blocks."""
        params, slot = row.request.sampling, row.slot
        self._seeds[slot] = row.seed
        self._top_k[slot] = max(params.top_k or 0, 0)
        self._temperature[slot] = params.temperature or 0.0
        self._top_p[slot] = 1.0 if params.top_p is None else params.top_p
        self._penalty[slot] = params.repetition_penalty or 1.0
        self._min_tokens[slot] = 0 if params.ignore_eos else params.min_tokens or 0
        self._admitted += 1
        self.attention.admit(slot, row.blocks)
        self.program.graph_reset(row)
        if self._drawing is not None:
            self._drawing.admit(row)

    def takes(self, row: Row, inputs: Inputs) -> bool:
        """Whether the row's last uncomputed position, `inputs`, can be a row of `decode`. A prompt's ids are embedded outside, and
        so is what a program wants to see the captured layer of."""
        if row.output_ids:
            return True
        return inputs.embeds is not None and inputs.deepstack is None and self.program.capture_layer is None

    def launch(self, rows: Sequence[Row], inputs: Sequence[Inputs]) -> Flight:
        """One position of each row, given by its `inputs`: stored, computed, and a token drawn from it. Waits for nothing; only one step
        is on its way at a time."""
        bucket, count = self._bucket(len(rows)), len(rows)
        views = bucket.views
        positions = inputs[0].positions if count == 1 else torch.cat([one.positions for one in inputs], dim=1)
        views["positions"][:, :count] = positions.numpy()
        views["tokens"][:count] = [0 if one.token_ids is None else one.token_ids[0] for one in inputs]
        views["lengths"][:count] = [row.computed + 1 for row in rows]
        views["places"][:count] = [self.attention.cache.slot(row.blocks, row.computed) for row in rows]
        views["given"][:count] = [one.embeds is not None for one in inputs]
        for index, one in enumerate(inputs):
            if one.embeds is not None:
                bucket.embeds[index].copy_(one.embeds[0], non_blocking=True)
        return self._launch(bucket, rows, bucket.decode)

    def tail(self, rows: Sequence[Row], hidden: torch.Tensor) -> Drawn:
        """A token of each row from its last position's state: [rows, hidden], post-norm."""
        bucket = self._bucket(len(rows))
        bucket.hidden[: len(rows)].copy_(hidden)
        return self.land(self._launch(bucket, rows, bucket.tail))

    def land(self, flight: Flight) -> Drawn:
        """Wait for a step, and read what it gave."""
        if self._done is not None:
            self._done.synchronize()
        result = flight.result[: flight.count]
        scores = None if flight.scores is None else flight.scores[: flight.count]
        return Drawn(result[:, :-1].clone(), result[:, -1].bool().tolist(), scores)

    def _launch(self, bucket: _Bucket, rows: Sequence[Row], form: _Form | None) -> Flight:
        assert form is not None, "prepare comes first"
        count = len(rows)
        self._seat(bucket, rows)
        draws = np.array([len(row.output_ids) for row in rows])
        bucket.views["draws"][:count] = draws
        bucket.views["no_eos"][:count] = draws < bucket.min_tokens
        if bucket.draws and self._drawing is not None:
            bucket.views["newest"][:count] = [row.output_ids[-1] if row.output_ids else 0 for row in rows]
            self._drawing.see(rows)
        bucket.device.copy_(bucket.host, non_blocking=True)
        result = form.run(draws=bucket.draws)
        scores = form.latest[1]
        host = result
        if self._done is not None:
            host = bucket.readback(result)
            host.copy_(result, non_blocking=True)
            self._done.record()
        return Flight(count, host, scores)

    def _seat(self, bucket: _Bucket, rows: Sequence[Row]) -> None:
        """Write what stays as it is while the same rows are together, which they mostly are from step to step."""
        seats = (self._admitted, *[row.slot for row in rows])
        if bucket.seats == seats:
            return
        views, count, slots = bucket.views, len(rows), np.array(seats[1:])
        assert slots.all(), "a row without a slot"
        views["slots"][:count] = slots
        views["seeds"][:count] = self._seeds[slots]
        views["top_k"][:count] = self._top_k[slots]
        views["temperature"][:count] = self._temperature[slots]
        views["top_p"][:count] = self._top_p[slots]
        views["penalty"][:count] = self._penalty[slots]
        bucket.draws = self._drawing is not None and self._drawing.wanted(self._temperature[slots], self._penalty[slots])
        bucket.min_tokens = self._min_tokens[slots]
        bucket.fill_up(count)
        bucket.seats = seats

    def _bucket(self, rows: int) -> _Bucket:
        return next(bucket for bucket in self._buckets if bucket.size >= rows)

    def _form(self, capture: Capture, bucket: _Bucket, step: Callable[[], Result]) -> _Form:
        form = _Form(capture(step))
        scores = form.latest[1]
        if scores is None:
            return form
        if self._drawing is None:
            self._drawing = Drawing(scores.shape[1], self._max_batch, self.program.suppressed_ids, self.device)
        drawing = self._drawing

        def draw() -> torch.Tensor:
            output, scores = form.latest
            assert scores is not None
            drawn, finite = drawing.draw(output[:, :-1], scores, bucket.step, bucket.newest)
            return torch.cat((drawn, output[:, -1:] * finite), dim=1)

        form.draw = capture(draw)
        return form

    def _forward(self, bucket: _Bucket) -> Callable[[], Result]:
        def forward() -> Result:
            step = bucket.step
            inputs = torch.where(bucket.given[:, None], bucket.embeds, self.program.graph_embed(step))
            self.attention.begin(step.slots, bucket.lengths)
            cache = self.attention.cache
            layer = None if cache.captured is None else self.program.capture_layer
            hidden, captured = self.program.decoder(inputs, step.positions, self.attention, capture_layer=layer)
            cache.capture(bucket.places, captured)
            return self._draw(hidden, step)

        return forward

    def _output(self, bucket: _Bucket) -> Callable[[], Result]:
        return lambda: self._draw(bucket.hidden, bucket.step)

    def _draw(self, hidden: torch.Tensor, step: StepTensors) -> Result:
        output, scores = self.program.graph_output(hidden, step)
        finite = hidden.amax(dim=-1, keepdim=True).isfinite()  # behind a norm infinity is NaN, which is passed on
        return torch.cat((output, finite.to(output.dtype)), dim=1), scores


class _Form:
    """What a bucket runs, captured: a step, and behind it, where a row wants that, the draw from its scores."""

    def __init__(self, step: Callable[[], Result]) -> None:
        self.step = step
        self.latest = step()  # of the last run; captured, a step gives the same tensors each time
        self.draw: Callable[[], torch.Tensor] | None = None

    def run(self, *, draws: bool) -> torch.Tensor:
        """int64 [B, M + 1], as in Result."""
        self.latest = self.step()
        return self.draw() if draws and self.draw is not None else self.latest[0]


class _Bucket:
    """The tensors of steps of `size` rows; all but the states lie in one buffer, which is filled on the host."""

    def __init__(self, size: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        fields = {
            "slots": (torch.int64, (size,)),
            "positions": (torch.int64, (3, size)),
            "tokens": (torch.int64, (size,)),
            "seeds": (torch.int64, (size,)),
            "draws": (torch.int64, (size,)),
            "newest": (torch.int64, (size,)),  # the rows' last output ids, for draws
            "places": (torch.int64, (size,)),  # the slots of the rows' new positions in the cache
            "top_k": (torch.int64, (size,)),
            "temperature": (torch.float32, (size,)),
            "top_p": (torch.float32, (size,)),
            "penalty": (torch.float32, (size,)),
            "lengths": (torch.int32, (size,)),
            "no_eos": (torch.bool, (size,)),
            "given": (torch.bool, (size,)),
        }
        self.size = size
        layout, total = {}, 0
        for name, (kind, shape) in fields.items():
            layout[name] = (kind, shape, total)
            total += -(-size * kind.itemsize * (3 if len(shape) == 2 else 1) // 16) * 16  # aligned for wide loads
        self.host = torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.zeros(total, dtype=torch.uint8, device=device)
        self.views = {name: _view(self.host, *where).numpy() for name, where in layout.items()}
        on_device = {name: _view(self.device, *where) for name, where in layout.items()}
        self.lengths = on_device.pop("lengths")
        self.places = on_device.pop("places")
        self.newest = on_device.pop("newest")
        self.given = on_device.pop("given")
        self.step = StepTensors(**on_device)
        self.embeds = torch.zeros(size, hidden, dtype=dtype, device=device)
        self.hidden = torch.zeros(size, hidden, dtype=dtype, device=device)
        self.decode: _Form | None = None
        self.tail: _Form | None = None
        self.draws = False  # whether a row of those whose figures lie in the buffer wants more than its best score
        self.seats: tuple[int, ...] | None = None  # whose figures lie in the buffer, as StepGraphs counts them
        self.min_tokens = np.zeros(0, np.int64)  # of those rows
        self._readback: torch.Tensor | None = None

    def fill_up(self, count: int) -> None:
        """The rows from `count` on are nobody's: greedy rows of one position in slot 0. Steps write into the rows before it only."""
        self.seats = None
        if count == self.size:
            return
        for name, view in self.views.items():
            view[..., count:] = 1 if name in ("top_p", "penalty", "lengths") else 0

    def readback(self, result: torch.Tensor) -> torch.Tensor:
        """Where a result is copied to on the host."""
        if self._readback is None:
            self._readback = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        return self._readback


def _view(buffer: torch.Tensor, kind: torch.dtype, shape: tuple[int, ...], begin: int) -> torch.Tensor:
    count = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    return buffer[begin : begin + count * kind.itemsize].view(kind).view(shape)
