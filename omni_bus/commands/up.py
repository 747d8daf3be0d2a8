"""Start a server: broker, workers and API, as CONFIG.toml places them. Ctrl-C stops it in order."""

from __future__ import annotations

import argparse

from omni_bus.commands import deployment_arguments
from omni_bus.errors import ConfigError
from omni_bus.memory import plan
from omni_bus.spec import load_pipeline
from omni_bus.supervisor import serve

NAME = "up"
EPILOG = deployment_arguments.EPILOG
arguments = deployment_arguments.add


def run(arguments: argparse.Namespace) -> int:
    deployment = deployment_arguments.load(arguments)
    problems = plan(deployment, load_pipeline(deployment.model.pipeline)).problems
    if problems:
        raise ConfigError("\n".join(problems))
    return serve(deployment, verbose=arguments.verbose)
