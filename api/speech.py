"""POST /v1/audio/speech: a text, spoken by the pipeline's own voice, and sent while it is still being spoken."""

from __future__ import annotations

from aiohttp import web

from omni_bus.api.body import read_json_body
from omni_bus.api.keys import ARRIVAL, INTAKE, METRICS, MODEL, THREADS
from omni_bus.api.speech_render import CONTENT_TYPES, AudioBody, SpeechEvents
from omni_bus.api.speech_request import parse_speech
from omni_bus.api.sse import sse_response
from omni_bus.api.streamed_answer import stream_answer
from omni_bus.api.submission import ending, parsed, submit
from omni_bus.api.timing import AnswerTiming


async def speech(request: web.Request) -> web.StreamResponse:
    model, timeout = request.app[MODEL], request.headers.get("X-Request-Timeout")
    with request.app[INTAKE].share() as share:
        body = await read_json_body(request, share)
        wanted = await parsed(request, body, lambda body: parse_speech(body, model, timeout))
        stream = await submit(
            request,
            options=wanted.options,
            payload=wanted.payload,
            deadline_s=wanted.deadline_s,
            priority=wanted.priority,
            share=share,
        )
    async with ending(stream):
        timing = AnswerTiming(request.app[METRICS], request[ARRIVAL])
        audio = AudioBody(wanted, timing, request.app[THREADS])
        if wanted.events:
            events = SpeechEvents(audio, model.pipeline.text_stage)
            return await stream_answer(request, sse_response(), stream, events, timing, wanted.deadline_s)
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPES[wanted.audio_format], "X-Accel-Buffering": "no"})
        return await stream_answer(request, response, stream, audio, timing, wanted.deadline_s)
