"""Show a running server's stages and replicas, and what they are doing."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator

from omni_bus import status_feed, status_view
from omni_bus.commands.check import table
from omni_bus.http_client import DEFAULT_URL, base_url
from omni_bus.status_view import Json

NAME = "status"
EPILOG = "OMNI_BUS_API_KEY holds the key of a server that asks for one."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"the server (default: OMNI_BUS_URL, or {DEFAULT_URL})")
    parser.add_argument("--json", action="store_true", help="print the server's own JSON")


def run(arguments: argparse.Namespace) -> int:
    status = asyncio.run(status_feed.one(base_url(arguments.url)))
    print(json.dumps(status, indent=2) if arguments.json else "\n".join(render(status)))
    return 0


def render(status: Json) -> Iterator[str]:
    """Lines for people."""
    yield status_view.headline(status)
    yield ""
    rows = [status_view.cells(replica) for replica in status_view.replicas(status)]
    yield from table([[column.name for column in status_view.COLUMNS], *rows])
    yield ""
    for name, text in status_view.summary(status):
        yield f"{name:<10}{text}"
