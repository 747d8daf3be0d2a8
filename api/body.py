"""A request's body as it comes in: its type, its size, its time. JSON is read here, forms in form.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from omni_bus.api.intake import IntakeShare
from omni_bus.api.keys import CONFIG
from omni_bus.errors import DeadlineExceeded, InvalidRequest, TooLarge

READ_S = 60.0  # for a client to send its body


class Limit:
    """How large a request's body may be; `add` counts what has come of it."""

    def __init__(self, request: web.Request, share: IntakeShare, advice: str) -> None:
        """Raises TooLarge for a body that says already that it is; `advice`: what to do instead."""
        self._most = request.app[CONFIG].max_body_mb * 2**20
        self._share = share
        self._advice = advice
        self._read = 0
        if request.content_length is not None:
            self._check(request.content_length)

    def add(self, nbytes: int) -> None:
        """Raises TooLarge, or Overloaded where too much is being read at once."""
        self._share.add(nbytes)
        self._read += nbytes
        self._check(self._read)

    def _check(self, nbytes: int) -> None:
        if nbytes > self._most:
            raise TooLarge(f"the body may be up to {self._most // 2**20} MiB; {self._advice}")


@contextlib.asynccontextmanager
async def reading(request: web.Request) -> AsyncIterator[None]:
    """Around what reads a body. Raises InvalidRequest for one that is packed or cut badly, DeadlineExceeded for a slow one."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise InvalidRequest("send the body without Content-Encoding")
    try:
        async with asyncio.timeout(READ_S):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {READ_S:g} s") from None
    except web.RequestPayloadError:
        raise InvalidRequest("the body's chunking is malformed") from None


async def read_json_body(request: web.Request, share: IntakeShare) -> bytearray:
    """The bytes, not yet parsed. Raises InvalidRequest (400), TooLarge (413), DeadlineExceeded (408) or Overloaded (503)."""
    if request.content_type != "application/json" and not request.content_type.endswith("+json"):
        raise InvalidRequest("send the body as JSON, with Content-Type: application/json")
    body = bytearray()
    async with reading(request):
        limit = Limit(request, share, "give large media as URLs")
        async for piece in request.content.iter_any():
            limit.add(len(piece))
            body += piece
    return body
