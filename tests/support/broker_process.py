"""The broker in a process of its own, and scripted peers for it on the test's own event loop."""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import zmq

from omni_bus import events, wire
from omni_bus.deployment import Deployment, RunDir
from omni_bus.pump import Pump

PATIENCE_S = 120.0
EventT = TypeVar("EventT", bound=events.Event)


class BrokerProcess:
    """`python -m omni_bus.broker_main` on a run directory."""

    def __init__(self, run_dir: RunDir, plan: Deployment) -> None:
        run_dir.write(plan)
        self.run_dir = run_dir
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.run_dir.log("broker").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "omni_bus.broker_main", str(self.run_dir.path)], stdout=log, stderr=log
            )

    def restart(self) -> None:
        """Kill it, with all it holds, and start another."""
        self.kill()
        self.process = self._start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    @property
    def log(self) -> str:
        return self.run_dir.log("broker").read_text()

    def cpu_s(self) -> float:
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Peer:
    """A DEALER that says what the test says, and keeps what it hears until the test asks for it."""

    def __init__(
        self,
        endpoint: str,
        decoder: wire.HeaderDecoder[events.Event],
        name: bytes = b"",
        prepare: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
    ) -> None:
        """`prepare` is given the socket before it is connected."""
        self._decoder = decoder
        self._heard: list[tuple[events.Event, list[bytes]]] = []
        self._news = asyncio.Event()
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if name:
            self.socket.setsockopt(zmq.ROUTING_ID, name)
        prepare(self.socket)
        self.socket.connect(endpoint)
        self._pump = Pump(asyncio.get_running_loop(), self.socket, self._on_message)

    def say(self, event: events.Event, *frames: bytes) -> None:
        self._pump.send([wire.encode(event), *frames])

    def say_raw(self, *frames: bytes) -> None:
        self._pump.send(frames)

    async def hear(self, kind: type[EventT], **fields: object) -> EventT:
        """The first event of that kind with those fields; what came before it stays to be heard."""
        return (await self.hear_frames(kind, **fields))[0]

    async def hear_frames(self, kind: type[EventT], **fields: object) -> tuple[EventT, list[bytes]]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for index, (event, frames) in enumerate(self._heard):
                    if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                        del self._heard[index]
                        return event, frames
                self._news.clear()
                await self._news.wait()

    def heard(self, kind: type[EventT]) -> list[EventT]:
        """What has come of that kind and was not asked for."""
        return [event for event, _ in self._heard if isinstance(event, kind)]

    def close(self) -> None:
        if not self.socket.closed:
            self._pump.close()
            self.socket.close()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        self._heard.append((self._decoder(frames[0].buffer), [frame.bytes for frame in frames[1:]]))
        self._news.set()


class ScriptedWorker(Peer):
    """A worker process as the broker sees it; hosts the stages named."""

    def __init__(self, run_dir: RunDir, name: str, *stages: str) -> None:
        super().__init__(run_dir.broker, wire.HeaderDecoder(events.BrokerToWorker), name.encode())
        self.name = name
        self.stages = stages or (name.split(".")[0],)
        self._seq: dict[tuple[int, str], itertools.count[int]] = {}

    def register(self) -> None:
        replicas = tuple(events.StageReplica(stage, "cpu", 4) for stage in self.stages)
        self.say(events.Register(worker=self.name, pid=os.getpid(), host="h", boot="b", replicas=replicas))
        for stage in self.stages:
            self.say(events.Ready(stage, 4))

    def chunk(self, request: int, edge: str, payload: bytes, *, last: bool = False) -> None:
        seq = next(self._seq.setdefault((request, edge), itertools.count()))
        self.say(events.Chunk(request, edge, seq, last), payload)
