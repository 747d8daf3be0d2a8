"""Every peer of a broker that is measured: a worker for each stage of the probe, and a client, as raw sockets on one thread."""

from __future__ import annotations

import os
import select
import struct
import time
from typing import Any

import zmq

from omni_bus import events, wire
from omni_bus.deployment import RunDir
from omni_bus.events import RequestOptions, StageReplica, TensorRef
from omni_bus.payloads import ChatInput, Message, TextPart
from omni_bus.spec import load_pipeline

PIPELINE = load_pipeline("probe")
STAGES = tuple(stage.name for stage in PIPELINE.stages)
ENTRY = PIPELINE.entry.name
EDGES = tuple(edge for edge in PIPELINE.edges if edge.source in STAGES)
STREAMS = 64
CLIENT_BATCH = 16  # chunks that a client acknowledges at once: a quarter of the usual 64 credits
PCM = bytes(3840)  # 80 ms of 24 kHz
PACKET = (TensorRef("pcm", "inline", "int16", (1920,), len(PCM), offset=1),)
STAMP = struct.Struct("<q")
START_MS = 30_000


class Peers:
    """Every peer of the broker, on one thread. Chunks of STREAMS running requests go through it as `send` is called."""

    def __init__(self, run_dir: RunDir) -> None:
        self._context = zmq.Context()
        self._workers = {stage: self._connect(run_dir, f"{stage}.0".encode()) for stage in STAGES}
        self._client = self._connect(run_dir, b"")
        self.events_in = 0
        self.latency: list[int] = []
        self.arrived = 0
        self._requests: list[int] = []
        self._seqs = {edge.name: [0] * STREAMS for edge in EDGES}
        self._unsaid = {edge.name: [0] * (STREAMS + 1) for edge in EDGES}  # by ticket
        self._begin()

    def _connect(self, run_dir: RunDir, name: bytes) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        if name:
            socket.setsockopt(zmq.ROUTING_ID, name)
        socket.connect(run_dir.broker)
        return socket

    def _say(self, socket: zmq.Socket[bytes], event: events.Event, *frames: bytes) -> None:
        socket.send_multipart((wire.encode(event), *frames))
        self.events_in += 1

    def _begin(self) -> None:
        """Stages ready, one request after the other submitted, opened at each stage and past its first chunks."""
        for stage, socket in self._workers.items():
            replica = StageReplica(stage, "cpu", STREAMS)
            self._say(socket, events.Register(worker=f"{stage}.0", pid=os.getpid(), host="here", boot="b", replicas=(replica,)))
            self._say(socket, events.Ready(stage, STREAMS))
        self._say(self._client, events.Hello("client"))
        self._until(self._client, wire.at_client, events.Welcome)
        status = None
        while status is None or not status.ready:  # a worker's events may come after the client's
            self._say(self._client, events.StatusQuery(1))
            status = self._until(self._client, wire.at_client, events.Status)
        options = RequestOptions(modalities=("text", "audio"))
        payload = wire.encode(ChatInput((Message("user", (TextPart("words"),)),)))
        for stream in range(STREAMS):
            self._say(self._client, events.Submit(stream + 1, "bench", options, 3600.0), payload)
            opened = [self._until(socket, wire.at_worker, events.Open) for socket in self._workers.values()]
            self._requests.append(opened[0].request)
            self._say(self._workers["source"], events.Consumed(opened[0].request, ENTRY, 1))
            for edge in range(len(EDGES)):
                self.send(edge, stream, time.monotonic_ns())
            while self.arrived < (stream + 1) * len(EDGES):
                if not self.read():
                    self.wait(1.0)

    def _until(self, socket: zmq.Socket[bytes], decode: wire.HeaderDecoder[Any], kind: type) -> Any:
        while socket.poll(START_MS):
            event = decode(socket.recv_multipart()[0])
            if isinstance(event, kind):
                return event
        raise RuntimeError(f"the broker sent no {kind.__name__} within {START_MS} ms")

    def send(self, edge: int, stream: int, due_ns: int) -> None:
        spec = EDGES[edge]
        seqs = self._seqs[spec.name]
        chunk = events.Chunk(
            self._requests[stream], spec.name, seqs[stream], False, PACKET if spec.source == STAGES[-1] else ()
        )
        seqs[stream] += 1
        frames = (wire.encode(chunk), STAMP.pack(due_ns), *((PCM,) if chunk.refs else ()))
        self._workers[spec.source].send_multipart(frames)
        self.events_in += 1

    def read(self) -> int:
        """What has come by now; how many messages."""
        count = 0
        for socket in self._workers.values():
            while (frames := _next(socket)) is not None:
                count += 1
                chunk = wire.at_worker(frames[0])
                if isinstance(chunk, events.Chunk) and chunk.edge != ENTRY:
                    self._arrived(frames[1])
                    self._say(socket, events.Consumed(chunk.request, chunk.edge, 1))
        while (frames := _next(self._client)) is not None:
            count += 1
            event = wire.at_client(frames[0])
            if isinstance(event, events.Delta):
                self._arrived(frames[1])
                unsaid = self._unsaid[event.edge]
                unsaid[event.ticket] += 1
                if unsaid[event.ticket] == CLIENT_BATCH:
                    unsaid[event.ticket] = 0
                    self._say(self._client, events.Consumed(event.ticket, event.edge, CLIENT_BATCH))
            elif isinstance(event, events.RequestFailed):
                raise RuntimeError(f"the broker failed a stream: {event.error.message}")
        return count

    def _arrived(self, stamp: bytes) -> None:
        self.latency.append(time.monotonic_ns() - STAMP.unpack(stamp)[0])
        self.arrived += 1

    def wait(self, seconds: float) -> None:
        """Until something may have come, or the time is over."""
        sockets = (self._client, *self._workers.values())
        select.select([socket.fileno() for socket in sockets], [], [], max(0.0, seconds))

    def close(self) -> None:
        self._context.destroy(linger=0)


def _next(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
