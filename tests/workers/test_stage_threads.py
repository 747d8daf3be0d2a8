"""A real process of stages that have a thread each: as many workers as stages for the broker, and one end for all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from omni_bus import events
from omni_bus.deployment import Deployment, RunDir
from omni_bus.events import Chunk, Done, Drain, EdgeRoute, Open, Register, RequestOptions, Shutdown
from omni_bus.workers import watchdog
from omni_bus.workers.threads import ThreadStop
from tests.support.worker_process import PATIENCE_S, ScriptedBroker, WorkerProcess, deployment, from_worker

Say = Callable[[str], bytes]
STAGES = ("source", "relay", "sink")
IN, TEXT, ON = "client->source", "source->client", "source->relay"


def threaded(step_s: float = 0.0) -> Deployment:
    """The probe in one process, a thread for each stage."""
    own = {"process": "all", "loop": "own"}
    plan = deployment(source={**own, "tensor_bytes": 300_000}, relay=own, sink=own)
    return msgspec.structs.replace(plan, bus=msgspec.structs.replace(plan.bus, step_s=step_s))


@contextlib.contextmanager
def all_ready(broker: ScriptedBroker, step_s: float = 0.0) -> Iterator[WorkerProcess]:
    broker.run_dir.write(threaded(step_s))
    process = WorkerProcess(broker.run_dir, "all.0", grace_s=60)
    try:
        for stage in STAGES:
            broker.expect(Register, worker=f"{stage}.0", pid=process.pid)
        for stage in STAGES:
            broker.expect(events.Ready, stage=stage)
        yield process
    finally:
        process.process.kill()
        process.process.wait(PATIENCE_S)


def opened(request: int, stage: str, inputs: tuple[str, ...], outputs: tuple[EdgeRoute, ...]) -> Open:
    return Open(request=request, stage=stage, options=RequestOptions(), deadline_s=600.0, inputs=inputs, outputs=outputs)


def ask(broker: ScriptedBroker, request: int, payload: bytes) -> None:
    """Of the source alone: text for the client, and tensors that go on to the relay."""
    outputs = (EdgeRoute(TEXT, "inline", 64), EdgeRoute(ON, "shm", 64))
    broker.send("source.0", opened(request, "source", (IN,), outputs))
    broker.send("source.0", Chunk(request, IN, 0, True), payload)


def hand_on(broker: ScriptedBroker, request: int) -> None:
    """What the source sends to the relay, until the relay is done with it."""
    broker.send("relay.0", opened(request, "relay", (ON,), (EdgeRoute("relay->sink", "shm", 64),)))
    last = False
    while not last:
        chunk, payload = broker.expect(Chunk, request=request, edge=ON)
        assert isinstance(chunk, Chunk)
        broker.send("relay.0", chunk, *payload)
        last = chunk.last
    broker.expect(Done, request=request, stage="relay")


def test_a_drained_worker_leaves_and_the_others_serve_until_a_signal(broker: ScriptedBroker, say: Say) -> None:
    with all_ready(broker) as process:
        ask(broker, 1, say("one two"))
        hand_on(broker, 1)
        assert len(process.segments()) == 2, "source and relay send, each through memory of its own"
        for stage in ("source", "relay"):
            broker.send(f"{stage}.0", events.Close(1, stage))
            broker.holds_nothing(f"{stage}.0", stage)
        broker.send("sink.0", Drain())
        broker.send("sink.0", Shutdown())
        ask(broker, 2, say("three"))
        hand_on(broker, 2)
        assert process.process.poll() is None
        assert process.stop(signal.SIGTERM) == 0
        assert process.segments() == [] and "ended" not in process.log.read_text()


def test_a_worker_that_is_sent_away_takes_the_others_with_it(broker: ScriptedBroker) -> None:
    """It would be missing, and nobody would start it again while its process lives."""
    with all_ready(broker) as process:
        broker.send("relay.0", Shutdown())
        assert process.process.wait(PATIENCE_S) == 0
        assert "relay.0 has ended, and with it end sink.0, source.0" in process.log.read_text()


def test_one_loop_that_hangs_is_noticed_though_the_others_go_round(broker: ScriptedBroker, say: Say) -> None:
    with all_ready(broker, step_s=2.0) as process:
        ask(broker, 1, say("!sleep:source:600000"))
        assert process.process.wait(PATIENCE_S) == 1
        log = process.log.read_text()
        assert "Timeout" in log and "in act" in log.partition("Timeout")[2], log


# ---- while they load

LOADING = """
import runpy, time
from omni_bus.errors import CheckpointError
from omni_bus.stages.probe import stages
from omni_bus.workers import threads
def load(self, ctx):
    ctx.progress(0.5, "loading")
    if ctx.stage == {broken!r}:
        raise CheckpointError("weights: no such thing")
    time.sleep(600)
