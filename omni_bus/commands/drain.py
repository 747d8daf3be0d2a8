"""Take one replica away from a running server, once its requests have ended."""

from __future__ import annotations

import argparse

from omni_bus.commands import control_arguments
from omni_bus.control import Drain

NAME = "drain"
EPILOG = control_arguments.EPILOG


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "replica", metavar="STAGE/NUMBER", help="such as talker/1; or a worker's name: talker.1, talker@HOST-1a2b3c.0"
    )
    control_arguments.add(parser)


def run(arguments: argparse.Namespace) -> int:
    return control_arguments.send(arguments, Drain(arguments.replica))
