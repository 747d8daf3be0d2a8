"""The streamed answer: the bus's items as OpenAI chat.completion.chunk events."""

from __future__ import annotations

import base64
import logging
from typing import Any

import msgspec
from aiohttp import web

from omni_bus.api.bus import Item, RequestStream
from omni_bus.api.chat_request import ChatRequest
from omni_bus.api.chat_usage import answer_usage
from omni_bus.api.errors_render import error_body, internal_error
from omni_bus.api.keys import METRICS, OUTCOME, REQUEST_ID
from omni_bus.api.timing import AnswerTiming
from omni_bus.api.wav import wav_header
from omni_bus.errors import Cancelled, DeadlineExceeded, OmniBusError
from omni_bus.payloads import AudioDelta, InputTranscript, TextDelta

log = logging.getLogger("omni_bus.api")

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class ChunkRenderer:
    """Items to events, in order; keeps what the last events need."""

    def __init__(self, chat: ChatRequest, answer_id: str, created: int, timing: AnswerTiming) -> None:
        self._chat = chat
        self._timing = timing
        self._audio_id = f"audio-{answer_id.rpartition('-')[2]}"
        self._head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": chat.model}
        self._with_text = "text" in chat.options.modalities
        self._header_sent = chat.audio_format != "wav"
        self._finish_reason = "stop"

    def role(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""} if self._with_text else {"role": "assistant"}, "text")

    def item(self, item: Item) -> bytes | None:
        """Its event; None for an item that only closes its edge."""
        match item.payload:
            case TextDelta(text, token_ids, finish_reason):
                self._finish_reason = finish_reason or self._finish_reason
                if not text:
                    return None
                self._timing.text(max(1, len(token_ids)))
                return self._chunk({"content": text}, "text") if self._with_text else None
            case AudioDelta(sample_rate):
                if "pcm" not in item.tensors:
                    return None
                pcm = bytes(item.tensors["pcm"].data)
                self._timing.audio(len(pcm) / 2 / sample_rate)
                if not self._header_sent:
                    self._header_sent = True
                    pcm = wav_header(sample_rate, None) + pcm
                return self._chunk({"audio": {"id": self._audio_id, "data": base64.b64encode(pcm).decode("ascii")}}, "audio")
            case InputTranscript(text):
                return self._chunk({}, "text", input_transcript=text) if text else None
            case other:
                raise TypeError(f"no client payload: {type(other).__name__}")

    def finish(self, stream: RequestStream, text_stage: str) -> bytes:
        """The last event with choices, the usage event if asked for, and the end."""
        last = self._chunk({}, "text", finish_reason=self._finish_reason)
        if self._chat.include_usage:
            last += event({**self._head, "choices": [], "usage": answer_usage(stream, text_stage)})
        return last + DONE

    def _chunk(self, delta: dict[str, Any], modality: str, *, finish_reason: str | None = None, **more: str) -> bytes:
        body = {
            **self._head,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
            "modality": modality,
            **more,
        }
        if self._chat.include_usage:
            body["usage"] = None
        return event(body)


def sse_response() -> web.StreamResponse:
    return web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )


async def stream_answer(
    request: web.Request,
    response: web.StreamResponse,
    stream: RequestStream,
    renderer: ChunkRenderer,
    timing: AnswerTiming,
    text_stage: str,
) -> None:
    """Writes the answer as it comes; each write waits for the reader, and with it the next item and its credit.

    A failure before the first item is raised, so that it becomes an HTTP status; a later one is an event.
    """
    items = aiter(stream)
    first = await anext(items, None)
    await response.prepare(request)
    try:
        opening = renderer.role()
        if first is not None:
            opening += renderer.item(first) or b""
        await response.write(opening)
        async for item in items:
            rendered = renderer.item(item)
            if rendered is not None:
                await response.write(rendered)
        timing.ended()
        await response.write(renderer.finish(stream, text_stage))
    except ConnectionError:
        request[OUTCOME] = Cancelled.status
    except OmniBusError as error:
        await _fail(request, response, error)
    except Exception:
        log.exception("request %s failed in mid-stream inside the server", request[REQUEST_ID])
        await _fail(request, response, internal_error())


async def _fail(request: web.Request, response: web.StreamResponse, error: OmniBusError) -> None:
    request[OUTCOME] = error.status
    request.app[METRICS].failed(error.code)
    await response.write(event(error_body(error)) + DONE)


def drop_reader(request: web.Request) -> None:
    """Past its deadline, a reader that has not taken what it was sent would not take an error either: close on it."""
    request[OUTCOME] = DeadlineExceeded.status
    request.app[METRICS].failed(DeadlineExceeded.code)
    if request.transport is not None:
        request.transport.abort()
