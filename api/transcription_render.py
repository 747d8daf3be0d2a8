"""A transcript on its way out: gathered from the bus's items, sent as events while it is heard or as one body."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from omni_bus.api.bus import Item, RequestStream
from omni_bus.api.chat_usage import openai_usage
from omni_bus.api.sse import error_event, event
from omni_bus.api.timing import AnswerTiming
from omni_bus.api.transcript_formats import as_json, as_srt, as_verbose_json, as_vtt
from omni_bus.api.transcription_request import TranscriptionRequest
from omni_bus.errors import OmniBusError
from omni_bus.payloads import InputTranscript, TextDelta, TranscriptSegment


class Transcript:
    """What has been heard so far. `text` is the deltas of `take`, joined."""

    def __init__(self, timing: AnswerTiming) -> None:
        self._timing = timing
        self._begun = False
        self.text = ""
        self.segments: list[TranscriptSegment] = []
        self.language = ""

    def take(self, item: Item) -> str:
        """The text that an item adds, maybe none."""
        match item.payload:
            case InputTranscript(text, segments, language):
                self.segments += segments
                self.language = language or self.language
                if not text:
                    return ""
                return self._add(f" {text}" if self.text else text, tokens=None)
            case TextDelta(text, token_ids):
                text = text if self.text else text.lstrip()
                return self._add(text, tokens=max(1, len(token_ids))) if text else ""
            case other:
                raise TypeError(f"no transcript: {type(other).__name__}")

    def _add(self, text: str, tokens: int | None) -> str:
        """`tokens` None: a recogniser's, who writes a window at a time and not a token."""
        if tokens is not None or not self.text:
            self._timing.text(tokens or 1)
        self.text += text
        return text


class TranscriptEvents:
    """OpenAI's transcript.text events."""

    def __init__(self, transcript: Transcript, wanted: TranscriptionRequest, text_stage: str) -> None:
        self._transcript = transcript
        self._wanted = wanted
        self._text_stage = text_stage

    async def item(self, item: Item) -> bytes:
        delta = self._transcript.take(item)
        return event({"type": "transcript.text.delta", "delta": delta}) if delta else b""

    async def finish(self, stream: RequestStream) -> bytes:
        done: dict[str, Any] = {"type": "transcript.text.done", "text": self._transcript.text}
        if not self._wanted.alone:
            done["usage"] = token_usage(stream, self._text_stage)  # of this event OpenAI knows no other kind
        return event(done)

    def failure(self, error: OmniBusError) -> bytes:
        return error_event(error)


async def whole_transcript(
    stream: RequestStream,
    transcript: Transcript,
    wanted: TranscriptionRequest,
    text_stage: str,
    duration_s: float,
    timing: AnswerTiming,
) -> web.Response:
    async for item in stream:
        transcript.take(item)
    timing.ended()
    text, segments = transcript.text.strip(), transcript.segments
    if wanted.response_format == "text":
        return web.Response(text=f"{text}\n", content_type="text/plain")
    if wanted.response_format == "srt":
        return web.Response(text=as_srt(segments), content_type="text/plain")
    if wanted.response_format == "vtt":
        return web.Response(text=as_vtt(segments), content_type="text/vtt")
    if wanted.alone:
        usage: dict[str, Any] = {"type": "duration", "seconds": round(duration_s, 3)}
    else:
        usage = token_usage(stream, text_stage)
    if wanted.response_format == "json":
        body = as_json(text, usage)
    else:
        language = transcript.language or wanted.wish.language
        words = [word for segment in segments for word in segment.words] if wanted.wish.words else None
        body = as_verbose_json(text, segments if wanted.segments else None, words, language, duration_s, usage)
    return web.Response(body=body, content_type="application/json")


def token_usage(stream: RequestStream, text_stage: str) -> dict[str, Any]:
    counted = openai_usage(stream.usage, text_stage)
    return {
        "type": "tokens",
        "input_tokens": counted["prompt_tokens"],
        "output_tokens": counted["completion_tokens"],
        "total_tokens": counted["total_tokens"],
    }
