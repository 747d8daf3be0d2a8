"""POST /v1/chat/completions: body → request → bus → answer, streamed or whole."""

from __future__ import annotations

import dataclasses
import time

from aiohttp import web

from omni_bus.api import submission
from omni_bus.api.body import read_json_body
from omni_bus.api.bus import RequestStream
from omni_bus.api.chat_answer import whole_answer
from omni_bus.api.chat_request import ChatRequest, parse_chat
from omni_bus.api.chat_stream import ChunkRenderer
from omni_bus.api.intake import IntakeShare
from omni_bus.api.keys import ARRIVAL, INTAKE, METRICS, MODEL, REQUEST_ID, THREADS
from omni_bus.api.request_context import until
from omni_bus.api.sse import sse_response
from omni_bus.api.streamed_answer import stream_answer
from omni_bus.api.submission import ending, parsed, submit
from omni_bus.api.timing import AnswerTiming
from omni_bus.payloads import ChatInput


async def chat_completions(request: web.Request) -> web.StreamResponse:
    with request.app[INTAKE].share() as share:
        chat, stream = await _submit(request, await _read(request, share), share)
    async with ending(stream):
        return await _answer(request, chat, stream)


async def _read(request: web.Request, share: IntakeShare) -> ChatRequest:
    timeout, model = request.headers.get("X-Request-Timeout"), request.app[MODEL]
    return await parsed(request, await read_json_body(request, share), lambda body: parse_chat(body, model, timeout))


async def _submit(request: web.Request, chat: ChatRequest, share: IntakeShare) -> tuple[ChatRequest, RequestStream]:
    """The request on its way, and what its answer still needs of it: not the messages, media and tools."""
    stream = await submit(
        request,
        options=chat.options,
        payload=ChatInput(chat.messages, chat.tools),
        media=chat.media,
        deadline_s=chat.deadline_s,
        priority=chat.priority,
        share=share,
    )
    return dataclasses.replace(chat, messages=(), media=(), tools=()), stream


async def _answer(request: web.Request, chat: ChatRequest, stream: RequestStream) -> web.StreamResponse:
    timing = AnswerTiming(request.app[METRICS], request[ARRIVAL])
    answer_id = f"chatcmpl-{request[REQUEST_ID].rpartition('-')[2]}"
    created = int(time.time())
    text_stage = request.app[MODEL].pipeline.text_stage
    if chat.stream:
        renderer = ChunkRenderer(chat, answer_id, created, timing, text_stage)
        return await stream_answer(request, sse_response(), stream, renderer, timing, chat.deadline_s)
    async with until(request, chat.deadline_s + submission.GRACE_S):
        body = await whole_answer(chat, stream, answer_id, created, timing, text_stage, request.app[THREADS])
    return web.Response(body=body, content_type="application/json")
