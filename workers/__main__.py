"""`python -m omni_bus.workers RUN_DIR WORKER INCARNATION`: the process that a supervisor starts for each worker, here or elsewhere."""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
import sys

import torch

from omni_bus import segments
from omni_bus.attach import ATTACH_ANEW, DISMISSED, OTHER_SERVER, Attachment, attachment, remote_name
from omni_bus.connectors.cuda_device import CudaGpu
from omni_bus.connectors.cuda_ipc import CudaIpcConnector
from omni_bus.connectors.data_socket import DataSockets
from omni_bus.connectors.select import Connectors
from omni_bus.connectors.tcp import TcpConnector, new_sender
from omni_bus.deployment import BusConfig, RunDir
from omni_bus.errors import ConfigError
from omni_bus.keys import ServerSecrets
from omni_bus.names import did_you_mean
from omni_bus.process import die_with_parent
from omni_bus.spec import load_pipeline
from omni_bus.tcp_endpoint import TcpEndpoint
from omni_bus.workers import engine_loop
from omni_bus.workers.devices import threads_of
from omni_bus.workers.link import BrokerLink
from omni_bus.workers.stop_signal import StopSignal
from omni_bus.workers.trace import Trace, TracedLink
from omni_bus.workers.worker import Worker


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


def serve(run_dir: RunDir, seat: str, incarnation: int, stop: StopSignal, ready_fd: int | None) -> int:
    """Load the worker's stages and serve until the broker or a signal ends it; returns the exit code.

    Raises ConfigError for what the user can mend.
    """
    deployment = run_dir.read()
    pipeline = load_pipeline(deployment.model.pipeline)
    workers = deployment.workers()
    if seat not in workers:
        raise ConfigError(f"no worker {seat!r} in this deployment{did_you_mean(seat, workers)}")
    attached, secrets = attachment(run_dir), run_dir.secrets()
    name = seat if attached is None else remote_name(seat, attached.host)
    segments.sweep()
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads_of(deployment, workers[seat]))
    gpu = CudaGpu("words" if deployment.bus.gpu_fences == "words" else "events")
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
        worker = Worker(name, deployment, pipeline, connectors, link.send, seat=seat, server=server)
        worker.register()
        stop.abort = True
        worker.load()
        stop.abort = False
        if ready_fd is not None:
            os.write(ready_fd, b"+")
            os.close(ready_fd)
        engine_loop.run(worker, link, stop, deployment.bus.heartbeat_s, deployment.bus.step_s)
        if worker.refused is not None:
            print(f"{seat}: {worker.refused.message}", file=sys.stderr)
            return ATTACH_ANEW if worker.refused.code == OTHER_SERVER else 2
        return DISMISSED if worker.dismissed and attached is not None else 0
    finally:
        stop.abort = False
        connectors.close()
        link.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m omni_bus.workers", description=__doc__)
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument("worker")
    parser.add_argument("incarnation", type=int, help="how many times the supervisor has started this worker before")
    parser.add_argument("ready_fd", type=int, nargs="?", help="descriptor of a pipe that is told when all is loaded")
    arguments = parser.parse_args()
    die_with_parent()
    stop = StopSignal()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger(__name__).info("worker %s, start %d", arguments.worker, arguments.incarnation)
    try:
        return serve(RunDir(arguments.run_dir), arguments.worker, arguments.incarnation, stop, arguments.ready_fd)
    except ConfigError as error:
        print(f"{arguments.worker}: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
