"""Show the same as status, live, until q or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from omni_bus import status_feed, status_view
from omni_bus.commands import status
from omni_bus.errors import ConfigError, OmniBusError
from omni_bus.http_client import DEFAULT_URL, base_url
from omni_bus.status_view import Json

NAME = "top"
EPILOG = """The server tells of every change by itself, and of the figures each --interval seconds. Where the output is no terminal, each look is
written out below the last.

OMNI_BUS_API_KEY holds the key of a server that asks for one."""

INTERVAL_S = (0.2, 60.0)  # as /v1/status/watch takes it


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"the server (default: OMNI_BUS_URL, or {DEFAULT_URL})")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look once, and end")


def run(arguments: argparse.Namespace) -> int:
    least, most = INTERVAL_S
    if not least <= arguments.interval <= most:
        raise ConfigError(f"--interval must be from {least:g} to {most:g}")
    url = base_url(arguments.url)
    if arguments.once:
        _write(asyncio.run(status_feed.one(url)))
    else:
        asyncio.run(_watch(url, arguments.interval))
    return 0


def _write(seen: Json) -> None:
    print("\n".join(status.render(seen)), flush=True)


async def _watch(url: str, interval: float) -> None:
    """Until the user has seen enough."""
    looking = asyncio.current_task()
    assert looking is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, looking.cancel)
    with contextlib.suppress(asyncio.CancelledError), _keys(looking.cancel), _screen() as show:
        before: Json | None = None
        async for seen in status_feed.follow(url, interval):
            if isinstance(seen, OmniBusError):
                show(before, seen.message)
                continue
            show(status_view.shares(seen, before) if before else seen, "")
            before = seen


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[Json | None, str], None]]:
    """The block's function shows a status, and a line on what is wrong: on the whole of a terminal, or else line by line."""
    if not sys.stdout.isatty():

        def write(seen: Json | None, note: str) -> None:
            if note:
                print(f"omni-bus: {note}", file=sys.stderr, flush=True)
            elif seen is not None:
                _write(seen)

        yield write
        return

    from rich.console import Console
    from rich.live import Live

    from omni_bus.top_screen import frame

    console = Console()
    shown: tuple[Json | None, str] = (None, "")
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw() -> None:
            live.update(frame(shown[0], *console.size, note=shown[1]), refresh=True)

        def show(seen: Json | None, note: str) -> None:
            nonlocal shown
            shown = (seen, note)
            draw()

        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, draw)
        yield show


@contextlib.contextmanager
def _keys(leave: Callable[[], object]) -> Iterator[None]:
    """Where the input is a terminal, `leave` is called for a q."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    descriptor = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        keys = os.read(descriptor, 64)
        if not keys or b"q" in keys.lower():
            leave()

    settings = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)
