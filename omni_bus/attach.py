"""Whether a worker may serve here, what one on another host is told, and what it makes of that. No sockets, no clock."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from omni_bus import __version__, events
from omni_bus.deployment import ApiConfig, Deployment, RunDir
from omni_bus.errors import ConfigError, ErrorInfo
from omni_bus.keys import ServerSecrets, WorkerKey
from omni_bus.names import did_you_mean
from omni_bus.spec import PipelineSpec

OTHER_SERVER = "other_server"  # code of the refusal after which attaching anew helps
ATTACH_ANEW = 75  # exit code of a worker that met it
DISMISSED = 76  # exit code of a worker from another host that an operator of the server took away
_REMOTE = re.compile(rb"[a-z][a-z0-9_-]{0,31}@[A-Za-z0-9-]{1,48}\.[0-9]{1,4}")


def is_remote(peer: bytes) -> bool:
    """Whether that is the identity of a process on another host: no process of ours has one of this form."""
    return _REMOTE.fullmatch(peer) is not None


def remote_name(seat: str, host: str) -> str:
    """The name at the broker of the worker that has `seat` ("talker.0") in the command that brings it from `host`."""
    group, _, number = seat.rpartition(".")
    return f"{group}@{host}.{number}"


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes on another host need to speak to the broker; in their run directory, readable for this user only."""

    broker: str  # tcp://HOST:PORT
    key: WorkerKey
    host: str  # of this command, as in `remote_name`
    address: str  # at which other hosts reach this one
    listen: str  # where its data sockets listen: an address of it, or "*"
    data_port: int  # the first that a data socket may take

    def write(self, run_dir: RunDir) -> None:
        run_dir.attachment.touch(mode=0o600)
        run_dir.attachment.write_bytes(msgspec.json.encode(self))


def attachment(run_dir: RunDir) -> Attachment | None:
    """None in the run directory of a server."""
    try:
        return msgspec.json.decode(run_dir.attachment.read_bytes(), type=Attachment)
    except FileNotFoundError:
        return None


class Reception:
    """Answers those who come."""

    def __init__(self, pipeline: PipelineSpec, deployment: Deployment, secrets: ServerSecrets | None) -> None:
        self._pipeline = pipeline
        self._deployment = deployment
        self._secrets = secrets

    def attach(self, event: events.Attach) -> events.Attached | events.Refused:
        """What a command on another host is told."""
        error = self._other_side(event.protocol, event.version, event.pipeline or self._pipeline.name)
        stages = self._deployment.stages
        unknown = next((stage for stage in event.stages if stage not in stages), None)
        if error is None and unknown is not None:
            text = f'pipeline {self._pipeline.name} of the broker has no stage "{unknown[:40]}"{did_you_mean(unknown, stages)}'
            error = ErrorInfo("invalid_config", text, 400)
        if error is None and self._secrets is None:
            error = ErrorInfo("invalid_config", "the broker takes no workers from other hosts", 400)
        if error is not None or self._secrets is None:
            assert error is not None
            return events.Refused(error)
        bus = msgspec.structs.replace(self._deployment.bus, keys="", trace="", mps="off")
        told = msgspec.structs.replace(self._deployment, api=ApiConfig(), bus=bus, held={})
        return events.Attached(
            self._secrets.server, msgspec.json.encode(told), self._secrets.data.public, self._secrets.data.secret
        )

    def refuse(self, event: events.Register) -> ErrorInfo | None:
        """Why that worker may not serve here. One of ours need not say what it is: it was started from the same files."""
        remote = is_remote(event.worker.encode())
        error = self._other_side(event.protocol, event.version, event.pipeline, must_say=remote)
        if error is None and remote and (self._secrets is None or event.server != self._secrets.server):
            return ErrorInfo(OTHER_SERVER, "another server runs here than the worker had attached to", 409)
        return error

    def _other_side(self, protocol: int, version: str, pipeline: str, *, must_say: bool = True) -> ErrorInfo | None:
        """An error that names both sides, where they differ."""
        ours, differs = "", ""
        if protocol != events.PROTOCOL:
            ours, differs = f"protocol {events.PROTOCOL}", f"protocol {protocol}"
        elif version != __version__ and (version or must_say):
            ours, differs = f"omni-bus {__version__}", f"omni-bus {version[:40] or 'of an unknown version'}"
        elif pipeline != self._pipeline.name and (pipeline or must_say):
            ours, differs = f"pipeline {self._pipeline.name}", f'pipeline "{pipeline[:40]}"'
        if not differs:
            return None
        return ErrorInfo(
            "invalid_config", f"the broker has {ours} and the worker {differs}; both sides must have the same", 400
        )


def seated(
    told: Deployment, stages: Sequence[str], devices: tuple[str, ...], replicas: int, threads: int, model_path: str | None
) -> Deployment:
    """A broker's deployment as the processes on another host use it: those stages in one process for each replica, where they
    take turns, the others nowhere.

    `devices` is empty where the stages' own are wanted; `threads` 0: computed for this machine. Raises ConfigError for a stage
    that is named twice.
    """
    if len(set(stages)) != len(stages):
        raise ConfigError("--stage: one stage is named twice")
    group = stages[0]
    configs = {
        stage: msgspec.structs.replace(
            config, process=group, loop="shared", replicas=replicas, threads=threads, devices=devices or config.devices[:1]
        )
        if stage in stages
        else msgspec.structs.replace(config, process="", loop="shared", devices=("cpu",))
        for stage, config in told.stages.items()
    }
    here = {group: tuple(range(replicas))}
    model = told.model if model_path is None else msgspec.structs.replace(told.model, path=model_path)
    return msgspec.structs.replace(told, model=model, stages=configs, numbers={stage: here.get(stage, ()) for stage in configs})
