"""Start a server: broker, workers and API, as CONFIG.toml places them. Ctrl-C stops it in order."""

from __future__ import annotations

import argparse

from omni_bus.commands import deployment_arguments
from omni_bus.supervisor import serve

NAME = "up"
EPILOG = deployment_arguments.EPILOG
arguments = deployment_arguments.add


def run(arguments: argparse.Namespace) -> int:
    return serve(deployment_arguments.load(arguments), verbose=arguments.verbose)
