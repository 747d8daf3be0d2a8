"""A worker process as the supervisor starts it, and a scripted broker for it: a bare ROUTER socket."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import zmq

from omni_bus import events, wire
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, EdgeConfig, ModelConfig, RunDir, StageConfig
from omni_bus.segments import SHM
from omni_bus.spec import load_pipeline

PATIENCE_S = 120.0
from_worker: wire.HeaderDecoder[events.Event] = wire.HeaderDecoder(events.WorkerToBroker)


class ScriptedBroker:
    """Speaks to worker processes as a broker would, one event at a time. `load`s and heartbeats are kept apart."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(run_dir.broker)
        self.inbox: collections.deque[tuple[str, events.Event, list[bytes]]] = collections.deque()
        self.heartbeats: dict[str, events.Heartbeat] = {}

    def send(self, worker: str, event: events.Event, *frames: bytes) -> None:
        self.socket.send_multipart([worker.encode(), wire.encode(event), *frames])

    def send_raw(self, worker: str, *frames: bytes) -> None:
        self.socket.send_multipart([worker.encode(), *frames])

    def receive(self, timeout_s: float) -> bool:
        """Read one message into the inbox, or the heartbeats."""
        if not self.socket.poll(max(0, math.ceil(timeout_s * 1000))):
            return False
        worker, header, *payload = self.socket.recv_multipart()
        event = from_worker(header)
        if isinstance(event, events.Heartbeat):
            self.heartbeats[worker.decode()] = event
        elif not isinstance(event, events.Load):
            self.inbox.append((worker.decode(), event, payload))
        return True

    def expect(self, kind: type[events.Event], **fields: object) -> tuple[events.Event, list[bytes]]:
        """The first event of that kind with those fields; events before it stay in the inbox, in order."""
        until = time.monotonic() + PATIENCE_S
        seen = 0
        while True:
            for index in range(seen, len(self.inbox)):
                _, event, payload = self.inbox[index]
                if type(event) is kind and all(getattr(event, name) == value for name, value in fields.items()):
                    del self.inbox[index]
                    return event, payload
            seen = len(self.inbox)
            if not self.receive(until - time.monotonic()):
                raise AssertionError(f"no {kind.__name__} {fields}; there is {[entry[1] for entry in self.inbox]}")

    def silence(self, seconds: float, after: Callable[[list[events.Event]], bool] = lambda found: True) -> list[events.Event]:
        """What is in the inbox once `after` holds of it and then nothing but heartbeats has come for so long.

        What is bound to come belongs into `after`: a process that is not given the CPU is silent, too.
        """
        until = time.monotonic() + PATIENCE_S
        while not after([event for _, event, _ in self.inbox]):
            assert self.receive(until - time.monotonic()), f"not all has come: {[entry[1] for entry in self.inbox]}"
        count, until = -1, 0.0
        while True:
            if len(self.inbox) != count:
                count, until = len(self.inbox), time.monotonic() + seconds
            if not self.receive(until - time.monotonic()):
                break
        found = [event for _, event, _ in self.inbox]
        self.inbox.clear()
        return found

    def load(self, worker: str, stage: str, **figures: object) -> events.StageLoad:
        """The figures of the next heartbeat that has these among them: one may have left before the worker read what was sent."""
        until = time.monotonic() + PATIENCE_S
        told = None
        while True:
            self.heartbeats.pop(worker, None)
            while worker not in self.heartbeats:
                assert self.receive(until - time.monotonic()), f"no heartbeat says {figures}; the last one: {told}"
            told = next(load for load in self.heartbeats[worker].loads if load.stage == stage)
            if all(getattr(told, name) == value for name, value in figures.items()):
                return told

    def holds_nothing(self, worker: str, stage: str) -> events.StageLoad:
        """Wait until a heartbeat says that the stage holds no segment, no event and no slot; its figures."""
        return self.load(worker, stage, segments_used=0, held=0, slots_used=0)


PATIENT = """
import runpy
from omni_bus.workers import stop_signal
stop_signal.GRACE_S = {grace_s}
runpy.run_module("omni_bus.workers", run_name="__main__", alter_sys=True)
"""


class WorkerProcess:
    """`python -m omni_bus.workers` in a process of its own, its log beside the deployment."""

    def __init__(self, run_dir: RunDir, name: str, *, grace_s: int | None = None) -> None:
        """`grace_s`: from a signal to an end by force, where a test is about the end in order, which may take a busy machine longer."""
        self.name = name
        self.log = run_dir.log(name)
        module = ["-m", "omni_bus.workers"] if grace_s is None else ["-c", PATIENT.format(grace_s=grace_s)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, *module, str(run_dir.path), name, "0"], stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def segments(self) -> list[pathlib.Path]:
        return [path for path in SHM.glob("omnibus-*") if path.name.split("-")[3] == str(self.pid)]

    def cpu_s(self) -> float:
        fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def deployment(*, heartbeat_s: float = 0.2, pipeline: str = "probe", **stages: dict[str, object]) -> Deployment:
    """The probe pipeline, with `source={"tensor_bytes": 100}` and the like as the stages' keys."""
    spec = load_pipeline(pipeline)
    common = {field for field in StageConfig.__struct_fields__ if field != "options"}
    configs = {}
    for stage in spec.stages:
        given = {"faults": True, **stages.get(stage.name, {})}
        options = msgspec.convert({key: value for key, value in given.items() if key not in common}, stage.options)
        configs[stage.name] = msgspec.convert(
            {"devices": ("cpu",), "threads": 1}
            | {key: value for key, value in given.items() if key in common}
            | {"options": msgspec.to_builtins(options)},
            StageConfig,
        )
    return Deployment(
        model=ModelConfig(pipeline=pipeline),
        api=ApiConfig(),
        bus=BusConfig(heartbeat_s=heartbeat_s),
        stages=configs,
        edges={edge.name: EdgeConfig(credits=edge.credits) for edge in spec.edges},
    )