for kind in (stages.Source, stages.Relay, stages.Sink):
    kind.load = load
runpy.run_module("omni_bus.workers", run_name="__main__", alter_sys=True)
"""


@contextlib.contextmanager
def loading(run_dir: RunDir, broken: str = "") -> Iterator[subprocess.Popen[str]]:
    """`broken`: a stage whose load fails; those of the others take for ever."""
    run_dir.write(threaded())
    script = LOADING.format(broken=broken)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir.path), "all.0", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_signal_ends_a_load_at_once(broker: ScriptedBroker) -> None:
    with loading(broker.run_dir) as process:
        told: set[str] = set()
        until = time.monotonic() + PATIENCE_S
        while told != {f"{stage}.0" for stage in STAGES}:
            assert broker.socket.poll(1000 * max(0.0, until - time.monotonic())), told
            worker, header, *_ = broker.socket.recv_multipart()
            if isinstance(from_worker(header), events.Load):
                told.add(worker.decode())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_what_the_user_can_mend_is_the_last_line_whatever_the_others_do(broker: ScriptedBroker) -> None:
    with loading(broker.run_dir, broken="relay") as process:
        assert process.wait(PATIENCE_S) == 2
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == "relay.0: weights: no such thing"


# ---- its parts


def test_a_thread_is_told_by_flags_and_woken_by_a_descriptor() -> None:
    stop = ThreadStop()
    stop.clear()
    stop.tell(raised=False, leave=True)
    assert (stop.raised, stop.leave) == (False, True) and os.eventfd_read(stop.fd) == 1
    stop.tell(raised=True)
    stop.tell(raised=False)
    assert (stop.raised, stop.leave) == (True, True)
    stop.clear()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(stop.fd)
    os.close(stop.fd)


def test_the_timer_of_a_process_is_set_for_the_loop_that_is_due_first(monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[float] = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda seconds, **said: armed.append(seconds))
    monkeypatch.setattr(watchdog, "_due", {})

    def run(*calls: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=lambda: [call() for call in calls], daemon=True)
        thread.start()
        return thread

    looked, done = threading.Event(), threading.Event()
    watchdog.Watchdog(1000.0).looked()
    slow = run(lambda: watchdog.Watchdog(5000.0).looked(), looked.set, lambda: done.wait(PATIENCE_S))
    assert looked.wait(PATIENCE_S)
    run(lambda: watchdog.Watchdog(500.0).looked(), watchdog.loop_is_over).join(PATIENCE_S)
    run(watchdog.loop_is_over).join(PATIENCE_S)  # of a loop without a limit
    done.set()
    slow.join(PATIENCE_S)
    assert [round(seconds, -2) for seconds in armed] == [1000, 1000, 500, 1000]


def test_what_watched_a_load_rests_until_the_loop_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress may be told by another thread than the one that loads; and with `bus.step_s = 0` no loop takes the timer over."""
    armed: list[float | None] = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda seconds, **said: armed.append(seconds))
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", lambda: armed.append(None))
    monkeypatch.setattr(watchdog, "_due", {})
    load = watchdog.Watchdog(1000.0)
    load.looked()
    teller = threading.Thread(target=load.looked)
    teller.start()
    teller.join(PATIENCE_S)
    load.rest()
    load.rest()
    assert [seconds and round(seconds, -2) for seconds in armed] == [1000, 1000, None]
