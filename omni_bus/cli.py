"""The `omni-bus` command: one file a command in `commands/`; here is what they share: arguments, errors, exit codes.

Exit codes: 0 well, 2 the user's input, 1 anything else. An error is one line a problem; `--verbose` adds the traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from omni_bus import __version__
from omni_bus.commands import COMMANDS
from omni_bus.errors import ConfigError, InvalidRequest, OmniBusError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where help is."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"omni-bus: {message} (see `{self.prog} --help`)\n")


def parser() -> argparse.ArgumentParser:
    main = _Parser(
        prog="omni-bus",
        description="Serve omni-modality models as pipelines of stages: text, audio, image and video in; text and speech out, streamed.",
        epilog="Exit codes: 0 well, 2 wrong input (with file, line and key), 1 anything else.",
    )
    main.add_argument("--version", action="version", version=f"omni-bus {__version__}")
    commands = main.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        summary = (command.__doc__ or "").strip().splitlines()[0]
        own = commands.add_parser(
            command.NAME,
            help=summary,
            description=summary,
            epilog=command.EPILOG or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument("--verbose", action="store_true", help="more on what happens; the traceback of an error")
        command.arguments(own)
        own.set_defaults(run=command.run)
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    asked = parser()
    arguments = asked.parse_args(argv)
    if arguments.command is None:
        asked.print_help(sys.stderr)
        return 2
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`omni-bus status | head`); the interpreter would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _failed(arguments.verbose, "interrupted", 1)
    except OmniBusError as error:
        return _failed(arguments.verbose, error.message, 2 if isinstance(error, ConfigError | InvalidRequest) else 1)
    except Exception as error:
        return _failed(arguments.verbose, f"{type(error).__name__}: {error} (--verbose shows where)", 1)
    return code


def _failed(verbose: bool, message: str, code: int) -> int:
    if verbose:
        traceback.print_exc()
    for line in message.splitlines():
        print(f"omni-bus: {line}", file=sys.stderr)
    return code
