"""`omni-bus worker` as a real process, beside a server that other hosts may attach to."""

from __future__ import annotations

import contextlib
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil

from omni_bus.keys import new_certificates

CONFIG = """
[model]
pipeline = "probe"
[bus]
listen = "{listen}"
keys = "keys"
heartbeat_s = 0.5
restart_backoff_s = 0.1
drain_s = 30
[stages.source]
tensor_bytes = 200_000
faults = true
threads = 1
[stages.relay]
replicas = {relays}
faults = true
threads = 1
[stages.sink]
faults = true
threads = 1
"""


def write_config(base: pathlib.Path, listen: str, *, relays: int = 0) -> pathlib.Path:
    """A probe deployment that listens there, with keys beside it; `relays`: of the stage that other hosts bring."""
    if not (base / "keys").exists():
        new_certificates(base / "keys", "worker")
    file = base / "remote.toml"
    file.write_text(CONFIG.format(listen=listen, relays=relays))
    return file


class RemoteWorker:
    """The command, and the processes that it starts."""

    def __init__(self, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
        self.process = process
        self._log = log

    @property
    def said(self) -> str:
        return self._log.read_text()

    def workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            # In another network namespace the command runs below `ip netns exec`, which becomes it.
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def wait_said(self, text: str, seconds: float = 60.0, *, times: int = 1) -> None:
        end = time.monotonic() + seconds
        while self.said.count(text) < times:
            assert time.monotonic() < end, f"not said within {seconds} s: {text}; but: {self.said}"
            select.select([], [], [], 0.05)

    def stop(self, number: signal.Signals = signal.SIGINT, seconds: float = 60.0) -> int:
        """The exit code; nothing may be left of it."""
        workers = self.workers()
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        assert not [worker for worker in workers if worker.is_running()], "a worker outlived its command"
        return code


@contextlib.contextmanager
def bringing(
    base: pathlib.Path,
    broker: str,
    *more: str,
    stage: str = "relay",
    key: pathlib.Path | None = None,
    inside: Sequence[str] = (),
) -> Iterator[RemoteWorker]:
    """The command in `base`, killed afterwards if it still runs. `inside` begins its command line: `ip netns exec NAME`."""
    log = base / f"worker-{time.monotonic_ns()}.log"
    command = [*inside, sys.executable, "-m", "omni_bus", "worker", "--broker", broker, "--stage", stage, "--threads", "1"]
    command += ["--key", str(key or base / "keys" / "worker.key_secret"), *more]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=base)
    worker = RemoteWorker(process, log)
    try:
        yield worker
    finally:
        for child in worker.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()
