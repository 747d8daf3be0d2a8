"""One thread's way from mapped files to a card: two pinned buffers in turn, and a stream of its own."""

from __future__ import annotations

import torch

from omni_bus.stages.ar.fp8 import Fp8Matrix
from omni_bus.stages.streams import take_stream

BUFFER_BYTES = 32 << 20


class CardLane:
    """While one buffer's copies run, the other is filled. Not to be shared between threads."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):  # pinning would open a context on card 0 otherwise
            self._stream = take_stream(device, self)
            self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._used = 0  # bytes of the buffer whose turn it is

    def send(self, source: torch.Tensor, target: torch.Tensor | Fp8Matrix) -> None:
        """Copy a CPU tensor into one of its shape on the card, which is contiguous; converts the dtype there, and quantises there.
        Done at `finish`."""
        assert source.shape == target.shape and target.is_contiguous()
        if not source.numel():
            return
        with torch.cuda.stream(self._stream):
            if isinstance(target, torch.Tensor) and source.dtype == target.dtype:
                self._copy(_bytes(source), _bytes(target))
                return
            raw = torch.empty(source.shape, dtype=source.dtype, device=target.device)  # of this stream's memory
            self._copy(_bytes(source), _bytes(raw))
            target.copy_(raw)

    def finish(self) -> None:
        """Wait for all that was sent."""
        self._stream.synchronize()
        self._used = 0

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        start = 0
        while start < len(source):
            if self._used == BUFFER_BYTES:
                self._take_other()
            count = min(len(source) - start, BUFFER_BYTES - self._used)
            staged = self._buffers[self._turn][self._used : self._used + count]
            staged.copy_(source[start : start + count])
            target[start : start + count].copy_(staged, non_blocking=True)
            self._used += count
            start += count

    def _take_other(self) -> None:
        self._copied[self._turn].record(self._stream)
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()  # at once where nothing was recorded yet
        self._used = 0


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
