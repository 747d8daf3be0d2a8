"""A real worker process whose step runs out of memory, loses its device, is slow, or hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import msgspec

from omni_bus import events
from omni_bus.deployment import RunDir
from omni_bus.events import Cancel, Chunk, Close, Done, EdgeRoute, Failed, Open, RequestOptions
from tests.support.worker_process import PATIENCE_S, ScriptedBroker, WorkerProcess, deployment

Say = Callable[[str], bytes]
IN, TEXT = "client->source", "source->client"
HEARTBEAT_S = 0.2


@contextlib.contextmanager
def a_worker(broker: ScriptedBroker, step_s: float) -> Iterator[WorkerProcess]:
    """`source`, ready, with the words of stages/probe/faults.py."""
    plan = deployment(heartbeat_s=HEARTBEAT_S)
    broker.run_dir.write(msgspec.structs.replace(plan, bus=msgspec.structs.replace(plan.bus, step_s=step_s)))
    worker = WorkerProcess(broker.run_dir, "source.0", grace_s=60)
    try:
        broker.expect(events.Ready, stage="source")
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait(PATIENCE_S)


def ask(broker: ScriptedBroker, request: int, payload: bytes) -> None:
    outputs = (EdgeRoute(TEXT, "inline", 64),)
    broker.send(
        "source.0",
        Open(request=request, stage="source", options=RequestOptions(), deadline_s=60.0, inputs=(IN,), outputs=outputs),
    )
    broker.send("source.0", Chunk(request, IN, 0, True), payload)


def test_a_step_without_memory_fails_its_requests_by_that_name_and_the_stage_goes_on(broker: ScriptedBroker, say: Say) -> None:
    with a_worker(broker, 0.0) as worker:
        ask(broker, 1, say("a !oom:source b"))
        failed, _ = broker.expect(Failed)
        assert isinstance(failed, Failed)
        assert (failed.error.code, failed.error.status) == ("out_of_memory", 503)
        broker.send("source.0", Cancel(1, "source"))
        broker.expect(events.Cancelled)
        ask(broker, 2, say("well"))
        broker.expect(Done, request=2)
        broker.send("source.0", Close(2, "source"))
        broker.holds_nothing("source.0", "source")
        assert "MemoryError" in worker.log.read_text()


def test_a_process_that_has_lost_its_device_ends_and_says_failed_of_nothing(broker: ScriptedBroker, say: Say) -> None:
    """It can do nothing more; what had sent nothing may then run elsewhere, which it could not after a Failed."""
    with a_worker(broker, 0.0) as worker:
        ask(broker, 1, say("!hang:source"))
        ask(broker, 2, say("!device:source"))
        assert worker.process.wait(PATIENCE_S) == 1
        assert "AcceleratorError: the probe was told to lose its device" in worker.log.read_text()
        assert not [event for event in broker.silence(0.3) if isinstance(event, Failed)]


def test_a_step_that_hangs_is_ended_and_the_log_says_where_it_stood(broker: ScriptedBroker, say: Say) -> None:
    step_s = 2.0
    with a_worker(broker, step_s) as worker:
        ask(broker, 1, say("!spin:source"))
        assert worker.process.wait(PATIENCE_S) == 1
        log = worker.log.read_text()
        assert f"Timeout (0:00:0{step_s + HEARTBEAT_S:.6f})!" in log
        assert "in spin" in log.partition("Timeout")[2], log
        assert "in step" in log.partition("Timeout")[2], log


def test_a_slow_step_and_an_idle_stage_are_not_hung(broker: ScriptedBroker, say: Say) -> None:
    with a_worker(broker, 20.0) as worker:
        ask(broker, 1, say("!sleep:source:1500"))
        broker.expect(Done, request=1)
    with a_worker(broker, 2.0) as worker:
        idle_until = time.monotonic() + 4.0
        while time.monotonic() < idle_until:
            broker.load("source.0", "source")
        assert worker.process.poll() is None and "Timeout" not in worker.log.read_text()


def test_the_watchdog_is_off_with_zero(broker: ScriptedBroker, run_dir: RunDir, say: Say) -> None:
    with a_worker(broker, 0.0) as worker:
        ask(broker, 1, say("!sleep:source:1000"))
        broker.expect(Done, request=1)
        assert "Timeout" not in worker.log.read_text()
