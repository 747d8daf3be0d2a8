"""What commands to a server's operator's socket share: which server, and how its words are shown."""

from __future__ import annotations

import argparse
import asyncio
import os

from omni_bus.control import Command, ask, find_server

EPILOG = """\
The server is one of this user's on this machine: the only one, or the one that listens at --url (or OMNI_BUS_URL).
Interrupting the command does not interrupt the server: what was begun is brought to its end.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="the server (default: OMNI_BUS_URL, or the only one that runs)")


def send(arguments: argparse.Namespace, command: Command) -> int:
    """Have the server do it, and show what it says. Raises ConfigError where it refuses."""
    run_dir = find_server(arguments.url, default=not (arguments.url or os.environ.get("OMNI_BUS_URL")))
    asyncio.run(ask(run_dir, command, lambda line: print(line, flush=True)))
    return 0
