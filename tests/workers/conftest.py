"""Fixtures for tests of worker processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest

from omni_bus import events, wire
from omni_bus.deployment import RunDir
from omni_bus.payloads import ChatInput, Message, TextPart
from tests.support.worker_process import ScriptedBroker, WorkerProcess, deployment

_tags = itertools.count()


def _new_run_dir(base: pathlib.Path) -> RunDir:
    path = base / f"r-t{os.getpid()}x{next(_tags)}"
    path.mkdir(mode=0o700)
    return RunDir(path)


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> RunDir:
    return _new_run_dir(tmp_path)


@pytest.fixture(scope="module")
def module_run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return _new_run_dir(tmp_path_factory.mktemp("module"))


@pytest.fixture
def broker(run_dir: RunDir) -> Iterator[ScriptedBroker]:
    broker = ScriptedBroker(run_dir)
    yield broker
    broker.socket.close()


StartWorker = Callable[..., WorkerProcess]


@contextlib.contextmanager
def _worker(
    broker: ScriptedBroker, name: str, *, grace_s: int | None = 30, **stages: dict[str, object]
) -> Iterator[WorkerProcess]:
    """A worker whose stages are ready; at the end it is gone and has left no segment."""
    plan = deployment(**stages)  # type: ignore[arg-type]
    broker.run_dir.write(plan)
    worker = WorkerProcess(broker.run_dir, name, grace_s=grace_s)
    try:
        broker.expect(events.Register, worker=name)
        for stage in plan.workers()[name]:
            broker.expect(events.Ready, stage=stage)
        yield worker
    finally:
        worker.stop()
        left = worker.segments()
        for path in left:
            path.unlink()
    assert not left or worker.process.returncode < 0, left


@pytest.fixture
def start_worker(broker: ScriptedBroker) -> Iterator[StartWorker]:
    with contextlib.ExitStack() as workers:
        yield lambda name, **stages: workers.enter_context(_worker(broker, name, **stages))


@pytest.fixture(scope="module")
def shared_source(module_run_dir: RunDir) -> Iterator[tuple[ScriptedBroker, WorkerProcess]]:
    """One process of `source` for the tests that leave it as they found it: to start one takes seconds."""
    broker = ScriptedBroker(module_run_dir)
    with _worker(broker, "source.0", source={"tensor_bytes": 100_000}) as worker:
        yield broker, worker
    broker.socket.close()


@pytest.fixture
def shared(shared_source: tuple[ScriptedBroker, WorkerProcess]) -> Iterator[ScriptedBroker]:
    """The broker of `source`. Requests below 100 are cancelled after the test, and nothing may be left of them."""
    broker, worker = shared_source
    yield broker
    for request in range(100):
        broker.send(worker.name, events.Cancel(request, "source"))
    for request in range(100):
        broker.expect(events.Cancelled, request=request)
    broker.inbox.clear()
    broker.holds_nothing(worker.name, "source")


@pytest.fixture
def source(shared_source: tuple[ScriptedBroker, WorkerProcess]) -> WorkerProcess:
    return shared_source[1]


@pytest.fixture
def say() -> Callable[[str], bytes]:
    """The payload frame of a conversation with that one user message."""
    return lambda text: wire.encode(ChatInput((Message("user", (TextPart(text),)),)))
