"""A request's JSON body: its type, its size, its time."""

from __future__ import annotations

import asyncio

from aiohttp import web

from omni_bus.api.intake import IntakeShare
from omni_bus.api.keys import CONFIG
from omni_bus.errors import DeadlineExceeded, InvalidRequest, TooLarge

READ_S = 60.0  # for a client to send its body


async def read_json_body(request: web.Request, share: IntakeShare) -> bytearray:
    """The bytes, not yet parsed. Raises InvalidRequest (400), TooLarge (413), DeadlineExceeded (408) or Overloaded (503)."""
    if request.content_type != "application/json" and not request.content_type.endswith("+json"):
        raise InvalidRequest("send the body as JSON, with Content-Type: application/json")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise InvalidRequest("send the body without Content-Encoding")
    limit = request.app[CONFIG].max_body_mb * 2**20
    too_large = TooLarge(f"the body may be up to {limit // 2**20} MiB; give large media as URLs")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(READ_S):
            async for piece in request.content.iter_any():
                share.add(len(piece))
                body += piece
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {READ_S:g} s") from None
    except web.RequestPayloadError:
        raise InvalidRequest("the body's chunking is malformed") from None
    return body
