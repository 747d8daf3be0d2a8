"""The token of each row drawn from its scores on the device, for programs that leave that to the engine.

It stands behind a step as a CUDA graph of its own, so that steps in which every row takes its best score do not pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from omni_bus.stages.ar.device_sampler import adjust, sample
from omni_bus.stages.ar.program import Row, StepTensors
from omni_bus.stages.ar.transfer import ids_to_device


class Drawing:
    """What is kept of each slot: the ids that the repetition penalty is laid on. Rows without a penalty keep nothing."""

    def __init__(self, vocab: int, max_batch: int, suppressed_ids: torch.Tensor | None, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._seen = torch.zeros(max_batch + 1, vocab, dtype=torch.bool, device=device)
        self._counted = np.zeros(max_batch + 1, np.int64)  # of each slot's Row.penalty_ids those that are in `seen`
        self._true = torch.tensor(True, device=device)
        self._nothing = torch.zeros(vocab, dtype=torch.bool, device=device)  # a program keeps its end tokens away itself
        self._banned = torch.zeros(vocab, dtype=torch.bool, device=device)
        self._always = suppressed_ids is not None
        if suppressed_ids is not None:
            self._banned[suppressed_ids.to(device)] = True

    def wanted(self, temperature: np.ndarray, penalty: np.ndarray) -> bool:
        """Whether one of these rows, float32 [rows] each, wants more than the best score."""
        return self._always or bool((temperature > 0).any() or (penalty != 1).any())

    def admit(self, row: Row) -> None:
        """The row has got its slot."""
        if row.request.sampling.repetition_penalty not in (None, 1.0):
            self._seen[row.slot].zero_()
            self._counted[row.slot] = 0

    def see(self, rows: Sequence[Row]) -> None:
        """Take in what has come to the rows' prompts. Of their outputs the newest id comes with each step."""
        for row in rows:
            count = len(row.penalty_ids)
            if row.request.sampling.repetition_penalty in (None, 1.0) or self._counted[row.slot] == count:
                continue
            new = sorted({token for token in row.penalty_ids[self._counted[row.slot] :] if token < self._vocab})
            if new:
                self._seen[row.slot].index_fill_(0, ids_to_device(new, self._device), True)
            self._counted[row.slot] = count

    def draw(
        self, output: torch.Tensor, scores: torch.Tensor, step: StepTensors, newest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Captured: int64 [B, M] as GraphedProgram.graph_output has it, with its scores, float [B, vocab] → the same with column 0
        drawn from them, and whether they are finite, bool [B, 1]. newest: int64 [B], a row's last output id, if it has one.

        May be run again for the same rows, where a step failed: it takes in what came before this token, and the noise is the same.
        """
        slots = torch.where(step.draws > 0, step.slots, 0)  # slot 0 is nobody's
        self._seen.index_put_((slots, newest), self._true)
        scores = adjust(scores, self._seen, step.slots, step.penalty, self._banned, self._nothing, step.no_eos)
        tokens = sample(scores, step.seeds, step.draws, step.temperature, step.top_k, step.top_p)
        if not self._always:  # of equal scores the device's argmax takes any: the batch must not decide which form a row is of
            tokens = torch.where((step.temperature == 0) & (step.penalty == 1), output[:, 0], tokens)
        finite = scores.amax(dim=-1, keepdim=True).isfinite()
        return torch.cat((tokens[:, None], output[:, 1:]), dim=1), finite
