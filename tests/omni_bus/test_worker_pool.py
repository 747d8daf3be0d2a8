"""Which memory the workers of a running server are given as they come and go: written where each process reads it. Real processes, cards of paper."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import signal
import sys

import msgspec
import pytest

from omni_bus import devices, memory
from omni_bus.child import Child
from omni_bus.config import load_deployment
from omni_bus.deployment import RunDir
from omni_bus.events import DrainWorker, Expect
from omni_bus.memory import StageNeed
from omni_bus.spec import load_pipeline
from omni_bus.worker_pool import NotStarted, WorkerPool

GIB = 1 << 30
PATIENCE_S = 60.0
SERVES = "import os, sys, time; os.write(int(sys.argv[1]), b'+'); time.sleep(600)"
NEEDS = {
    name: StageNeed(weights=weights * GIB, workspace=0, unit="slots", unit_bytes=GIB, units=units, least=1)
    for name, weights, units in (("source", 20, 400), ("relay", 10, 4), ("sink", 10, 4))
}


class Server:
    """A pool for the probe's stages on one card of 100 GiB, and what the supervisor and the broker do for it."""

    def __init__(self, directory: pathlib.Path, relays: int) -> None:
        (directory / "d.toml").write_text(f'[model]\npipeline = "probe"\n[stages.relay]\nreplicas = {relays}\n')
        said = load_deployment(directory / "d.toml", environ={})
        stages = {name: msgspec.structs.replace(stage, devices=("cuda:0",)) for name, stage in said.stages.items()}
        self.pipeline = dataclasses.replace(load_pipeline("probe"), needs=lambda deployment: NEEDS)
        self.run_dir = RunDir(directory)
        self.code = SERVES
        self.pool = WorkerPool(
            self.run_dir,
            msgspec.structs.replace(said, stages=stages),
            self.pipeline,
            make=lambda name: Child(name, directory / f"{name}.log", lambda child, code: None),
            start=lambda child: child.start([sys.executable, "-c", self.code], lambda: None),
            tell=self._tell,
        )

    def _tell(self, event: Expect | DrainWorker) -> None:
        """A broker that has a worker leave: nothing is bound to it."""
        for child in self.pool.children:
            if isinstance(event, DrainWorker) and child.name == event.worker:
                child.send_signal(signal.SIGTERM)

    async def add(self, group: str, *numbers: int) -> None:
        self.pool.reserve(group, numbers)
        await asyncio.gather(*(self.pool.add(group, number) for number in numbers))

    async def remove(self, *names: str) -> None:
        for child in [child for child in self.pool.children if child.name in names]:
            await self.pool.remove(child, 1.0)

    def held(self) -> dict[str, float]:
        """Worker → GiB, as a process that starts now reads it."""
        return {worker: round(sum(kept.values()) / GIB, 2) for worker, kept in self.run_dir.read().held.items()}

    async def close(self) -> None:
        for child in self.pool.children:
            child.send_signal(signal.SIGKILL)
            await child.gone()


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (devices, memory):
        monkeypatch.setattr(module, "cuda_devices", lambda: (devices.CudaDevice("card", 100 * GIB),))


async def test_what_leaves_makes_room_and_what_comes_takes_no_more_than_that(tmp_path: pathlib.Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        server = Server(tmp_path, relays=2)
        try:
            await server.remove("relay.1")
            before = server.held()
            assert before.keys() == {"source.0", "relay.0", "sink.0"}
            await server.add("sink", 1)
            after = server.held()
            assert after.pop("sink.1") >= 1 and after == before
            assert not memory.plan(server.run_dir.read(), server.pipeline).problems
        finally:
            await server.close()


async def test_several_that_come_at_once_share_what_is_left(tmp_path: pathlib.Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        server = Server(tmp_path, relays=3)
        try:
            before = {
                worker: round(kept["source"] / GIB, 2)
                for worker, kept in server.pool.deployment.held.items()
                if "source" in kept
            }
            await server.remove("relay.1", "relay.2")
            await server.add("sink", 1, 2)
            held = server.held()
            assert held["source.0"] == before["source.0"]
            assert held["sink.1"] == held["sink.2"] >= 1
        finally:
            await server.close()


async def test_one_that_does_not_start_gives_its_memory_back(tmp_path: pathlib.Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        server = Server(tmp_path, relays=2)
        try:
            await server.remove("relay.1")
            before = server.held()
            server.code = "import sys; sys.exit(3)"
            with pytest.raises(NotStarted):
                await server.add("sink", 1)
            assert server.held() == before
        finally:
            await server.close()


async def test_one_that_is_started_again_takes_what_is_free(tmp_path: pathlib.Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        server = Server(tmp_path, relays=3)
        try:
            await server.remove("relay.1", "relay.2")
            before = server.held()
            [source] = server.pool.of_group("source")
            await server.pool.renew(source, 1.0)
            assert server.held()["source.0"] > 20 + before["source.0"]
            assert {**server.held(), "source.0": 0} == {**before, "source.0": 0}
        finally:
            await server.close()
