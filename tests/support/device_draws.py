"""The engine's free form with the other form's noise, so that sampled rows of both can be compared token for token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar import engine
from omni_bus.stages.ar.device_sampler import sample_plain
from omni_bus.stages.ar.program import Row
from omni_bus.stages.ar.sampler import Sampler


@contextlib.contextmanager
def device_draws() -> Iterator[None]:
    """Within, rows whose scores the host has processed are drawn from by their seeds and the numbers of their tokens."""
    process, latest = Sampler.process, list[Row]()

    def processed(sampler: Sampler, logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        latest[:] = rows
        return process(sampler, logits, rows)

    def sample_rows(scores: torch.Tensor, params: Sequence[SamplingParams], generators: object) -> torch.Tensor:
        assert len(scores) == len(params) == len(latest)
        return sample_plain(
            scores,
            torch.tensor([row.seed for row in latest]),
            torch.tensor([len(row.output_ids) for row in latest]),
            torch.tensor([one.temperature or 0.0 for one in params]),
            torch.tensor([one.top_k or 0 for one in params]),
            torch.tensor([1.0 if one.top_p is None else one.top_p for one in params]),
        )

    with mock.patch.object(Sampler, "process", processed), mock.patch.object(engine, "sample_rows", sample_rows):
        yield
