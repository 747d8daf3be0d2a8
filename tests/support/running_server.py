"""`omni-bus up` as a real process on a free port, and the proof that nothing is left of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SHM = pathlib.Path("/dev/shm")
PATIENCE_S = 120.0  # what a busy machine is given for what takes a moment on an idle one
STOP_S = 30.0  # a stop that waits for nothing else than its own marks takes less than 5 s where the machine is idle
READY = re.compile(rb"omni-bus: ready on (http://\S+)\n")


def free_port() -> int:
    """One that nobody has now, and that no connection from here to elsewhere is given before it is listened at (those are above)."""
    while True:
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def eventually(check: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something that no event tells a test of: for so long, and for PATIENCE_S at least."""
    seconds = max(seconds, PATIENCE_S)
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)


class Server:
    """A started server. `run_base` is the directory in which it makes its run directory; `base` holds what it says."""

    def __init__(self, process: subprocess.Popen[bytes], base: pathlib.Path, run_base: pathlib.Path, port: int) -> None:
        self.process = process
        self.base = base
        self.run_base = run_base
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.seen: dict[int, psutil.Process] = {}

    @property
    def run_dir(self) -> pathlib.Path:
        [directory] = self.run_base.glob("omni-bus-*")
        return directory

    @property
    def tag(self) -> str:
        return self.run_dir.name.rsplit("-", 1)[-1]

    @property
    def stderr(self) -> str:
        return (self.base / "stderr").read_text()

    def processes(self) -> dict[str, psutil.Process]:
        """Name → process: "supervisor", "broker", "api.0" and each worker."""
        found = {"supervisor": psutil.Process(self.process.pid)}
        for child in found["supervisor"].children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen[child.pid] = child
                found[_role(child.cmdline())] = child
        return found

    def living(self) -> list[psutil.Process]:
        """Of the children ever seen, those that run; a dead one that nobody has waited for does not."""
        return [child for child in self.seen.values() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    def segments(self) -> list[str]:
        return sorted(entry.name for entry in SHM.glob(f"omnibus-{self.tag}-*"))

    def wait_ready(self, seconds: float) -> None:
        """Reads up to the line with the address."""
        assert self.process.stdout is not None
        said, end = b"", time.monotonic() + seconds
        while not (found := READY.search(said)):
            left = end - time.monotonic()
            readable = select.select([self.process.stdout], [], [], max(0.0, left))[0]
            block = os.read(self.process.stdout.fileno(), 65536) if readable else b""
            assert block, f"not ready after {seconds} s, exit code {self.process.poll()}: {said.decode()}{self.stderr}"
            said += block
        assert found[1].decode() == self.url
        self.processes()

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            body: dict[str, Any] = json.loads(answer.read())
            return body

    def ready(self) -> bool:
        """Whether GET /ready says so; False while nothing answers."""
        try:
            return bool(self.get("/ready")["ready"])
        except (OSError, http.client.HTTPException):
            return False

    def chat(self, text: str, *, audio: bool = False, **said: Any) -> dict[str, Any]:
        """An unstreamed answer; raises urllib.error.HTTPError for a refusal."""
        model = self.get("/v1/models")["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "modalities": ["text", "audio"] if audio else ["text"],
            **said,
        }
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=200) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def answer(self, text: str, *, audio: bool = False) -> str:
        return str(self.chat(text, audio=audio)["choices"][0]["message"]["content"])

    def stop(self, number: signal.Signals = signal.SIGINT, *, code: int = 0) -> None:
        """Stop as Ctrl-C in a terminal does, and hold the server to its word: all in order, soon, and nothing left."""
        tag = self.tag
        self.processes()
        self.process.send_signal(number)
        try:
            assert self.process.wait(timeout=STOP_S) == code, self.stderr
        except subprocess.TimeoutExpired:
            raise AssertionError(f"took too long to stop: {self.stderr}") from None
        self.assert_nothing_left(tag)
        assert not list(self.run_base.glob("omni-bus-*")) or code != 0

    def assert_nothing_left(self, tag: str) -> None:
        assert not self.living(), f"still running: {self.living()}"
        assert not list(SHM.glob(f"omnibus-{tag}-*"))
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0, "the port is still served"

    def kill_all(self) -> None:
        """After a test that failed: leave nothing behind for others."""
        for process in self.seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(
    config: pathlib.Path | str,
    *,
    sets: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    run_base: pathlib.Path | None = None,
) -> Iterator[Server]:
    """`omni-bus up` on a free port, which the block waits for and ends; what a failed test leaves is killed.

    `config`: a path, or a name in configs/. `run_base`: of another server, to find what that one left. Unless `sets` say otherwise, no
    request waits for what stages can carry: what a slow machine could would be another thing in each run, and a test of so many
    streams at once is to have them at once.
    """
    if not any(text.startswith("bus.admit_rtf") for text in sets):
        sets = (*sets, "bus.admit_rtf=0")
    # A Unix socket's path is short, and pytest's own directories are long.
    base = pathlib.Path(tempfile.mkdtemp(prefix="ob-", dir=run_base))
    port = free_port()
    command = [sys.executable, "-m", "omni_bus", "up", str(CONFIGS / config), "--port", str(port)]
    command += [part for text in sets for part in ("--set", text)]
    with (base / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "XDG_RUNTIME_DIR": str(run_base or base), **(env or {})},
            cwd=base,
        )
    assert process.stdout is not None
    server = Server(process, base, run_base or base, port)
    try:
        with process.stdout:
            yield server
    finally:
        server.kill_all()
        shutil.rmtree(base)


@contextlib.contextmanager
def running(config: pathlib.Path | str, *, ready_s: float = 240.0, **said: Any) -> Iterator[Server]:
    """A ready server. Unless the block has stopped it itself, it is stopped by Ctrl-C behind it and must leave nothing."""
    with started(config, **said) as server:
        server.wait_ready(ready_s)
        yield server
        if server.process.poll() is None:
            server.stop()


def _role(command: Sequence[str]) -> str:
    if "omni_bus.broker_main" in command:
        return "broker"
    if "omni_bus.api" in command:
        return f"api.{command[command.index('omni_bus.api') + 2]}"
    return command[-2] if "omni_bus.workers" in command else " ".join(command)
