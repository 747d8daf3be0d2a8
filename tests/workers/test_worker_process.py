"""A real worker process under a scripted broker."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import msgspec
import pytest

from omni_bus import events, wire
from omni_bus.deployment import RunDir
from omni_bus.events import Cancel, Cancelled, Chunk, Close, Consumed, Done, EdgeRoute, Failed, Open, RequestOptions, TensorRef
from omni_bus.payloads import AudioDelta, TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.segments import SHM, boot_id
from omni_bus.stages.probe.spec import ProbeWord
from tests.support.running_server import eventually
from tests.support.worker_process import PATIENCE_S, ScriptedBroker, WorkerProcess, deployment

StartWorker = Callable[..., WorkerProcess]
Say = Callable[[str], bytes]

IN, RELAY, TEXT, SINK, AUDIO = "client->source", "source->relay", "source->client", "relay->sink", "sink->client"
BIG = 100_000  # bytes of a tensor that does not go inline


def open_source(request: int, *, relay: str | None = "shm", credits: int = 64, **options: object) -> Open:
    outputs = [EdgeRoute(TEXT, "inline", credits)]
    if relay is not None:
        outputs.append(EdgeRoute(RELAY, relay, credits))
    return Open(
        request=request,
        stage="source",
        options=RequestOptions(**options),  # type: ignore[arg-type]
        deadline_s=60.0,
        inputs=(IN,),
        outputs=tuple(outputs),
    )


def open_relay(request: int) -> Open:
    outputs = (EdgeRoute(SINK, "inline", 4),)
    return Open(request=request, stage="relay", options=RequestOptions(), deadline_s=60.0, inputs=(RELAY,), outputs=outputs)


def word(text: str) -> bytes:
    return wire.encode(ProbeWord(text))


def chunks(found: list[events.Event], edge: str) -> list[int]:
    """Their numbers."""
    return [event.seq for event in found if isinstance(event, Chunk) and event.edge == edge]


def decoded(frames: list[bytes], kind: type[msgspec.Struct]) -> msgspec.Struct:
    return msgspec.msgpack.decode(frames[0], type=kind)


def test_words_leave_in_order_with_sequence_numbers_and_one_end(
    shared: ScriptedBroker, source: WorkerProcess, say: Say
) -> None:
    shared.send("source.0", open_source(1))
    shared.send("source.0", Chunk(1, IN, 0, True), say("one two three"))
    for seq, text in enumerate(("one ", "two ", "three ")):
        event, frames = shared.expect(Chunk, request=1, edge=TEXT)
        assert isinstance(event, Chunk) and (event.seq, event.last) == (seq, seq == 2)
        delta = decoded(frames, TextDelta)
        assert isinstance(delta, TextDelta)
        assert (delta.text, delta.finish_reason) == (text, "stop" if seq == 2 else None)
        event, frames = shared.expect(Chunk, request=1, edge=RELAY)
        assert isinstance(event, Chunk) and (event.seq, event.last) == (seq, seq == 2)
        assert decoded(frames, ProbeWord) == ProbeWord(text.strip())
    assert shared.expect(Consumed, request=1)[0] == Consumed(1, IN, 1)
    done, _ = shared.expect(Done, request=1)
    assert done == Done(1, "source", {"prompt_tokens": 3, "completion_tokens": 3})
    shared.send("source.0", Close(1, "source"))
    shared.holds_nothing("source.0", "source")
    assert shared.silence(0.3) == []


def test_sampling_is_the_deployments_under_the_requests(broker: ScriptedBroker, start_worker: StartWorker, say: Say) -> None:
    start_worker("source.0", source={"sampling": SamplingParams(max_tokens=2)})
    for request, asked in ((1, None), (2, 3)):
        sampling = {"source": SamplingParams(max_tokens=asked)}
        broker.send("source.0", open_source(request, relay=None, sampling=sampling))
        broker.send("source.0", Chunk(request, IN, 0, True), say("a b c d e"))
    first, _ = broker.expect(Done, request=1)
    second, _ = broker.expect(Done, request=2)
    assert isinstance(first, Done) and isinstance(second, Done)
    assert (first.usage["completion_tokens"], second.usage["completion_tokens"]) == (2, 3)


def test_a_flooding_producer_stops_at_its_credits_and_goes_on_with_new_ones(
    shared: ScriptedBroker, source: WorkerProcess, say: Say
) -> None:
    shared.send("source.0", open_source(1, credits=3))
    shared.send("source.0", Chunk(1, IN, 0, True), say("!repeat:50"))
    sent = shared.silence(0.5, lambda found: len(chunks(found, RELAY)) >= 3 <= len(chunks(found, TEXT)))
    assert chunks(sent, RELAY) == chunks(sent, TEXT) == [0, 1, 2]
    shared.load("source.0", "source", segments_used=3)

    shared.send("source.0", Consumed(1, TEXT, 3))
    assert [event for event in shared.silence(0.3) if isinstance(event, Chunk)] == []  # the other edge still holds it

    shared.send("source.0", Consumed(1, RELAY, 2))
    sent = shared.silence(0.5, lambda found: len(chunks(found, RELAY)) >= 2 <= len(chunks(found, TEXT)))
    assert chunks(sent, RELAY) == chunks(sent, TEXT) == [3, 4]
    shared.load("source.0", "source", segments_used=3)

    # One request out of credit holds up nobody else.
    shared.send("source.0", open_source(2, credits=3))
    shared.send("source.0", Chunk(2, IN, 0, True), say("a b"))
    shared.expect(Done, request=2)

    shared.send("source.0", Cancel(1, "source"))
    assert shared.expect(Cancelled)[0] == Cancelled(1, "source")
    shared.send("source.0", Close(2, "source"))
    shared.holds_nothing("source.0", "source")


def test_a_full_pool_makes_chunks_wait_and_returned_slots_send_them(
    broker: ScriptedBroker, start_worker: StartWorker, say: Say
) -> None:
    """Tensors of 60 MiB: four fit into the 256 MiB of a process, whatever the credits say."""
    start_worker("source.0", source={"tensor_bytes": 60 << 20})
    for request in (1, 2):
        broker.send("source.0", open_source(request, credits=50))
        broker.send("source.0", Chunk(request, IN, 0, True), say("a b c"))
    found = broker.silence(1.0, lambda found: len(chunks(found, RELAY)) >= 4)
    sent = [event for event in found if isinstance(event, Chunk) and event.edge == RELAY]
    assert sorted((event.request, event.seq) for event in sent) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    broker.send("source.0", Consumed(2, RELAY, 1))
    event, _ = broker.expect(Chunk, edge=RELAY)
    assert isinstance(event, Chunk) and (event.request, event.seq) == (1, 2)  # first come, first served
    broker.send("source.0", Cancel(1, "source"))
    event, _ = broker.expect(Chunk, edge=RELAY)
    assert isinstance(event, Chunk) and (event.request, event.seq, event.last) == (2, 2, True)
    broker.expect(Done, request=2)
    broker.send("source.0", Close(2, "source"))
    broker.holds_nothing("source.0", "source")


def test_a_tensor_that_can_never_fit_fails_its_request(broker: ScriptedBroker, start_worker: StartWorker, say: Say) -> None:
    start_worker("source.0", source={"tensor_bytes": 300 << 20})
    broker.send("source.0", open_source(1))
    broker.send("source.0", Chunk(1, IN, 0, True), say("a"))
    failed, _ = broker.expect(Failed)
    assert isinstance(failed, Failed) and failed.error.code == "too_large"
    broker.send("source.0", open_source(2, relay=None))
    broker.send("source.0", Chunk(2, IN, 0, True), say("a"))
    broker.expect(Done, request=2)


def test_cancel_is_acknowledged_when_everything_is_free_and_nothing_follows(
    shared: ScriptedBroker, source: WorkerProcess, say: Say
) -> None:
    for request in range(20):
        shared.send("source.0", open_source(request))
        shared.send("source.0", Chunk(request, IN, 0, True), say("!repeat:1000"))
    for request in range(20):
        shared.expect(Chunk, request=request, edge=RELAY)
    assert shared.load("source.0", "source").segments_used > 0
    acknowledged = set()
    for request in range(20):
        shared.send("source.0", Cancel(request, "source"))
        shared.send("source.0", Chunk(request, IN, 1, True), say("late"))
        shared.send("source.0", Consumed(request, RELAY, 1))
    for event in shared.silence(0.5, lambda found: sum(isinstance(event, Cancelled) for event in found) >= 20):
        if isinstance(event, Cancelled):
            acknowledged.add(event.request)
        else:
            assert isinstance(event, Chunk | Consumed) and event.request not in acknowledged
    assert acknowledged == set(range(20))
    shared.holds_nothing("source.0", "source")
    shared.send("source.0", Cancel(99, "source"))  # a request that never came here is free here
    assert shared.expect(Cancelled)[0] == Cancelled(99, "source")


@pytest.mark.parametrize("fault", ["!raise:source", "!panic:source"])
def test_an_exception_in_a_stage_fails_requests_and_never_the_process(
    shared: ScriptedBroker, source: WorkerProcess, say: Say, fault: str
) -> None:
    shared.send("source.0", open_source(1, credits=2))
    shared.send("source.0", Chunk(1, IN, 0, True), say("a b c d"))  # stops at its credits
    shared.expect(Chunk, request=1, edge=RELAY, seq=1)
    shared.send("source.0", open_source(2))
    shared.send("source.0", Chunk(2, IN, 0, True), say(f"a {fault} b"))
    failed, _ = shared.expect(Failed, request=2)
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.error.message) == ("stage_failed", "stage source failed")  # no text of the exception
    if fault.startswith("!panic"):
        shared.expect(Failed, request=1)
    else:
        shared.send("source.0", Consumed(1, RELAY, 2))
        shared.send("source.0", Consumed(1, TEXT, 2))
        shared.expect(Done, request=1)
    shared.send("source.0", Cancel(1, "source"))
    shared.send("source.0", Cancel(2, "source"))
    shared.expect(Cancelled, request=1)
    shared.expect(Cancelled, request=2)
    shared.send("source.0", open_source(3))
    shared.send("source.0", Chunk(3, IN, 0, True), say("a"))
    shared.expect(Done, request=3)
    shared.send("source.0", Close(3, "source"))
    shared.holds_nothing("source.0", "source")
    assert "told to" in source.log.read_text()


WRONG_CHUNKS: list[tuple[Chunk, list[bytes], str | None]] = [
    (Chunk(1, RELAY, 1, False), [word("a")], "sequence_gap"),
    (Chunk(1, RELAY, 0, False), [], "protocol_violation"),
    (Chunk(1, RELAY, 0, False), [b"\xc1"], "protocol_violation"),
    (Chunk(1, RELAY, 0, False), [wire.encode(AudioDelta(3))], "protocol_violation"),
    (Chunk(1, SINK, 0, False), [word("a")], None),  # an edge of a stage that is not here
    (Chunk(1, "a->b", 0, False), [word("a")], None),
    (Chunk(1, RELAY, 0, False, (TensorRef("x", "tcp", "int8", (1,), 1),)), [word("a")], "protocol_violation"),
    (Chunk(1, RELAY, 0, False, (TensorRef("x", "inline", "int8", (1,), 1, offset=1),)), [word("a")], "protocol_violation"),
    (
        Chunk(1, RELAY, 0, False, (TensorRef("x", "inline", "int8", (2,), 2, offset=1),)),
        [word("a"), b"1"],
        "protocol_violation",
    ),
    (
        Chunk(1, RELAY, 0, False, (TensorRef("x", "inline", "junk", (1,), 1, offset=1),)),
        [word("a"), b"1"],
        "protocol_violation",
    ),
    (
        Chunk(1, RELAY, 0, False, (TensorRef("x", "inline", "int8", (-1, -1), 1, offset=1),)),
        [word("a"), b"1"],
        "protocol_violation",
    ),
    (
        Chunk(1, RELAY, 0, False, (TensorRef("x", "shm", "int8", (1,), 1, "../etc/passwd", 80, 1),)),
        [word("a")],
        "protocol_violation",
    ),
    (
        Chunk(1, RELAY, 0, False, (TensorRef("x", "shm", "int8", (1,), 1, f"omnibus-t-{boot_id()}-1-0", 80, 1),)),
        [word("a")],
        "stale_tensor",
    ),
    (Chunk(1, RELAY, 0, False, (TensorRef("x", "local", "int8", (1,), 1, "", 0, 1),)), [word("a")], "stale_tensor"),
]


def test_a_wrong_chunk_fails_its_request_with_a_name(broker: ScriptedBroker, start_worker: StartWorker) -> None:
    start_worker("relay.0")
    for request, (chunk, frames, code) in enumerate(WRONG_CHUNKS):
        broker.send("relay.0", open_relay(request))
        broker.send("relay.0", msgspec.structs.replace(chunk, request=request), *frames)
        if code is not None:
            failed, _ = broker.expect(Failed)
            assert isinstance(failed, Failed) and (failed.request, failed.error.code) == (request, code), chunk
        broker.send("relay.0", Cancel(request, "relay"))
        broker.expect(Cancelled, request=request)
    broker.send("relay.0", open_relay(99))
    broker.send("relay.0", Chunk(99, RELAY, 0, True), word("well"))
    broker.expect(Done, request=99)


def test_every_kind_of_malformed_message_leaves_the_worker_at_work(
    shared: ScriptedBroker, source: WorkerProcess, say: Say
) -> None:
    shared.send_raw("source.0", b"")
    shared.send_raw("source.0", b"\xc1\x00 no event")
    shared.send_raw("source.0", wire.encode(events.Hello("client")))  # an event, but not one for a worker
    shared.send_raw("source.0", wire.encode(Cancel(1, "source"))[:-3])
    shared.send("source.0", Cancel(1, "nobody"))
    shared.send("source.0", Consumed(1, "a->b", 1))
    shared.send("source.0", Consumed(1, IN, 1))
    shared.send("source.0", open_relay(1))
    shared.send("source.0", Chunk(7, IN, 0, True))
    shared.send("source.0", open_source(2, credits=0))
    shared.expect(Failed, request=2)
    shared.send("source.0", open_source(3, relay="carrier pigeon"))
    shared.expect(Failed, request=3)
    shared.send("source.0", open_source(4))
    shared.send("source.0", open_source(4))
    shared.expect(Failed, request=4)
    shared.send("source.0", open_source(5))
    shared.send("source.0", Consumed(5, RELAY, 1))
    shared.expect(Failed, request=5)
    shared.send("source.0", open_source(6))
    shared.send("source.0", Chunk(6, IN, 0, True), say("a"))
    shared.expect(Done, request=6)
    assert source.process.poll() is None


def test_a_duplicate_and_a_chunk_after_the_last_are_named(broker: ScriptedBroker, start_worker: StartWorker) -> None:
    start_worker("relay.0")
    for request, second in ((1, Chunk(1, RELAY, 0, False)), (2, Chunk(2, RELAY, 1, False))):
        broker.send("relay.0", open_relay(request))
        broker.send("relay.0", Chunk(request, RELAY, 0, request == 2), word("!hang:relay"))
        broker.send("relay.0", second, word("b"))
    first, _ = broker.expect(Failed, request=1)
    after, _ = broker.expect(Failed, request=2)
    assert isinstance(first, Failed) and isinstance(after, Failed)
    assert (first.error.code, after.error.code) == ("sequence_duplicate", "protocol_violation")


def test_grouped_stages_hand_tensors_over_by_reference(broker: ScriptedBroker, start_worker: StartWorker, say: Say) -> None:
    group: dict[str, object] = {"process": "all", "tensor_bytes": BIG}
    worker = start_worker("all.0", source=group, relay=group, sink=group)
    broker.send("all.0", open_source(1, relay="local"))
    options = RequestOptions()
    broker.send(
        "all.0",
        Open(
            request=1, stage="relay", options=options, deadline_s=60.0, inputs=(RELAY,), outputs=(EdgeRoute(SINK, "local", 8),)
        ),
    )
    broker.send(
        "all.0",
        Open(
            request=1, stage="sink", options=options, deadline_s=60.0, inputs=(SINK,), outputs=(EdgeRoute(AUDIO, "inline", 8),)
        ),
    )
    broker.send("all.0", Chunk(1, IN, 0, True), say("a b c"))
    for edge in (RELAY, SINK):
        for _ in range(3):
            event, frames = broker.expect(Chunk, edge=edge)
            assert isinstance(event, Chunk) and [ref.connector for ref in event.refs] == ["local"] and len(frames) == 1
            broker.send("all.0", event, *frames)
            consumed, _ = broker.expect(Consumed, edge=edge)
            broker.send("all.0", consumed)
    for seq in range(3):
        event, frames = broker.expect(Chunk, edge=AUDIO, seq=seq)
        assert isinstance(event, Chunk)
        assert [(ref.name, ref.dtype, ref.shape, ref.offset) for ref in event.refs] == [("pcm", "int16", (1920,), 1)]
        assert frames[1] == (seq + 1).to_bytes(2, "little") * 1920
    for stage in ("source", "relay", "sink"):
        broker.expect(Done, stage=stage)
        broker.send("all.0", Close(1, stage))
    load = broker.holds_nothing("all.0", "source")
    assert load.chunks == {f"{TEXT}|inline": 3, f"{RELAY}|local": 3}
    assert load.bytes[f"{RELAY}|local"] == 3 * BIG
    assert worker.segments() == []


def test_two_processes_share_tensors_and_a_killed_one_is_swept(
    broker: ScriptedBroker, start_worker: StartWorker, run_dir: RunDir, say: Say
) -> None:
    source = start_worker("source.0", source={"tensor_bytes": BIG})
    relay = start_worker("relay.0", source={"tensor_bytes": BIG})
    broker.send("source.0", open_source(1, credits=2))
    broker.send("source.0", Chunk(1, IN, 0, True), say("a b c"))
    broker.send("relay.0", msgspec.structs.replace(open_relay(1), outputs=(EdgeRoute(SINK, "inline", 9),)))
    event, frames = broker.expect(Chunk, edge=RELAY)
    assert isinstance(event, Chunk) and event.refs[0].connector == "shm"
    broker.send("relay.0", event, *frames)
    event, frames = broker.expect(Chunk, edge=SINK)
    assert (
        len(frames) == 2 and len(frames[1]) == BIG and set(frames[1][i : i + 4] for i in range(0, BIG, 4)) == {b"\0\0\x80\x3f"}
    )
    assert len(source.segments()) == 1 and oct(source.segments()[0].stat().st_mode & 0o777) == "0o600"
    assert _mapped(relay, source) == 1

    source.stop(signal.SIGKILL)
    assert len(source.segments()) == 1
    start_worker("source.0", source={"tensor_bytes": BIG})
    assert source.segments() == []
    eventually(lambda: _mapped(relay, source) == 0, PATIENCE_S, "the dead one's memory is unmapped")


def _mapped(worker: WorkerProcess, owner: WorkerProcess) -> int:
    maps = pathlib.Path(f"/proc/{worker.pid}/maps").read_text()
    return sum("/dev/shm/omnibus-" in line and f"-{owner.pid}-" in line for line in maps.splitlines())


def test_an_idle_worker_sleeps(shared: ScriptedBroker, source: WorkerProcess, say: Say) -> None:
    shared.send("source.0", open_source(1, credits=1))
    shared.send("source.0", Chunk(1, IN, 0, True), say("a b"))  # a paused row is no work either
    shared.silence(0.5, lambda found: chunks(found, TEXT) == chunks(found, RELAY) == [0])
    before, started = source.cpu_s(), time.monotonic()
    shared.silence(0.0)
    time.sleep(2.0)
    assert (source.cpu_s() - before) / (time.monotonic() - started) < 0.05


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_worker_in_order(
    broker: ScriptedBroker, start_worker: StartWorker, say: Say, number: signal.Signals
) -> None:
    worker = start_worker("source.0", source={"tensor_bytes": BIG})
    broker.send("source.0", open_source(1))
    broker.send("source.0", Chunk(1, IN, 0, True), say("!repeat:1000"))
    broker.expect(Chunk, edge=RELAY)
    assert worker.segments()
    assert worker.stop(number) == 0
    assert worker.segments() == []


def test_drain_lets_a_worker_finish_and_shutdown_ends_it(broker: ScriptedBroker, start_worker: StartWorker, say: Say) -> None:
    source = start_worker("source.0")
    broker.send("source.0", open_source(1, credits=1))
    broker.send("source.0", Chunk(1, IN, 0, True), say("a b"))
    broker.expect(Chunk, edge=TEXT)
    broker.expect(Chunk, edge=RELAY)
    broker.send("source.0", events.Drain())
    broker.send("source.0", Consumed(1, TEXT, 1))
    broker.send("source.0", Consumed(1, RELAY, 1))
    broker.expect(Done, request=1)
    assert source.process.poll() is None
    broker.send("source.0", Close(1, "source"))
    broker.holds_nothing("source.0", "source")
    broker.send("source.0", events.Shutdown())
    assert source.process.wait(PATIENCE_S) == 0


def test_a_step_that_never_returns_does_not_outlive_sigterm(
    broker: ScriptedBroker, start_worker: StartWorker, say: Say
) -> None:
    worker = start_worker("source.0", grace_s=None)
    broker.send("source.0", open_source(1))
    broker.send("source.0", Chunk(1, IN, 0, True), say("a !sleep:source:60000 b"))
    broker.expect(Chunk, edge=TEXT)
    while broker.receive(2.0):  # until no heartbeat comes: the step is in its sleep
        pass
    assert worker.stop() == -signal.SIGALRM


def test_a_worker_ends_with_its_parent(broker: ScriptedBroker, run_dir: RunDir) -> None:
    run_dir.write(deployment())
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import subprocess, sys
                child = subprocess.Popen([sys.executable, "-m", "omni_bus.workers", sys.argv[1], "sink.0", "0"])
                print(child.pid, flush=True)
                child.wait()
                """
            ),
            str(run_dir.path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    broker.expect(events.Ready)
    parent.kill()
    parent.wait()
    assert select.select([child], [], [], PATIENCE_S)[0], "the worker lives on"
    os.close(child)
    parent.stdout.close()


def test_a_new_broker_is_greeted_and_the_old_ones_requests_are_forgotten(
    broker: ScriptedBroker, start_worker: StartWorker, run_dir: RunDir, say: Say
) -> None:
    start_worker("source.0", source={"tensor_bytes": BIG})
    broker.send("source.0", open_source(1, credits=2))
    broker.send("source.0", Chunk(1, IN, 0, True), say("a b c"))
    broker.expect(Chunk, edge=RELAY, seq=1)
    broker.socket.close()
    second = ScriptedBroker(run_dir)
    try:
        second.expect(events.Register, worker="source.0")
        second.expect(events.Ready, stage="source")
        second.holds_nothing("source.0", "source")
        second.send("source.0", open_source(1))
        second.send("source.0", Chunk(1, IN, 0, True), say("x"))
        event, _ = second.expect(Chunk, edge=TEXT)
        assert isinstance(event, Chunk) and event.seq == 0
        second.expect(Done, request=1)
    finally:
        second.socket.close()


@pytest.mark.parametrize(
    ("name", "stages", "message"),
    [
        ("surce.0", {}, "no worker 'surce.0' in this deployment (did you mean \"source.0\"?)"),
        ("source.0", {"source": {"devices": ("cuda:97",)}}, "cuda:97"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(
    run_dir: RunDir, broker: ScriptedBroker, name: str, stages: dict[str, dict[str, object]], message: str
) -> None:
    run_dir.write(deployment(**stages))  # type: ignore[arg-type]
    ended = subprocess.run(
        [sys.executable, "-m", "omni_bus.workers", str(run_dir.path), name, "0"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert message in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr


def test_dead_owners_segments_are_swept_at_start_and_no_others(broker: ScriptedBroker, start_worker: StartWorker) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = SHM / f"omnibus-gone-{boot_id()}-{dead.pid}-0"
    alive = SHM / f"omnibus-here-{boot_id()}-{os.getpid()}-0"
    foreign = SHM / f"someoneelse-{dead.pid}-0"
    try:
        for path in (stale, alive, foreign):
            path.write_bytes(b"x")
        start_worker("sink.0")
        assert [path.exists() for path in (stale, alive, foreign)] == [False, True, True]
    finally:
        for path in (stale, alive, foreign):
            path.unlink(missing_ok=True)
