"""POST /v1/audio/transcriptions: an audio file to its words, by the pipeline's recogniser or by a language model that hears."""

from __future__ import annotations

import asyncio

from aiohttp import web

from omni_bus.api import submission
from omni_bus.api.audio_decode import SAMPLE_RATE, decode_audio
from omni_bus.api.bus import RequestStream
from omni_bus.api.form import Form, read_form
from omni_bus.api.intake import IntakeShare
from omni_bus.api.keys import ARRIVAL, INTAKE, METRICS, MODEL, THREADS
from omni_bus.api.recognition import recognition_request
from omni_bus.api.request_context import until
from omni_bus.api.sse import sse_response
from omni_bus.api.streamed_answer import stream_answer
from omni_bus.api.submission import ending, submit
from omni_bus.api.timing import AnswerTiming
from omni_bus.api.transcription_render import Transcript, TranscriptEvents, whole_transcript
from omni_bus.api.transcription_request import TranscriptionRequest, parse_transcription
from omni_bus.wire import HostTensor


async def transcriptions(request: web.Request) -> web.StreamResponse:
    model = request.app[MODEL]
    with request.app[INTAKE].share() as share:
        form = await read_form(request, share, "file")
        wanted = parse_transcription(form, model, request.headers.get("X-Request-Timeout"))
        stream, seconds = await _submit(request, form, wanted, share)
        del form
    async with ending(stream):
        timing = AnswerTiming(request.app[METRICS], request[ARRIVAL])
        transcript, text_stage = Transcript(timing), model.pipeline.text_stage
        if wanted.stream:
            events = TranscriptEvents(transcript, wanted, text_stage)
            return await stream_answer(request, sse_response(), stream, events, timing, wanted.deadline_s)
        async with until(request, wanted.deadline_s + submission.GRACE_S):
            return await whole_transcript(stream, transcript, wanted, text_stage, seconds, timing)


async def _submit(
    request: web.Request, form: Form, wanted: TranscriptionRequest, share: IntakeShare
) -> tuple[RequestStream, float]:
    """The request on its way, and how many seconds of audio it has."""
    assert form.file is not None
    async with until(request, wanted.deadline_s):
        loop = asyncio.get_running_loop()
        samples = await loop.run_in_executor(request.app[THREADS], decode_audio, form.file, False, "file")
    share.add(len(samples))
    count = len(samples) // 4
    payload, options = recognition_request(request.app[MODEL].pipeline, wanted.wish, count / SAMPLE_RATE)
    stream = await submit(
        request,
        options=options,
        payload=payload,
        tensors={"media0": HostTensor("float32", (count,), samples)},
        deadline_s=wanted.deadline_s,
        priority=wanted.priority,
        share=share,
    )
    return stream, count / SAMPLE_RATE
