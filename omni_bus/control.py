"""How operators' commands reach a running server: a Unix socket in its run directory (mode 0700), one JSON object a line.

The command sends one line; the supervisor answers with what it does, line by line, and how it ended. Only this user reaches it, on this
machine; the API has no part in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import Callable

import msgspec

from omni_bus.config import is_loopback
from omni_bus.deployment import Deployment, RunDir
from omni_bus.errors import ConfigError, OmniBusError
from omni_bus.http_client import Unreachable, base_url
from omni_bus.run_dirs import running_servers

LINE = 1 << 16  # bytes


class Scale(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    stage: str
    replicas: int


class Drain(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    replica: str


class Restart(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    stage: str = ""  # "" = every stage
    rolling: bool = False


class Said(msgspec.Struct, frozen=True, tag=True):
    line: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """refused: nothing was changed. message: "" where all went well."""

    message: str = ""
    refused: bool = False


Command = Scale | Drain | Restart
Answer = Said | Ended


def find_server(url: str | None, *, default: bool) -> RunDir:
    """The run directory of the server at `url`; with `default`, of the only one that runs. ConfigError where it cannot be told which."""
    servers = [(run_dir, deployment.api) for run_dir in running_servers() if (deployment := _deployment(run_dir)) is not None]
    if default and len(servers) == 1:
        return servers[0][0]
    if default and servers:
        known = ", ".join(f"http://{api.host}:{api.port}" for _, api in servers)
        raise ConfigError(f"{len(servers)} servers run here ({known}); name one with --url")
    parts = urllib.parse.urlsplit(base_url(url))
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for run_dir, api in servers:
        if api.port == port and _same_host(api.host, parts.hostname or ""):
            return run_dir
    raise Unreachable(
        f"no server of this user listens at {base_url(url)} on this machine; it takes such commands on its own machine only"
    )


async def ask(run_dir: RunDir, command: Command, say: Callable[[str], None]) -> None:
    """Have the server do it; `say` gets each line of what it does. ConfigError where it refuses, OmniBusError where it failed."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(run_dir.control), limit=LINE)
    except OSError:
        raise Unreachable("the server does not take commands; it is starting or ending") from None
    try:
        writer.write(msgspec.json.encode(command) + b"\n")
        await writer.drain()
        while line := await reader.readline():
            match msgspec.json.decode(line, type=Answer):
                case Said(text):
                    say(text)
                case Ended("", _):
                    return
                case Ended(message, True):
                    raise ConfigError(message)
                case Ended(message, False):
                    raise OmniBusError(message)
        raise Unreachable("the server ended before it was done")
    except ConnectionError:
        raise Unreachable("the server ended before it was done") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _deployment(run_dir: RunDir) -> Deployment | None:
    try:
        return run_dir.read()
    except (OSError, msgspec.MsgspecError):
        return None  # it ends just now, or is another version's


def _same_host(listens: str, asked: str) -> bool:
    return listens in (asked, "0.0.0.0", "::") or (is_loopback(listens) and is_loopback(asked))
