"""A server's status as it changes: the events of /v1/status/watch, asked for anew whenever the server was away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from omni_bus.errors import OmniBusError
from omni_bus.http_client import Unreachable, request

SILENT_S = 15.0  # beyond the interval; a server from which nothing has come for so long is away
AGAIN_S = 1.0  # between two tries to reach it


async def one(url: str) -> dict[str, Any]:
    """Raises Unreachable, Refused."""
    async with request("GET", f"{url}/v1/status") as response:
        found: dict[str, Any] = json.loads(await response.body())
        return found


async def follow(url: str, interval: float) -> AsyncGenerator[dict[str, Any] | OmniBusError, None]:
    """One at every change and every `interval` seconds; an error where the server is away or its broker does not answer.

    Raises Unreachable or Refused where there is no such server to begin with.
    """
    seen = False
    while True:
        try:
            async with (
                request("GET", f"{url}/v1/status/watch?interval={interval:g}") as response,
                contextlib.aclosing(response.events()) as events,
            ):
                while True:
                    async with asyncio.timeout(interval + SILENT_S):
                        event = await anext(events)
                    seen = True
                    yield OmniBusError(event["error"]["message"]) if "error" in event else event
        except (OmniBusError, TimeoutError, StopAsyncIteration) as error:
            if not seen and isinstance(error, OmniBusError):
                raise
            yield error if isinstance(error, OmniBusError) else Unreachable(f"the server at {url} does not answer")
        await asyncio.sleep(AGAIN_S)
