"""Change how many replicas a stage of a running server has."""

from __future__ import annotations

import argparse

from omni_bus.commands import control_arguments
from omni_bus.control import Scale

NAME = "scale"
EPILOG = control_arguments.EPILOG


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", metavar="STAGE", help="stages that share its process are scaled with it")
    parser.add_argument("replicas", metavar="N", type=int)
    control_arguments.add(parser)


def run(arguments: argparse.Namespace) -> int:
    return control_arguments.send(arguments, Scale(arguments.stage, arguments.replicas))
