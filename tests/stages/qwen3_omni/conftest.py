"""Stages run in the tests' own process: one thread, as they have in a worker beside others."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
