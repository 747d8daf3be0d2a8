"""Show the same as status, redrawn every second until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from omni_bus.commands import status
from omni_bus.errors import ConfigError
from omni_bus.http_client import DEFAULT_URL, base_url

NAME = "top"
EPILOG = "OMNI_BUS_API_KEY holds the key of a server that asks for one."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"the server (default: OMNI_BUS_URL, or {DEFAULT_URL})")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    if not 0.1 <= arguments.interval <= 3600:
        raise ConfigError("--interval must be from 0.1 to 3600")
    url = base_url(arguments.url)
    clear = "\x1b[H\x1b[J" if sys.stdout.isatty() else ""
    try:
        while True:
            lines = "\n".join(status.render(asyncio.run(status.fetch(url))))
            print(f"{clear}{lines}", flush=True)
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return 0
