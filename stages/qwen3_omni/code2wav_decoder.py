"""What the Code2Wav stage decodes with: streams in numbered slots, a batch of equal chunks a call, host tensors in and out."""

from __future__ import annotations

from typing import Protocol

import torch

from omni_bus.stages.qwen3_omni.code2wav_layers import Rows
from omni_bus.stages.qwen3_omni.code2wav_model import Code2Wav, to_pcm16
from omni_bus.stages.qwen3_omni.code2wav_shapes import Shapes


class SlotDecoder(Protocol):
    """Slots count from 0. Calls come one at a time."""

    shapes: Shapes

    def decode(self, codes: torch.Tensor, slots: list[int], positions: list[int], *, fresh: bool) -> torch.Tensor:
        """The next n frames of some streams, of which `positions` were decoded before: none if fresh, else some of every row.

        codes: int16 [rows, n, groups] → int16 [rows, n * 1920 (- 555 if fresh)], both on the CPU; n and rows as `shapes` allows.
        """

    def state_of(self, slot: int) -> list[torch.Tensor]:
        """A copy of one slot's state, to be put back with `restore`."""

    def restore(self, slot: int, saved: list[torch.Tensor]) -> None: ...


class ModelDecoder:
    """The model as it is, operator by operator, any size."""

    def __init__(self, model: Code2Wav, shapes: Shapes, device: torch.device) -> None:
        self.shapes = shapes
        self._model, self._device = model, device

    def decode(self, codes: torch.Tensor, slots: list[int], positions: list[int], *, fresh: bool) -> torch.Tensor:
        rows = Rows(torch.tensor(slots, device=self._device), torch.tensor(positions, device=self._device), fresh)
        return to_pcm16(self._model.decode(codes.to(self._device), rows)).cpu()

    def state_of(self, slot: int) -> list[torch.Tensor]:
        return self._model.state_of(slot)

    def restore(self, slot: int, saved: list[torch.Tensor]) -> None:
        self._model.restore(slot, saved)
