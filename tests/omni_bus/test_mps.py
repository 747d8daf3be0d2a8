"""MPS: started once and only where processes share a card, known to the workers alone, and never outliving its server.

The control program is a stand-in; what a card makes of it is not tested here.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from omni_bus import mps, supervisor
from omni_bus.child_log import LIMIT
from omni_bus.config import load_deployment
from omni_bus.deployment import Deployment, RunDir
from omni_bus.placement import placement_problems
from omni_bus.run_dirs import create_run_dir, sweep_run_dirs
from omni_bus.spec import load_pipeline

ROOT = pathlib.Path(__file__).parents[2]
# In the foreground it makes its socket and waits for the word; without arguments it passes on what it is asked.
CONTROL = """#!/bin/sh
quit="$CUDA_MPS_PIPE_DIRECTORY/quit"
case "$1" in
-f) {before}
    echo "start $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {said}
    mkfifo "$quit"; : > "$CUDA_MPS_PIPE_DIRECTORY/control"
    read word < "$quit" ;;
*)  read word; echo "$word" >> {said}; echo "$word" > "$quit" ;;
esac
"""
# Stands in for every Python child of the supervisor: notes the role and what it sees of MPS, then waits for its end.
ROLE = """#!/bin/sh
echo "$2 $4 ${{CUDA_MPS_PIPE_DIRECTORY-none}} ${{CUDA_MPS_LOG_DIRECTORY-none}}" >> {seen}
exec sleep 60
"""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A short path for run directories, without MPS of any kind around it."""
    with tempfile.TemporaryDirectory(prefix="ob-", dir="/tmp") as directory:
        found = pathlib.Path(directory)
        (found / "bin").mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setenv("PATH", f"{found / 'bin'}{os.pathsep}{os.environ['PATH']}")
        for name in (mps.PIPES, mps.LOGS):
            monkeypatch.delenv(name, raising=False)
        assert shutil.which(mps.PROGRAM) is None
        monkeypatch.setattr(mps, "STOP_S", 30.0)  # a busy machine may take its time; the tests of those that never end say less
        yield found


