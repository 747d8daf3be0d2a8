"""A deployment as every process reads it: the TOML with defaults, environment and --set applied, already checked.

`config.py` makes it; the supervisor writes it as JSON into the run directory, where broker, API and workers read it.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from typing import Any

import msgspec

from omni_bus.keys import ServerSecrets
from omni_bus.sampling import SamplingParams


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pipeline: str
    path: str = ""  # hub id or directory; "" where the pipeline brings its own models
    name: str = ""  # what /v1/models says; "" = the last part of `path`, or the pipeline


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8091
    processes: int = 1
    api_keys_file: str = ""  # one key per line; absent = open, loopback only
    max_requests_per_client: int = 0  # in flight for a key, or an address where there are none; 0 = any
    max_body_mb: int = 64
    deadline_s: float = 300.0  # of a request that does not say one
    media_hosts: tuple[str, ...] = ()  # hosts media URLs may name; empty = any public one
    allow_private_media: bool = False  # let media URLs reach private addresses
    cors_origins: tuple[str, ...] = ()
    max_sessions: int = 256  # voice sessions (open WebSockets) of the server; one more is answered 503; 0 = any
    max_sessions_per_client: int = 0  # of them, for a key, or an address without keys; one more is answered 429; 0 = any
    session_s: float = 3600.0  # after which a session is closed
    session_idle_s: float = 600.0  # with nothing said and nothing to do, after which it is
    session_events_per_s: int = 200  # a client's events, averaged over ten seconds; a session above it is closed; 0 = any
    session_event_mb: int = 16  # of one event of a client
    session_buffer_s: float = 120.0  # of audio that has not become an item of the conversation yet
    session_history_s: float = 600.0  # of audio in a conversation's items; the oldest items go first
    voice_lead_s: float = 2.0  # how far ahead of its playback an answer's audio is sent
    voice_prepare: bool = True  # let the stages work on a turn while the user still speaks


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_requests: int = 256  # in flight; one more waits
    max_waiting: int = 256  # for their turn; one more is refused as overloaded
    admit_rtf: float = 0.9  # predicted real-time factor up to which a replica is given one more request with speech; 0 = any
    heartbeat_s: float = 2.0
    lost_after_s: float = 20.0  # without an answer a process counts as lost
    broker_lost_after_s: float = 5.0  # without an answer of the broker it counts as lost: it has no long steps
    step_s: float = 60.0  # a step of a stage that takes longer hangs, and its worker is ended; 0 = none does
    load_s: float = 600.0  # without progress of a process that starts or loads: it hangs, and is ended; 0 = none does
    retries: int = 1  # of a request whose replica was lost before any output left
    gpu_buffer_mb: int = 256  # MiB of a GPU for the tensors that one worker sends on cuda_ipc edges
    gpu_fences: str = "words"  # words | events: what a stream waits for on a cuda_ipc edge (connectors/cuda_words.py)
    mps: str = "off"  # off | auto | on: run NVIDIA MPS for worker processes that share a GPU
    trace: str = ""  # directory into which workers write what they do and when, for bench/trace.py; "" = nothing is noted
    drain_s: float = 10.0  # for running requests where a replica, or the whole server on SIGTERM, is drained
    listen: str = ""  # "tcp://HOST:PORT", where workers from other hosts attach; "" = nowhere
    keys: str = ""  # directory of `omni-bus keys new`: the server's certificate, and those of the workers that may attach
    restart_backoff_s: float = 0.5  # first delay before a dead process is started again; doubles, up to 30 s

    @property
    def loop_silence_s(self) -> float:
        """How long a worker's loop may say nothing: a step may be slow, and one that hangs is for the watchdog to end."""
        return self.lost_after_s + self.step_s


class StageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[stages.NAME]: the common keys; `options` holds the keys that this stage's own options type declares, defaults filled in."""

    devices: tuple[str, ...]
    replicas: int = 1
    process: str = ""  # stages with the same name here share one process; "" = a process of its own
    loop: str = "shared"  # shared | own: in a process that it shares, whether it takes turns, or has a thread and a CUDA stream
    dtype: str = "float32"
    threads: int = 0  # torch's intra-op threads; 0 = cores / worker processes, at least 1
    max_batch: int = 16
    sampling: SamplingParams = SamplingParams()
    options: dict[str, Any] = {}


class EdgeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[edges."a->b"]: `connector` may force one; `options` as in StageConfig."""

    connector: str = "auto"  # auto | inline | local | shm | cuda_ipc | tcp
    credits: int
    options: dict[str, Any] = {}


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig
    api: ApiConfig
    bus: BusConfig
    stages: dict[str, StageConfig]
    edges: dict[str, EdgeConfig]
    numbers: dict[str, tuple[int, ...]] = {}  # group of stages → its workers' numbers, where a running server has changed them
    held: dict[str, dict[str, int]] = {}  # of a running server: worker → stage → bytes of its GPU that it took for requests

    @property
    def model_name(self) -> str:
        return self.model.name or pathlib.PurePath(self.model.path).name or self.model.pipeline

    def processes(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Process → its workers, one engine loop each → the stages that take turns in it.

        A process "thinker.0" or "GROUP.0" is one worker of the same name; where its stages have loops of their own, it carries a worker for
        each stage: "gpu.0" the workers "thinker.0" and "talker.0".
        """
        groups: dict[str, list[str]] = {}
        for name, stage in self.stages.items():
            groups.setdefault(stage.process or name, []).append(name)
        return {
            f"{group}.{number}": {f"{stage}.{number}": (stage,) for stage in stages}
            if all(self.stages[stage].loop == "own" for stage in stages)
            else {f"{group}.{number}": tuple(stages)}
            for group, stages in groups.items()
            for number in self.numbers.get(group, range(self.stages[stages[0]].replicas))
        }

    def workers(self) -> dict[str, tuple[str, ...]]:
        """Worker → the stages it hosts, over all processes."""
        return {worker: stages for workers in self.processes().values() for worker, stages in workers.items()}

    def take_turns(self, one: str, other: str) -> bool:
        """Whether two stages are steps of one loop, so that tensors pass between them by reference."""
        first, second = self.stages[one], self.stages[other]
        return (first.process or one) == (second.process or other) and not first.loop == second.loop == "own"


class RunDir:
    """The private directory (mode 0700) of one running server: the broker's socket, the deployment, the logs."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    @classmethod
    def create(cls) -> RunDir:
        base = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        return cls(pathlib.Path(tempfile.mkdtemp(prefix="omni-bus-", dir=base)))

    @property
    def broker(self) -> str:
        """The broker's ZeroMQ endpoint."""
        return f"ipc://{self.path}/broker.sock"

    @property
    def tag(self) -> str:
        """Marks this server's shared memory segments."""
        return self.path.name.rsplit("-", 1)[-1]

    @property
    def control(self) -> pathlib.Path:
        """The Unix socket on which the supervisor takes operators' commands."""
        return self.path / "control"

    def log(self, process: str) -> pathlib.Path:
        return self.path / f"{process}.log"

    @property
    def metrics(self) -> pathlib.Path:
        """Where several API processes keep their metrics, each in files of its own."""
        return self.path / "metrics"

    @property
    def mps(self) -> pathlib.Path:
        """Where MPS has its sockets."""
        return self.path / "mps"

    @property
    def attachment(self) -> pathlib.Path:
        """On a host that brings workers to another's broker: how they reach it (attach.Attachment)."""
        return self.path / "attachment.json"

    @property
    def _secrets(self) -> pathlib.Path:
        return self.path / "secrets.json"

    def secrets(self) -> ServerSecrets | None:
        """None where no other host may attach."""
        try:
            return msgspec.json.decode(self._secrets.read_bytes(), type=ServerSecrets)
        except FileNotFoundError:
            return None

    def write_secrets(self, secrets: ServerSecrets) -> None:
        self._secrets.touch(mode=0o600)
        self._secrets.write_bytes(msgspec.json.encode(secrets))

    def write(self, deployment: Deployment) -> None:
        """Whoever reads meanwhile sees the old or the new one, whole."""
        if deployment.bus.listen and not self._secrets.exists():
            self.write_secrets(ServerSecrets.new())
        written = self.path / "deployment.json.new"
        written.write_bytes(msgspec.json.encode(deployment))
        written.replace(self.path / "deployment.json")

    def read(self) -> Deployment:
        return msgspec.json.decode((self.path / "deployment.json").read_bytes(), type=Deployment)
