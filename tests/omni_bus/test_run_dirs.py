"""Run directories: private, locked while their server lives, swept when it was killed, and refused where there is no place."""

from __future__ import annotations

import fcntl
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from omni_bus.errors import ConfigError
from omni_bus.run_dirs import clear_run_dir, create_run_dir, sweep_run_dirs


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="ob-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield pathlib.Path(directory)


def test_it_is_private_and_goes_away_whole(base: pathlib.Path) -> None:
    run_dir = create_run_dir()
    assert run_dir.path.parent == base
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.log("broker").write_text("x")
    clear_run_dir(run_dir, keep_logs=False)
    assert list(base.iterdir()) == []


def test_logs_are_kept_alone_and_are_not_swept(base: pathlib.Path) -> None:
    failed = create_run_dir()
    failed.log("broker").write_text("x")
    (failed.path / "deployment.json").write_text("{}")
    clear_run_dir(failed, keep_logs=True)
    assert [entry.name for entry in failed.path.iterdir()] == ["broker.log"]
    assert sweep_run_dirs(create_run_dir()) == []
    assert failed.path.exists()


def test_only_those_of_dead_servers_are_swept(base: pathlib.Path) -> None:
    script = "from omni_bus.run_dirs import create_run_dir; print(create_run_dir().path)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    dead = pathlib.Path(ended.stdout.strip())
    living = [subprocess.Popen([sys.executable, "-c", f"{script}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)]
    assert living[0].stdout is not None
    alive = pathlib.Path(living[0].stdout.readline().decode().strip())
    mine = create_run_dir()
    assert sweep_run_dirs(mine) == [dead]
    assert alive.exists()
    assert mine.path.exists()
    living[0].communicate(b"\n")
    assert sweep_run_dirs(mine) == [alive]
    with (mine.path / "lock").open("rb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(("name", "fragment"), [("none", "no run directory can be made"), ("x" * 90, "is too long a path")])
def test_a_place_that_is_none(name: str, fragment: str, base: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / ("x" * 90)).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / name))
    with pytest.raises(ConfigError, match=fragment) as caught:
        create_run_dir()
    assert "XDG_RUNTIME_DIR" in caught.value.message
    assert list((base / ("x" * 90)).iterdir()) == []
