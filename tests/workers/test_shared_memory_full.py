"""A real worker process that the system gives no more shared memory: who needs it fails or waits, and nobody else notices.

The system is Linux's own limit on a file's size (RLIMIT_FSIZE), set on the running process: a segment cannot be made larger than that,
which is what a full /dev/shm says, too, and nothing else on this machine feels it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import psutil

from omni_bus import events
from omni_bus.events import Cancel, Cancelled, Chunk, Close, Consumed, Done, EdgeRoute, Failed, Open, RequestOptions
from tests.support.worker_process import ScriptedBroker, WorkerProcess

StartWorker = Callable[..., WorkerProcess]
Say = Callable[[str], bytes]

IN, RELAY, TEXT = "client->source", "source->relay", "source->client"
TENSOR = 8 << 20
SOME = 1 << 20  # bytes of a file; the log stays far below


def ask(broker: ScriptedBroker, request: int, payload: bytes, *, speech: bool) -> None:
    outputs = [EdgeRoute(TEXT, "inline", 64), *([EdgeRoute(RELAY, "shm", 64)] if speech else [])]
    options = RequestOptions()
    broker.send(
        "source.0",
        Open(request=request, stage="source", options=options, deadline_s=60.0, inputs=(IN,), outputs=tuple(outputs)),
    )
    broker.send("source.0", Chunk(request, IN, 0, True), payload)


def limit_files(worker: WorkerProcess, size: int) -> None:
    psutil.Process(worker.pid).rlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_without_a_first_segment_a_request_that_needs_one_is_refused_and_others_go_on(
    broker: ScriptedBroker, start_worker: StartWorker, say: Say
) -> None:
    worker = start_worker("source.0", source={"tensor_bytes": TENSOR})
    limit_files(worker, SOME)
    ask(broker, 1, say("a b"), speech=True)
    failed, _ = broker.expect(Failed)
    assert isinstance(failed, Failed)
    assert (failed.request, failed.error.code, failed.error.status) == (1, "overloaded", 503)
    assert "shared memory" in failed.error.message and "/" not in failed.error.message
    ask(broker, 2, say("text needs none of it"), speech=False)
    broker.expect(Done, request=2)
    broker.send("source.0", Cancel(1, "source"))
    broker.expect(Cancelled, request=1)
    broker.send("source.0", Close(2, "source"))
    broker.holds_nothing("source.0", "source")
    assert worker.segments() == [], "what could not be made whole is not left behind"

    limit_files(worker, resource.RLIM_INFINITY)
    ask(broker, 3, say("a b"), speech=True)
    broker.expect(Done, request=3)
    broker.send("source.0", Close(3, "source"))
    broker.holds_nothing("source.0", "source")


def test_where_segments_cannot_grow_chunks_wait_for_what_comes_back_and_none_is_lost(
    broker: ScriptedBroker, start_worker: StartWorker, say: Say
) -> None:
    worker = start_worker("source.0", source={"tensor_bytes": TENSOR})
    ask(broker, 1, say("first"), speech=True)
    broker.expect(Done, request=1)
    broker.send("source.0", Close(1, "source"))
    limit_files(worker, SOME)  # the first segment stands: 32 MiB, three tensors
    ask(broker, 2, say("a b c d e f"), speech=True)

    def sent(found: list[events.Event]) -> list[int]:
        return [event.seq for event in found if isinstance(event, Chunk) and (event.request, event.edge) == (2, RELAY)]

    assert sent(broker.silence(1.0, lambda found: len(sent(found)) >= 3)) == [0, 1, 2], "it waits where the segment is full"
    ask(broker, 3, say("x y"), speech=False)
    broker.expect(Done, request=3)
    for seq in (3, 4, 5):
        broker.send("source.0", Consumed(2, RELAY, 1))
        event, _ = broker.expect(Chunk, edge=RELAY)
        assert isinstance(event, Chunk) and (event.request, event.seq, event.last) == (2, seq, seq == 5)
    broker.expect(Done, request=2)
    for request in (2, 3):
        broker.send("source.0", Close(request, "source"))
    broker.holds_nothing("source.0", "source")
