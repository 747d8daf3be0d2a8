"""Show a running server's stages and replicas, and what they are doing."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from typing import Any

from omni_bus.commands.check import table
from omni_bus.http_client import DEFAULT_URL, base_url, request

NAME = "status"
EPILOG = "OMNI_BUS_API_KEY holds the key of a server that asks for one."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"the server (default: OMNI_BUS_URL, or {DEFAULT_URL})")
    parser.add_argument("--json", action="store_true", help="print the server's own JSON")


def run(arguments: argparse.Namespace) -> int:
    status = asyncio.run(fetch(base_url(arguments.url)))
    print(json.dumps(status, indent=2) if arguments.json else "\n".join(render(status)))
    return 0


async def fetch(url: str) -> dict[str, Any]:
    async with request("GET", f"{url}/v1/status") as response:
        found: dict[str, Any] = json.loads(await response.body())
        return found


def render(status: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    missing = ", ".join(status["missing"])
    state = "ready" if status["ready"] else f"not ready: {missing}"
    if status.get("stopping"):
        state = "draining: nothing new is taken"
    yield f"{status['model']} (pipeline {status['pipeline']}): {state}, up {_duration(status['uptime_s'])}"
    yield ""
    head = (
        "stage",
        "worker",
        "pid",
        "device",
        "state",
        "requests",
        "waiting",
        "queued",
        "batch",
        "busy",
        "kv",
        "slots",
        "restarts",
    )
    rows = [head]
    for replica in (replica for stage in status["stages"] for replica in stage["replicas"]):
        load = replica.get("load") or {}
        state = replica["state"] if replica["state"] != "loading" else f"loading {replica.get('progress', 0.0):.0%}"
        rows.append(
            (
                replica["stage"],
                replica["worker"],
                str(replica["pid"]),
                replica["device"],
                state,
                str(replica.get("requests", 0)),
                str(load.get("waiting", 0)),
                str(load.get("queued", 0)) if load.get("per_step") else "-",
                str(load.get("batch", 0)),
                f"{load.get('busy_s', 0.0):.1f} s",
                _of(load, "kv_blocks"),
                _of(load, "slots"),
                str(replica.get("restarts", 0)),
            )
        )
    yield from table(rows)
    yield ""
    yield f"requests  now: {_counts(status['requests'])};  ended: {_counts(status['ended'])}"
    recent = status["recent"]
    if recent["ttfp_s"] is not None:
        rtf = "-" if recent["rtf"] is None else f"{recent['rtf']:.2f}"
        yield f"speech    TTFP {recent['ttfp_s'] * 1e3:.0f} ms, RTF {rtf}  (medians of the last answers)"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "none"


def _of(load: dict[str, Any], what: str) -> str:
    total = load.get(f"{what}_total", 0)
    return f"{load.get(f'{what}_used', 0)}/{total}" if total else "-"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
