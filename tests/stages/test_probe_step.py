"""A probe stage that is told how long its steps take waits so long in each, for a batch as for one row, and does not compute meanwhile."""

from __future__ import annotations

import time

from omni_bus.payloads import ChatInput, Message, TextPart
from omni_bus.spec import load_pipeline
from tests.support.stage_pipeline import StagePipeline

STEP_MS = 40


def test_a_step_waits_once_for_its_whole_batch_and_without_the_cpu() -> None:
    probe = StagePipeline(load_pipeline("probe"), "", ["source"], options={"source": {"step_ms": STEP_MS}}, max_batch=3)
    traces = [probe.submit(number, ChatInput((Message("user", (TextPart("one two"),)),))) for number in range(1, 5)]
    wall, cpu = time.monotonic(), time.thread_time()
    steps = 0
    while probe.step():
        steps += 1
    wall, cpu = time.monotonic() - wall, time.thread_time() - cpu
    assert steps == 3, "two words of four rows, three at a time: 3, 3, 2"
    assert all(trace.closed("source->client") for trace in traces)
    assert wall >= steps * STEP_MS / 1000
    assert cpu < wall, "it waits"
