"""Making, sweeping and clearing away run directories. A server holds a lock on its own, so that a dead server's is known as such."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile

from omni_bus.deployment import RunDir
from omni_bus.errors import ConfigError
from omni_bus.mps import end_leftovers

SOCKET_PATH_BYTES = 107  # sockaddr_un's limit, less the byte that ends it
_LOCK = "lock"


def create_run_dir() -> RunDir:
    """A run directory that is locked until this process ends. Raises ConfigError where there is no place for one."""
    try:
        run_dir = RunDir.create()
    except OSError as error:
        advice = "set XDG_RUNTIME_DIR, or TMPDIR, to a directory that this user may write to"
        raise ConfigError(f"no run directory can be made: {error.filename}: {error.strerror}; {advice}") from None
    if len(run_dir.broker.removeprefix("ipc://").encode()) > SOCKET_PATH_BYTES:
        run_dir.path.rmdir()
        parent = run_dir.path.parent
        raise ConfigError(f"{parent} is too long a path for the broker's socket; set XDG_RUNTIME_DIR to a shorter one")
    descriptor = os.open(run_dir.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return run_dir


def sweep_run_dirs(beside: RunDir) -> list[pathlib.Path]:
    """Remove those of servers that were killed, and end an MPS that outlived one; returns their paths. Logs that a failed server left on purpose are no longer locked files
    and stay."""
    swept = []
    for lock in beside.path.parent.glob(f"omni-bus-*/{_LOCK}"):
        if lock.parent != beside.path and _is_free(lock):
            end_leftovers(RunDir(lock.parent).mps)
            shutil.rmtree(lock.parent, ignore_errors=True)
            swept.append(lock.parent)
    return swept


def running_servers() -> list[RunDir]:
    """The servers of this user that run on this machine."""
    bases = {os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), tempfile.gettempdir()}
    found = []
    for base in sorted(bases):
        for lock in sorted(pathlib.Path(base).glob(f"omni-bus-*/{_LOCK}")):
            with contextlib.suppress(OSError):
                if lock.stat().st_uid == os.getuid() and not _is_free(lock) and RunDir(lock.parent).control.is_socket():
                    found.append(RunDir(lock.parent))
    return found


def clear_run_dir(run_dir: RunDir, *, keep_logs: bool) -> None:
    """Remove the directory, or all but its logs."""
    if not keep_logs:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        return
    for entry in run_dir.path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.suffix != ".log":
            entry.unlink()


def _is_free(lock: pathlib.Path) -> bool:
    # Another user's directory, or one that went away meanwhile, is not ours to judge.
    with contextlib.suppress(OSError), lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
