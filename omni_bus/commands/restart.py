"""Replace the replicas of a running server, one after the other; a new one is ready before the old one is drained."""

from __future__ import annotations

import argparse

from omni_bus.commands import control_arguments
from omni_bus.control import Restart

NAME = "restart"
EPILOG = (
    "Where there is no room for a spare, the old replica goes first; a stage of one replica then has none for a while.\n"
    + control_arguments.EPILOG
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", metavar="STAGE", nargs="?", default="", help="this stage alone (default: all of them)")
    parser.add_argument(
        "--rolling", action="store_true", help="refuse, rather than leave a stage without any replica for a while"
    )
    control_arguments.add(parser)


def run(arguments: argparse.Namespace) -> int:
    return control_arguments.send(arguments, Restart(arguments.stage, arguments.rolling))
