"""An answer that leaves as it comes: items of the bus to bytes, and how a failure, a deadline or a client's going away ends it."""

from __future__ import annotations

import logging
from typing import Protocol

from aiohttp import web

from omni_bus.api import submission
from omni_bus.api.bus import Item, RequestStream
from omni_bus.api.errors_render import internal_error
from omni_bus.api.keys import METRICS, OUTCOME, REQUEST_ID
from omni_bus.api.request_context import until
from omni_bus.api.timing import AnswerTiming
from omni_bus.errors import Cancelled, DeadlineExceeded, OmniBusError

log = logging.getLogger("omni_bus.api")


class Renderer(Protocol):
    """Items in order, and what goes to the client for each; it keeps what the last bytes need."""

    async def item(self, item: Item) -> bytes:
        """Maybe nothing yet."""

    async def finish(self, stream: RequestStream) -> bytes:
        """The answer is complete, and the stream's usage known."""

    def failure(self, error: OmniBusError) -> bytes | None:
        """How the client is told in mid-answer; None = it cannot be, and finds the connection broken off."""


async def stream_answer(
    request: web.Request,
    response: web.StreamResponse,
    stream: RequestStream,
    renderer: Renderer,
    timing: AnswerTiming,
    deadline_s: float,
) -> web.StreamResponse:
    """Writes the answer as it comes; each write waits for the reader, and with it the next item and its credit.

    A failure before the first byte is raised, so that it becomes an HTTP status; a later one is the renderer's to tell.
    """
    try:
        async with until(request, deadline_s + submission.GRACE_S):
            await _write(request, response, stream, renderer, timing)
    except TimeoutError:
        if not response.prepared:
            raise
        _break_off(request, DeadlineExceeded.status, DeadlineExceeded.code)
    return response


async def _write(
    request: web.Request, response: web.StreamResponse, stream: RequestStream, renderer: Renderer, timing: AnswerTiming
) -> None:
    try:
        async for item in stream:
            await _send(request, response, await renderer.item(item))
        timing.ended()
        await _send(request, response, await renderer.finish(stream))
        if not response.prepared:
            await response.prepare(request)
    except ConnectionError:
        if not response.prepared:
            raise
        request[OUTCOME] = Cancelled.status
    except OmniBusError as error:
        await _fail(request, response, renderer, error)
    except Exception:
        if not response.prepared:
            raise
        log.exception("request %s failed in mid-stream inside the server", request[REQUEST_ID])
        await _fail(request, response, renderer, internal_error())


async def _send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    if not data:
        return
    if not response.prepared:
        await response.prepare(request)
    await response.write(data)


async def _fail(request: web.Request, response: web.StreamResponse, renderer: Renderer, error: OmniBusError) -> None:
    if not response.prepared:
        raise error
    told = renderer.failure(error)
    if told is None:
        _break_off(request, error.status, error.code)
        return
    request[OUTCOME] = error.status
    request.app[METRICS].failed(error.code)
    await response.write(told)


def _break_off(request: web.Request, status: int, code: str) -> None:
    """Close on a client that does not read what it was sent, or could not tell an error from the answer."""
    request[OUTCOME] = status
    request.app[METRICS].failed(code)
    if request.transport is not None:
        request.transport.abort()
