"""The commands of `omni-bus`, one module each: NAME, EPILOG, `arguments(parser)` and `run(arguments)` → exit code.

A command that is a client of a server speaks HTTP to it and imports no more than the rest of the core.
"""

from __future__ import annotations

import argparse
from typing import Protocol

from omni_bus.commands import bench, chat, check, drain, fixture, keys, restart, scale, status, top, up, worker


class Command(Protocol):
    """A module's functions take no `self`; a protocol that modules fulfil is written with one all the same."""

    NAME: str
    EPILOG: str

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


COMMANDS: tuple[Command, ...] = (up, check, status, top, scale, drain, restart, chat, bench, fixture, keys, worker)
