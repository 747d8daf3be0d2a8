"""POST /v1/chat/completions: body → request → bus → answer, streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

from aiohttp import web

from omni_bus.api.body import read_json_body
from omni_bus.api.bus import RequestStream
from omni_bus.api.chat_answer import whole_answer
from omni_bus.api.chat_request import ChatRequest, parse_chat
from omni_bus.api.chat_stream import ChunkRenderer, drop_reader, sse_response, stream_answer
from omni_bus.api.intake import IntakeShare
from omni_bus.api.keys import ARRIVAL, BUS, FETCHER, INTAKE, LABEL, METRICS, MODEL, REQUEST_ID, THREADS
from omni_bus.api.media import THREAD_ABOVE, load_media
from omni_bus.api.request_context import seconds_left, until
from omni_bus.api.timing import AnswerTiming
from omni_bus.errors import DeadlineExceeded
from omni_bus.payloads import ChatInput

GRACE_S = (
    2.0  # the broker ends a request at its deadline; this much later the API does, should the answer be stuck on its way out
)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    with request.app[INTAKE].share() as share:
        chat, stream = await _submit(request, await _read(request, share), share)
    try:
        return await _answer(request, chat, stream)
    finally:
        with contextlib.suppress(TimeoutError):  # the broker sees to it; an answer does not wait for stages that hang
            async with asyncio.timeout(GRACE_S):
                await stream.cancel()  # nothing to do for one that has ended


async def _read(request: web.Request, share: IntakeShare) -> ChatRequest:
    body = await read_json_body(request, share)
    timeout = request.headers.get("X-Request-Timeout")
    if len(body) <= THREAD_ABOVE:
        return parse_chat(body, request.app[MODEL], timeout)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(request.app[THREADS], parse_chat, body, request.app[MODEL], timeout)


async def _submit(request: web.Request, chat: ChatRequest, share: IntakeShare) -> tuple[ChatRequest, RequestStream]:
    """The request on its way, and what its answer still needs of it: not the messages and media."""
    async with until(request, chat.deadline_s):
        tensors = await load_media(chat.media, request.app[FETCHER], request.app[THREADS], share)
    left = seconds_left(request, chat.deadline_s)
    if left <= 0:
        raise DeadlineExceeded("the request's time was over before its media were read")
    label = " ".join(name for name in (request[REQUEST_ID], request[LABEL]) if name)
    stream = await request.app[BUS].submit(
        options=chat.options, payload=ChatInput(chat.messages), tensors=tensors, deadline_s=left, label=label
    )
    return dataclasses.replace(chat, messages=(), media=()), stream


async def _answer(request: web.Request, chat: ChatRequest, stream: RequestStream) -> web.StreamResponse:
    timing = AnswerTiming(request.app[METRICS], request[ARRIVAL])
    answer_id = f"chatcmpl-{request[REQUEST_ID].rpartition('-')[2]}"
    created = int(time.time())
    text_stage = request.app[MODEL].pipeline.text_stage
    if not chat.stream:
        async with until(request, chat.deadline_s + GRACE_S):
            body = await whole_answer(chat, stream, answer_id, created, timing, text_stage, request.app[THREADS])
        return web.Response(body=body, content_type="application/json")
    response = sse_response()
    try:
        async with until(request, chat.deadline_s + GRACE_S):
            renderer = ChunkRenderer(chat, answer_id, created, timing)
            await stream_answer(request, response, stream, renderer, timing, text_stage)
    except TimeoutError:
        if not response.prepared:
            raise
        drop_reader(request)
    return response
