"""Code2Wav's fused form by CUDA graphs: one a (rows, frames, fresh), one copy to the card, one replay, one copy back, one wait.

A batch is filled up to a captured size with rows of the scratch slot. Not captured, the same operators run one by one: so on the
CPU, where tests hold the equality with the model.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

from omni_bus.stages.ar.capture import device_alone
from omni_bus.stages.qwen3_omni.code2wav_fused import FusedCode2Wav
from omni_bus.stages.qwen3_omni.code2wav_ops import FusedRows
from omni_bus.stages.qwen3_omni.code2wav_shapes import Shapes
from omni_bus.stages.streams import take_stream

Progress = Callable[[float, str], None]  # (fraction 0..1, what is being done)


class GraphedDecoder:
    """A code2wav_decoder.SlotDecoder with `slots` slots; `model` has as many, and its scratch slot."""

    def __init__(self, model: FusedCode2Wav, shapes: Shapes, *, slots: int, device: torch.device, capture: bool = True) -> None:
        self.shapes = shapes
        self._model = model
        self._captures = capture and device.type == "cuda"
        self._stream = take_stream(device, self) if device.type == "cuda" else None
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call, unused-ignore]
        self._steps: dict[tuple[int, int, bool], Callable[[], None]] = {}
        self._turns = [0] * (slots + 1)  # the half of each slot's kept steps that its next call reads
        self._groups = model.config.num_quantizers
        self._section = -(-shapes.rows[-1] // 16) * 16  # of slots, of states, of positions: each aligned for wide loads
        most = max(rows * frames for rows, frames, _ in shapes.all())
        sizes = 3 * self._section + most * self._groups, most * model.config.frame_samples
        pinned = device.type == "cuda"
        self._host_in = torch.zeros(sizes[0], dtype=torch.int32, pin_memory=pinned)
        self._host_out = torch.zeros(sizes[1], dtype=torch.int16, pin_memory=pinned)
        self._in = torch.zeros(sizes[0], dtype=torch.int32, device=device)
        self._out = torch.zeros(sizes[1], dtype=torch.int16, device=device)

    def prepare(self, progress: Progress) -> None:
        """Run every step once, and capture it on a GPU, the largest first: the others fit into its memory."""
        shapes = list(self.shapes.all())
        pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._in.zero_()  # all rows are those of the scratch slot
        if self._captures:
            gc.collect()
            gc.freeze()  # what is loaded stays: a capture may begin with a collection
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._in.device))
        for number, shape in enumerate(shapes):
            progress(number / len(shapes), f"steps of {shape[0]} x {shape[1]} frames")
            step = self._step(*shape)
            with device_alone:  # as in ar/capture.py, where it says why
                with self._on_stream():
                    step()
                if self._stream is not None and self._captures:
                    self._stream.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                        step()
                    step = graph.replay
            self._steps[shape] = step

    def decode(self, codes: torch.Tensor, slots: list[int], positions: list[int], *, fresh: bool) -> torch.Tensor:
        count, frames, _ = codes.shape
        rows = self.shapes.rows_for(count)
        slots = [slot + 1 for slot in slots]  # 0 is scratch
        states = [2 * slot + self._turns[slot] for slot in slots]
        head, section = self._host_in[: 3 * self._section].view(3, -1), 3 * self._section
        head[:, :count] = torch.tensor((slots, states, positions), dtype=torch.int32)
        head[:, count:rows] = 0
        filled = section + count * frames * self._groups
        self._host_in[section:filled] = codes.reshape(-1)  # scratch rows have the codes of whatever came before
        step = self._steps[rows, frames, fresh]
        samples = self._samples(frames, fresh)
        with self._on_stream():
            self._in[:filled].copy_(self._host_in[:filled], non_blocking=True)
            step()
            self._host_out[: count * samples].copy_(self._out[: count * samples], non_blocking=True)
            if self._done is not None:
                self._done.record()
                self._done.synchronize()
        for slot in slots:
            self._turns[slot] ^= 1
        return self._host_out[: count * samples].view(count, samples).clone()

    def state_of(self, slot: int) -> list[torch.Tensor]:
        with self._on_stream():
            return self._model.state_of(slot + 1, self._turns[slot + 1])

    def restore(self, slot: int, saved: list[torch.Tensor]) -> None:
        with self._on_stream():
            self._model.restore(slot + 1, self._turns[slot + 1], saved)

    def _step(self, rows: int, frames: int, fresh: bool) -> Callable[[], None]:
        first, second, third = (self._in[index * self._section :][:rows] for index in range(3))
        codes = self._in[3 * self._section :][: rows * frames * self._groups].view(rows, frames, self._groups)
        out = self._out[: rows * self._samples(frames, fresh)]

        def step() -> None:
            out.copy_(self._model.decode(codes, FusedRows(first, second, third, fresh)).view(-1))

        return step

    def _samples(self, frames: int, fresh: bool) -> int:
        return frames * self._model.config.frame_samples - (self._model.config.lookahead_samples if fresh else 0)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Makes the decoder's stream, and with it its device, the current one. Each use ends with the work done, or ordered by it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
