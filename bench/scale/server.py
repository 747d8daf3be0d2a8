"""A server that a measurement of scale starts, changes, hurts and stops: `omni-bus up` in a directory of its own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from bench.demo import ROOT, free_port
from bench.measured_server import MeasuredServer, descendants
from omni_bus.bench_load import Load
from omni_bus.broker_link import BrokerLink
from omni_bus.deployment import RunDir
from omni_bus.events import Status

START_S = 120.0
PROBE = ROOT / "configs" / "probe.toml"
PROBE_STAGES = ("source", "relay", "sink")
TINY_STAGES = ("processor", "thinker", "talker", "code2wav")
PROMPT = "amber bridge candle distant early forest garden harbour island juniper kettle lantern"


class Server:
    """`base` holds its run directory, and nobody else's: commands that name no server find this one."""

    def __init__(self, base: pathlib.Path, config: pathlib.Path, sets: Sequence[str]) -> None:
        self.base = base
        self.port = free_port(0)
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = MeasuredServer(config, self.port, sets, base)

    def wait_ready(self) -> None:
        """Raises RuntimeError, with the logs, where it does not come to that."""
        if self._process.wait_ready(START_S) is None:
            raise RuntimeError(f"the server did not start\n{self._process.tails(20)}")

    @property
    def run_dir(self) -> RunDir:
        [directory] = self.base.glob("omni-bus-*")
        return RunDir(directory)

    @property
    def environment(self) -> dict[str, str]:
        """For commands: no other server is found from there."""
        return {**os.environ, "XDG_RUNTIME_DIR": str(self.base), "TMPDIR": str(self.base), "OMNI_BUS_URL": ""}

    def command(self, *words: str) -> None:
        """`omni-bus WORDS`, and its end. Raises RuntimeError where that is not well."""
        done = subprocess.run(
            [sys.executable, "-m", "omni_bus", *words], env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"omni-bus {' '.join(words)}: {done.stderr.strip()}\n{self._process.tails(20)}")

    def pid(self, role: str) -> int:
        """Of "broker", "api.0" or a worker, such as "sink.0"."""
        roles = self._roles()
        if role not in roles:
            raise RuntimeError(f"there is no process {role}\n{self._process.tails(20)}")
        return roles[role]

    def load(self, *, words: int = 0, **said: object) -> Load:
        """What each request of a measurement asks: so many words to be spoken by the probe, or what `said` has of Load's fields."""
        given = {"prompt": " ".join(PROMPT.split()[index % 12] for index in range(words)) or None, **said}
        fields = {
            "url": self.url,
            "ours": True,
            "prompt_words": 20,
            "audio": None,
            "speech": True,
            "text_tokens": None,
            "frames": None,
            "speech_stage": "talker",
            "seed": 0,
        }
        return Load(**{**fields, **given})  # type: ignore[arg-type]

    def stop(self) -> None:
        self._process.stop()

    def _roles(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for pid in descendants(self._process.pid):
            with contextlib.suppress(OSError):
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                if "omni_bus.broker_main" in words:
                    found["broker"] = pid
                elif "omni_bus.api" in words:
                    found[f"api.{words[words.index('omni_bus.api') + 2]}"] = pid
                elif "omni_bus.workers" in words:
                    found[words[words.index("omni_bus.workers") + 2]] = pid
        return found


def one_thread(*stages: str) -> list[str]:
    return [f"stages.{stage}.threads=1" for stage in stages]


@contextlib.contextmanager
def tiny_qwen() -> Iterator[Server]:
    """The tiny Qwen3-Omni, with a checkpoint made for it."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = pathlib.Path(scratch) / "tiny"
        fixture = [sys.executable, "-m", "omni_bus", "fixture", "qwen3-omni", str(checkpoint), "--size", "tiny", "--seed", "2"]
        subprocess.run(fixture, check=True, capture_output=True)
        sets = [*one_thread(*TINY_STAGES), f"model.path={checkpoint}"]
        with serving(ROOT / "configs" / "qwen3_omni_tiny.toml", sets) as server:
            yield server


@contextlib.contextmanager
def serving(config: pathlib.Path, sets: Sequence[str], *, ready: bool = True) -> Iterator[Server]:
    """Stopped behind the block, and all that it left removed. `ready`: wait until it is."""
    base = pathlib.Path(tempfile.mkdtemp(prefix="scale-"))  # a Unix socket's path is short
    server = Server(base, config, sets)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.stop()
        shutil.rmtree(base, ignore_errors=True)


async def until(server: Server, holds: Callable[[Status], bool]) -> None:
    """Wait for the server's broker, a new one if need be, to say that of its replicas."""
    link = BrokerLink(server.run_dir.broker, lambda status: None)
    try:
        await link.until(holds)
    finally:
        link.close()