def script(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def control(base: pathlib.Path, before: str = "") -> pathlib.Path:
    """Puts the stand-in on PATH; returns the file where it notes what it did."""
    said = base / "said"
    script(base / "bin" / mps.PROGRAM, CONTROL.format(said=shlex.quote(str(said)), before=before))
    return said


def deployment(how: str = "auto", devices: str = "cuda:0", process: str = "") -> Deployment:
    """Of the probe, its relay and sink moved to a GPU."""
    read = load_deployment(ROOT / "configs" / "probe.toml", environ={})
    stages = {
        name: stage if name == "source" else msgspec.structs.replace(stage, devices=(devices,), process=process)
        for name, stage in read.stages.items()
    }
    return msgspec.structs.replace(read, stages=stages, bus=msgspec.structs.replace(read.bus, mps=how))


# ---- when


def test_it_is_wanted_where_two_processes_share_a_card() -> None:
    assert mps.shared_devices(deployment()) == ["cuda:0"]
    assert mps.wanted(deployment("auto")) and mps.wanted(deployment("on"))
    assert not mps.wanted(deployment("off"))
    assert not mps.wanted(deployment(process="gpu"))
    threads = deployment(process="gpu")
    own = {name: msgspec.structs.replace(stage, loop="own") for name, stage in threads.stages.items()}
    assert not mps.wanted(msgspec.structs.replace(threads, stages=own)), "two workers, and one process"
    assert not mps.wanted(deployment(devices="cpu"))


def test_replicas_are_dealt_out_before_they_are_counted() -> None:
    one = deployment(process="gpu")
    stages = {
        name: msgspec.structs.replace(stage, devices=("cuda:0", "cuda:1"), replicas=2) if name != "source" else stage
        for name, stage in one.stages.items()
    }
    assert mps.shared_devices(msgspec.structs.replace(one, stages=stages)) == []
    stages = {name: msgspec.structs.replace(stage, process="") for name, stage in stages.items()}
    assert mps.shared_devices(msgspec.structs.replace(one, stages=stages)) == ["cuda:0", "cuda:1"]


def test_on_is_refused_by_the_check_where_the_program_is_missing(base: pathlib.Path) -> None:
    def told(said: Deployment) -> list[str]:
        return [text for path, text in placement_problems(said, load_pipeline("probe"), "use ") if path == ("bus", "mps")]

    assert [mps.PROGRAM in text for text in told(deployment("on"))] == [True]
    assert told(deployment("auto")) == told(deployment("on", process="gpu")) == []
    control(base)
    assert told(deployment("on")) == []


# ---- the daemon


async def test_it_starts_and_ends_in_order(base: pathlib.Path) -> None:
    said, run_dir = control(base), create_run_dir()
    daemon = mps.Mps(run_dir, pytest.fail)
    assert await daemon.start() is None
    assert daemon.environment == {mps.PIPES: str(run_dir.mps), mps.LOGS: str(run_dir.path)}
    await daemon.stop()
    assert said.read_text().splitlines() == [f"start {run_dir.mps} {run_dir.path}", "quit"]
    assert list(mps._processes(run_dir.mps)) == []


async def test_what_it_logs_is_bounded(base: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control(base)
    monkeypatch.setattr(mps, "CHECK_S", 0.05)
    run_dir = create_run_dir()
    daemon = mps.Mps(run_dir, pytest.fail)
    assert await daemon.start() is None
    logs = [run_dir.path / "control.log", run_dir.path / "server.log"]
    for log in logs:
        log.write_bytes(b"x" * (LIMIT + 1))
    async with asyncio.timeout(60):
        while any(log.stat().st_size for log in logs):  # noqa: ASYNC110 - a file tells nobody of its end
            await asyncio.sleep(0.05)
    assert [log.with_suffix(".older.log").stat().st_size for log in logs] == [LIMIT] * 2
    await daemon.stop()


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("echo no card >&2; exit 1", "does not start: no card"),
        ("exit 0", "ended without a word"),
        ("trap '' TERM; mkfifo $quit; read word < $quit", "did not start within"),
    ],
)
async def test_one_that_does_not_start_says_why_and_leaves_nothing(
    base: pathlib.Path, monkeypatch: pytest.MonkeyPatch, before: str, reason: str
) -> None:
    monkeypatch.setattr(mps, "STOP_S", 0.1)
    monkeypatch.setattr(mps, "START_S", 0.5 if "within" in reason else 30.0)
    control(base, before)
    run_dir = create_run_dir()
    assert reason in (await mps.Mps(run_dir, pytest.fail).start() or "")
    assert list(mps._processes(run_dir.mps)) == []


async def test_a_path_too_long_for_its_sockets_is_a_reason(base: pathlib.Path) -> None:
    said = control(base)
    assert "too long a path" in (await mps.Mps(RunDir(base / ("x" * 80)), pytest.fail).start() or "")
    assert not said.exists()


async def test_an_end_that_nobody_asked_for_is_told(base: pathlib.Path) -> None:
    control(base)
    told: asyncio.Queue[str] = asyncio.Queue()
    run_dir = create_run_dir()
    daemon = mps.Mps(run_dir, told.put_nowait)
    assert await daemon.start() is None
    mps.end_leftovers(run_dir.mps)
    assert "MPS ended (SIGKILL)" in await asyncio.wait_for(told.get(), 30)
    await daemon.stop()


