"""A request to the bus on behalf of a client: submitted with its media in time, and certain to end with its handler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from omni_bus.api.bus import RequestStream
from omni_bus.api.intake import IntakeShare
from omni_bus.api.keys import BUS, FETCHER, LABEL, PRIORITY, REQUEST_ID, THREADS
from omni_bus.api.media import THREAD_ABOVE, MediaSource, load_media
from omni_bus.api.request_context import seconds_left, until
from omni_bus.errors import DeadlineExceeded, InvalidRequest
from omni_bus.events import INTERACTIVE, RequestOptions
from omni_bus.payloads import ChatInput
from omni_bus.wire import HostTensor

GRACE_S = (
    2.0  # the broker ends a request at its deadline; this much later the API does, should the answer be stuck on its way out
)
Parsed = TypeVar("Parsed")


async def parsed(request: web.Request, body: bytearray, parse: Callable[[bytearray], Parsed]) -> Parsed:
    """`parse(body)`, in a thread where that takes a while."""
    if len(body) <= THREAD_ABOVE:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(request.app[THREADS], parse, body)


def deadline_s(field: float | None, header: str | None, maximum: float) -> float:
    """Seconds from a request's `timeout` field, or else its X-Request-Timeout header; `maximum` where neither says."""
    seconds, param = field, "timeout"
    if seconds is None and header is not None:
        param = "X-Request-Timeout"
        try:
            seconds = float(header)
        except ValueError:
            seconds = -1.0
    if seconds is None:
        return maximum
    if not 0 < seconds <= maximum:
        raise InvalidRequest(f"{param} must be a number of seconds above 0 and up to {maximum:g}", param=param)
    return seconds


async def submit(
    request: web.Request,
    *,
    options: RequestOptions,
    payload: ChatInput,
    deadline_s: float,
    priority: str | None,
    media: Sequence[MediaSource] = (),
    tensors: dict[str, HostTensor] | None = None,
    share: IntakeShare,
) -> RequestStream:
    """priority: None: that of the client's key. media: to be loaded; tensors: loaded already. Raises what load_media does, and DeadlineExceeded."""
    async with until(request, deadline_s):
        loaded = await load_media(media, request.app[FETCHER], request.app[THREADS], share)
    left = seconds_left(request, deadline_s)
    if left <= 0:
        raise DeadlineExceeded("the request's time was over before its media were read")
    label = " ".join(name for name in (request[REQUEST_ID], request[LABEL]) if name)
    return await request.app[BUS].submit(
        options=msgspec.structs.replace(options, priority=priority or request.get(PRIORITY, INTERACTIVE)),
        payload=payload,
        tensors={**(tensors or {}), **loaded},
        deadline_s=left,
        label=label,
    )


@contextlib.asynccontextmanager
async def ending(stream: RequestStream) -> AsyncIterator[RequestStream]:
    """Behind the block the request has ended in every stage, or the broker sees to it."""
    try:
        yield stream
    finally:
        with contextlib.suppress(TimeoutError):  # an answer does not wait for stages that hang
            async with asyncio.timeout(GRACE_S):
                await stream.cancel()  # nothing to do for one that has ended
