"""Server-sent events: one JSON object each."""

from __future__ import annotations

import msgspec
from aiohttp import web

from omni_bus.api.errors_render import error_body
from omni_bus.errors import OmniBusError

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: OmniBusError) -> bytes:
    return event(error_body(error))


def sse_response() -> web.StreamResponse:
    return web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