ORPHANING = """
import asyncio, os, signal, sys
from omni_bus import mps
from omni_bus.run_dirs import create_run_dir
async def main():
    daemon = mps.Mps(create_run_dir(), print)
    assert await daemon.start() is None
    print(daemon._child.pid, daemon.environment[mps.PIPES], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def orphan(base: pathlib.Path, before: str = "") -> tuple[int, pathlib.Path]:
    """A pidfd of the daemon of a supervisor that was killed, -1 where it has ended already, and its sockets' directory."""
    control(base, before)
    with subprocess.Popen([sys.executable, "-c", ORPHANING], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        pid, pipes = killed.stdout.readline().decode().split()
        try:
            return os.pidfd_open(int(pid)), pathlib.Path(pipes)
        except ProcessLookupError:
            return -1, pathlib.Path(pipes)


async def test_it_does_not_survive_a_killed_supervisor(base: pathlib.Path) -> None:
    descriptor, pipes = orphan(base)
    if descriptor >= 0:
        await ended(descriptor)
    assert list(mps._processes(pipes)) == []


async def test_one_that_will_not_hear_of_it_is_ended_by_the_next_start(base: pathlib.Path) -> None:
    descriptor, pipes = orphan(base, "trap '' TERM")
    assert len(list(mps._processes(pipes))) == 1
    assert sweep_run_dirs(create_run_dir()) == [pipes.parent]
    await ended(descriptor)


async def ended(descriptor: int) -> None:
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, gone.set)
    await asyncio.wait_for(gone.wait(), 30)
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


# ---- the server around it


@pytest.fixture
async def seen(base: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[pathlib.Path]:
    """Every child is a stand-in that notes in this file what it was given."""
    file = base / "seen"
    stand_in = script(base / "python", ROLE.format(seen=shlex.quote(str(file))))
    monkeypatch.setattr(supervisor.sys, "executable", str(stand_in))
    yield file
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().remove_signal_handler(number)


def lines(file: pathlib.Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


async def served(said: Deployment, seen: pathlib.Path, processes: int) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code of a server that is told to stop once so many children run, and what each saw of MPS: role → its two variables."""
    one = supervisor.Supervisor(said)
    running = asyncio.ensure_future(one.run())
    async with asyncio.timeout(60):
        while not running.done() and len(lines(seen)) < processes:
            await asyncio.wait({running}, timeout=0.05)
        one._on_signal(signal.SIGTERM)
        one._on_signal(signal.SIGTERM)  # in a hurry: a stand-in does not hear that serving is over
        code = await running
    rows = [line.split(" ") for line in lines(seen)]
    return code, {f"{module.removeprefix('omni_bus.')} {name}".strip(): (pipes, logs) for module, name, pipes, logs in rows}


async def test_only_the_workers_know_of_it(base: pathlib.Path, seen: pathlib.Path) -> None:
    said = control(base)
    code, found = await served(deployment("on"), seen, 5)
    assert code == 0
    first, *rest = said.read_text().splitlines()
    _, pipes, logs = first.split()
    assert rest == ["quit"]
    workers = {role: found.pop(role) for role in [*found] if role.startswith("workers")}
    assert workers == {f"workers {name}.0": (pipes, logs) for name in ("source", "relay", "sink")}
    assert set(found.values()) == {("none", "none")} and len(found) == 2
    assert list(mps._processes(pathlib.Path(pipes))) == []


@pytest.mark.parametrize("how", [deployment("off"), deployment("on", process="gpu")], ids=["off", "one process on the card"])
async def test_it_is_not_started_where_it_is_not_wanted(base: pathlib.Path, seen: pathlib.Path, how: Deployment) -> None:
    said = control(base)
    code, found = await served(how, seen, 2 + len(how.workers()))
    assert code == 0 and set(found.values()) == {("none", "none")} and not said.exists()


async def test_auto_goes_on_without_and_says_so_in_a_line(
    base: pathlib.Path, seen: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = await served(deployment("auto"), seen, 5)
    assert code == 0 and len(found) == 5 and set(found.values()) == {("none", "none")}
    assert [line for line in capsys.readouterr().err.splitlines() if "MPS" in line] == [
        f"omni-bus: going on without MPS: there is no {mps.PROGRAM} on this machine's PATH"
    ]


async def test_on_starts_no_worker_without_it(
    base: pathlib.Path, seen: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control(base, "echo no card; exit 1")
    code, found = await served(deployment("on"), seen, 1)
    assert (code, found) == (2, {})
    assert "omni-bus: bus.mps: nvidia-cuda-mps-control does not start: no card" in capsys.readouterr().err
