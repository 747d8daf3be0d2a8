"""Cross-origin requests, for the origins that the configuration lists."""

from __future__ import annotations

from aiohttp import web

from omni_bus.api.errors_render import Handler
from omni_bus.api.keys import CONFIG

_HEADERS = "Authorization, Content-Type, X-Request-Id, X-Request-Timeout"


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers the browser's question, which carries no key; everything else passes."""
    asked = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if asked and _allowed_origin(request) is not None:
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": _HEADERS,
                "Access-Control-Max-Age": "600",
            },
        )
    return await handler(request)


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """An on_response_prepare signal."""
    origin = _allowed_origin(request)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        response.headers["Vary"] = "Origin"


def _allowed_origin(request: web.Request) -> str | None:
    origin = request.headers.get("Origin")
    origins = request.app[CONFIG].cors_origins
    return origin if origin is not None and (origin in origins or "*" in origins) else None
