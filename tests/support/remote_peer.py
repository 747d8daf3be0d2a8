"""A broker that listens for other hosts on loopback, and peers that come to it with a key, or without."""

from __future__ import annotations

import pathlib

import msgspec
import zmq

from omni_bus import __version__, events, wire
from omni_bus.curve_client import secure
from omni_bus.deployment import Deployment, RunDir
from omni_bus.keys import WorkerKey, new_certificates, worker_key
from tests.support.broker_process import BrokerProcess, Peer
from tests.support.running_server import free_port
from tests.support.worker_process import deployment


def listening(base: pathlib.Path, **bus: object) -> Deployment:
    """The probe pipeline with a door on a free port of loopback; its keys are in `base`/keys, a worker's among them."""
    if not (base / "keys").exists():
        new_certificates(base / "keys", "worker")
    plan = deployment()
    listen = f"tcp://127.0.0.1:{free_port()}"
    return msgspec.structs.replace(
        plan,
        api=msgspec.structs.replace(plan.api, api_keys_file="/secret/file/of/api/keys"),
        bus=msgspec.structs.replace(plan.bus, listen=listen, keys=str(base / "keys"), **bus),
    )


class RemotePeer(Peer):
    """A worker of another host as the broker sees it. `key` None: it speaks no CURVE."""

    def __init__(self, endpoint: str, name: str, key: WorkerKey | None) -> None:
        self.name = name
        self._endpoint = endpoint
        self._key = key
        super().__init__(
            endpoint,
            wire.HeaderDecoder(events.BrokerToWorker),
            name.encode(),
            prepare=self._prepare,
        )

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.SNDHWM, 0)
        if self._key is not None:
            secure(socket, self._endpoint, self._key)

    def register(self, server: str, **changes: object) -> None:
        stage = self.name.partition("@")[0]
        said = {"version": __version__, "pipeline": "probe", "server": server, "data": "tcp://127.0.0.1:1", **changes}
        replicas = (events.StageReplica(stage, "cpu", 4),)
        self.say(events.Register(worker=self.name, pid=1, host="far", boot="b", replicas=replicas, **said))  # type: ignore[arg-type]
        self.say(events.Ready(stage, 4))


class ListeningBroker(BrokerProcess):
    def __init__(self, run_dir: RunDir, base: pathlib.Path, **bus: object) -> None:
        self.base = base
        self.plan = listening(base, **bus)
        super().__init__(run_dir, self.plan)

    @property
    def endpoint(self) -> str:
        return self.plan.bus.listen

    @property
    def key(self) -> WorkerKey:
        return worker_key(self.base / "keys" / "worker.key_secret")
