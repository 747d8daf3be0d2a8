"""Bring workers of this host to a server on another one. Ctrl-C lets running requests finish, then leaves."""

from __future__ import annotations

import argparse
import pathlib

from omni_bus.errors import ConfigError
from omni_bus.keys import worker_key
from omni_bus.remote_supervisor import Wanted, bring
from omni_bus.tcp_endpoint import TcpEndpoint

NAME = "worker"
EPILOG = """The server needs `bus.listen` and `bus.keys`; FILE is the NAME.key_secret that `omni-bus keys new` made there.
Its configuration is the worker's too. Hosts reach each other on one of the 100 ports from --data-port on: docs/remote.md."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--broker", required=True, metavar="tcp://HOST:PORT", help="what bus.listen says there")
    parser.add_argument("--key", required=True, metavar="FILE", type=pathlib.Path, help="the certificate of this host")
    parser.add_argument(
        "--stage", required=True, action="append", metavar="NAME", help="what to run; given again, stages share a process"
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="processes that run it (default: 1)")
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="DEVICE",
        help="cpu or cuda:N; given again, replicas are dealt out to them",
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of torch on the CPU (default: cores / replicas)")
    parser.add_argument("--pipeline", default="", metavar="NAME", help="refuse a broker that serves another one")
    parser.add_argument("--model-path", metavar="DIR", help="the checkpoint on this host (default: as the broker has it)")
    parser.add_argument(
        "--address", default="", metavar="HOST", help="at which other hosts reach this one (default: found out)"
    )
    parser.add_argument(
        "--data-port", type=int, default=0, metavar="PORT", help="first port for tensors (default: the broker's port + 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        broker = TcpEndpoint.parse(arguments.broker)
    except ValueError as error:
        raise ConfigError(f"--broker: {error}") from None
    if broker.anywhere:
        raise ConfigError(f"--broker: {broker} is where a server listens; name the host that it runs on")
    for option, value, low, high in (
        ("--replicas", arguments.replicas, 1, 256),
        ("--threads", arguments.threads, 0, 1024),
        ("--data-port", arguments.data_port, 0, 65535),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{option}: must be from {low} to {high}, not {value}")
    model_path = arguments.model_path
    if model_path is not None and pathlib.Path(model_path).expanduser().exists():
        model_path = str(pathlib.Path(model_path).expanduser().absolute())
    wanted = Wanted(
        broker=broker,
        key=worker_key(arguments.key),
        stages=tuple(arguments.stage),
        pipeline=arguments.pipeline,
        replicas=arguments.replicas,
        devices=tuple(arguments.device),
        threads=arguments.threads,
        model_path=model_path,
        address=arguments.address,
        data_port=arguments.data_port,
    )
    return bring(wanted, verbose=arguments.verbose)
