"""The arguments of commands that read a deployment."""

from __future__ import annotations

import argparse
import pathlib

from omni_bus.config import load_deployment
from omni_bus.deployment import Deployment

EPILOG = """\
Precedence: the pipeline's defaults < CONFIG.toml < OMNI_BUS_* environment < --set < --host, --port.
  --set stages.thinker.replicas=2                      a value is TOML, or else a string
  --set 'edges."talker->code2wav".first_chunk_frames=2'
  OMNI_BUS_API__PORT=8092                              two underscores stand for a dot
  OMNI_BUS_EDGES__TALKER_TO_CODE2WAV__CREDITS=16       and _TO_ for the arrow of an edge
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.toml", type=pathlib.Path)
    parser.add_argument(
        "--set", dest="sets", metavar="KEY=VALUE", action="append", default=[], help="set one key; may be repeated"
    )
    parser.add_argument("--host", help="listen on this address: api.host")
    parser.add_argument("--port", type=int, help="listen on this port: api.port")


def load(arguments: argparse.Namespace) -> Deployment:
    """Raises ConfigError."""
    return load_deployment(arguments.config, sets=arguments.sets, host=arguments.host, port=arguments.port)
