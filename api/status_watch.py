"""GET /v1/status/watch: what /v1/status says, again and again as server-sent events: at every change of a replica's state, and on a timer."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping

from aiohttp import web

from omni_bus.api.errors_render import error_body
from omni_bus.api.keys import ENDLESS, METRICS
from omni_bus.api.sse import event, sse_response
from omni_bus.api.status import standing
from omni_bus.errors import InvalidRequest, Overloaded, ShuttingDown

MOST = 64  # who may watch at a time, in each API process
INTERVAL_S = (0.2, 60.0)  # between two events while nothing changes
GAP_S = 0.1  # at least, between two events: a burst of changes is told in one
UNREAD_S = 30.0  # a watcher that has not read for so long is let go


class Watchers:
    """Those of one API process."""

    def __init__(self) -> None:
        self.leaving = False
        self._changed: set[asyncio.Event] = set()

    @contextlib.contextmanager
    def one(self) -> Iterator[asyncio.Event]:
        """The event is set when there is news. Raises Overloaded where too many watch."""
        if len(self._changed) >= MOST:
            raise Overloaded(f"{MOST} others watch already; ask /v1/status instead")
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            yield changed
        finally:
            self._changed.discard(changed)

    def wake(self) -> None:
        for changed in self._changed:
            changed.set()

    async def leave(self, app: web.Application) -> None:
        """An on_shutdown signal: every stream ends."""
        self.leaving = True
        self.wake()


WATCHERS = web.AppKey("watchers", Watchers)


async def watch(request: web.Request) -> web.StreamResponse:
    """`?interval=SECONDS` (default 1). While the broker does not answer, an event holds an `error` instead."""
    interval = _interval(request)
    watchers = request.app[WATCHERS]
    with watchers.one() as changed, request.app[METRICS].watcher():
        request[ENDLESS] = True
        response = sse_response()
        await response.prepare(request)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while not watchers.leaving:
                changed.clear()
                body: Mapping[str, object]
                try:
                    body = await standing(request)
                except ShuttingDown as error:
                    body = error_body(error)
                async with asyncio.timeout(UNREAD_S):
                    await response.write(event(body))
                await asyncio.sleep(GAP_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval - GAP_S):
                        await changed.wait()
        return response


def _interval(request: web.Request) -> float:
    least, most = INTERVAL_S
    try:
        interval = float(request.query.get("interval", "1"))
    except ValueError:
        interval = math.nan
    if not least <= interval <= most:
        raise InvalidRequest(f"interval must be a number of seconds from {least:g} to {most:g}", param="interval")
    return interval
