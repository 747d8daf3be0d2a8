"""Around every request: its id, the access log, the counts by route and status, and the headers that every answer carries."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from aiohttp import web

from omni_bus.api.errors_render import Handler
from omni_bus.api.keys import ARRIVAL, ENDLESS, LABEL, LAG, METRICS, OUTCOME, REQUEST_ID
from omni_bus.errors import Cancelled

access = logging.getLogger("omni_bus.api.access")

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NOT_LABEL = re.compile(r"[^A-Za-z0-9._-]")
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


@web.middleware
async def in_context(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware."""
    metrics = request.app[METRICS]
    request[ARRIVAL] = time.monotonic()
    request[REQUEST_ID] = f"req-{secrets.token_hex(12)}"
    request[LABEL] = _NOT_LABEL.sub("", request.headers.get("X-Request-Id", ""))[:64]
    metrics.arrived()
    request.app[LAG].wake()
    status = Cancelled.status  # unless an answer says otherwise, the client went away
    try:
        response = await handler(request)
        status = request.get(OUTCOME, response.status)
        return response
    finally:
        if ENDLESS in request:
            status = 200
        if status == Cancelled.status:
            metrics.cancels.inc()
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unmatched"
        metrics.answered(route, status)
        access.info(
            "%s %s %d %.1f ms %s %s",
            request.method if request.method in _METHODS else "OTHER",
            route,
            status,
            (time.monotonic() - request[ARRIVAL]) * 1e3,
            request[REQUEST_ID],
            request[LABEL] or "-",
        )


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """An on_response_prepare signal: also runs for streams."""
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    for name, value in _SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["Server"] = "omni-bus"  # and not the versions of what it runs on


def seconds_left(request: web.Request, deadline_s: float) -> float:
    """Of a deadline that counts from the request's arrival."""
    return deadline_s - (time.monotonic() - request[ARRIVAL])


def until(request: web.Request, deadline_s: float) -> asyncio.Timeout:
    """Ends what runs inside when `deadline_s` seconds after the request's arrival have passed."""
    return asyncio.timeout(seconds_left(request, deadline_s))
