"""The streamed answer: the bus's items as OpenAI chat.completion.chunk events."""

from __future__ import annotations

import base64
from typing import Any

from omni_bus.api.bus import Item, RequestStream
from omni_bus.api.chat_request import ChatRequest
from omni_bus.api.chat_usage import answer_usage
from omni_bus.api.sse import DONE, error_event, event
from omni_bus.api.timing import AnswerTiming
from omni_bus.api.wav import wav_header
from omni_bus.errors import OmniBusError
from omni_bus.payloads import AudioDelta, InputTranscript, TextDelta


class ChunkRenderer:
    """Items to events, in order; keeps what the last events need. Before the first comes one with the role alone."""

    def __init__(self, chat: ChatRequest, answer_id: str, created: int, timing: AnswerTiming, text_stage: str) -> None:
        self._chat = chat
        self._timing = timing
        self._audio_id = f"audio-{answer_id.rpartition('-')[2]}"
        self._head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": chat.model}
        self._with_text = "text" in chat.options.modalities
        self._header_sent = chat.audio_format != "wav"
        self._finish_reason = "stop"
        self._text_stage = text_stage
        self._opening = self._chunk({"role": "assistant", "content": ""} if self._with_text else {"role": "assistant"}, "text")

    async def item(self, item: Item) -> bytes:
        """Its event; nothing for an item that only closes its edge."""
        opening, self._opening = self._opening, b""
        return opening + (self._event(item) or b"")

    def _event(self, item: Item) -> bytes | None:
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

    async def finish(self, stream: RequestStream) -> bytes:
        """The last event with choices, the usage event if asked for, and the end."""
        last = self._opening + self._chunk({}, "text", finish_reason=self._finish_reason)
        if self._chat.include_usage:
            last += event({**self._head, "choices": [], "usage": answer_usage(stream, self._text_stage)})
        return last + DONE

    def failure(self, error: OmniBusError) -> bytes:
        return error_event(error) + DONE

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
