"""One worker from its Register to its end: its connectors, its link, its stages and their loop, all of one thread."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Protocol

import torch

from omni_bus.attach import ATTACH_ANEW, DISMISSED, OTHER_SERVER, Attachment, attachment, remote_name
from omni_bus.connectors.cuda_device import CudaGpu
from omni_bus.connectors.cuda_ipc import CudaIpcConnector
from omni_bus.connectors.data_socket import DataSockets
from omni_bus.connectors.select import Connectors
from omni_bus.connectors.tcp import TcpConnector, new_sender
from omni_bus.deployment import BusConfig, Deployment, RunDir
from omni_bus.keys import ServerSecrets
from omni_bus.spec import PipelineSpec
from omni_bus.tcp_endpoint import TcpEndpoint
from omni_bus.workers import engine_loop
from omni_bus.workers.link import BrokerLink
from omni_bus.workers.trace import Trace, TracedLink
from omni_bus.workers.watchdog import Watchdog
from omni_bus.workers.worker import Worker


class Stop(engine_loop.Stop, Protocol):
    """What ends a worker from outside: stop_signal.StopSignal, or threads.ThreadStop."""

    fd: int  # readable once there is something to look at
    abort: bool  # set while stages load: nothing is looked at then


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """How a worker ended."""

    code: int  # of the process, were it the only one in it
    asked: bool  # an operator, the broker's stop or a signal had it end; else it was sent away, or cannot go on


def serve(
    run_dir: RunDir,
    deployment: Deployment,
    pipeline: PipelineSpec,
    seat: str,
    incarnation: int,
    stop: Stop,
    loaded: Callable[[], None] = lambda: None,
) -> End:
    """Load the worker's stages, and serve in this thread until the broker or `stop` ends it. `seat`: its name in the deployment.

    Raises ConfigError for what the user can mend.
    """
    attached, secrets = attachment(run_dir), run_dir.secrets()
    name = seat if attached is None else remote_name(seat, attached.host)
    torch.set_grad_enabled(False)  # holds for one thread
    gpu = CudaGpu("events" if deployment.bus.gpu_fences == "events" else "words")
    cuda_ipc = CudaIpcConnector(run_dir.tag, gpu, buffer_bytes=deployment.bus.gpu_buffer_mb << 20)
    connectors = Connectors(run_dir.tag, cuda_ipc=cuda_ipc, tcp=tcp_connector(deployment.bus, secrets, attached))
    link: BrokerLink
    if attached is not None:
        link = BrokerLink(attached.broker, name, stop.fd, key=attached.key, beside=connectors.tcp.socket)
    elif deployment.bus.trace:
        trace = Trace(deployment.bus.trace, f"{name}.{incarnation}")
        link, pipeline = (
            TracedLink(run_dir.broker, name, stop.fd, trace, beside=connectors.tcp.socket),
            trace.pipeline(pipeline),
        )
    else:
        link = BrokerLink(run_dir.broker, name, stop.fd, beside=connectors.tcp.socket)
    try:
        server = "" if secrets is None else secrets.server
        watchdog = Watchdog(deployment.bus.load_s)
        watchdog.looked()
        worker = Worker(name, deployment, pipeline, connectors, link.send, seat=seat, server=server)
        worker.register()
        stop.abort = True
        worker.load(watchdog.looked)
        stop.abort = False
        watchdog.rest()
        loaded()
        engine_loop.run(worker, link, stop, deployment.bus.heartbeat_s, deployment.bus.step_s)
        if worker.refused is not None:
            print(f"{seat}: {worker.refused.message}", file=sys.stderr)
            return End(ATTACH_ANEW if worker.refused.code == OTHER_SERVER else 2, False)
        dismissed = worker.dismissed and attached is not None
        return End(DISMISSED if dismissed else 0, stop.raised or worker.drained)
    finally:
        stop.abort = False
        connectors.close()
        link.close()


def tcp_connector(bus: BusConfig, secrets: ServerSecrets | None, attached: Attachment | None) -> TcpConnector:
    """Without sockets where no other host may attach. Raises ConfigError where there is no port for them."""
    if secrets is None:
        return TcpConnector()
    if attached is None:
        endpoint = TcpEndpoint.parse(bus.listen)
        listen, port, broker_host = endpoint.host, endpoint.port + 1, "127.0.0.1"
        announce = "*" if endpoint.anywhere else endpoint.host
    else:
        listen, announce, port = attached.listen, attached.address, attached.data_port
        broker_host = TcpEndpoint.parse(attached.broker).host
    sender = new_sender()
    return TcpConnector(
        DataSockets(secrets.data, sender=sender, listen=listen, announce=announce, first_port=port, broker_host=broker_host),
        sender=sender,
    )
