"""The streamed answer: the bus's items as OpenAI chat.completion.chunk events."""

from __future__ import annotations

import base64
from typing import Any

from omni_bus.api.bus import Item, RequestStream
from omni_bus.api.chat_pieces import AnswerPieces, CallArguments, CallNew, Heard, Said, Sound, Words
from omni_bus.api.chat_request import ChatRequest
from omni_bus.api.chat_usage import answer_usage, broken_off_usage
from omni_bus.api.sse import DONE, error_event, event
from omni_bus.api.timing import AnswerTiming
from omni_bus.api.usage_so_far import UsageSoFar
from omni_bus.api.wav import wav_header
from omni_bus.errors import OmniBusError


class ChunkRenderer:
    """Items to events, in order; keeps what the last events need. Before the first comes one with the role alone."""

    def __init__(self, chat: ChatRequest, answer_id: str, created: int, timing: AnswerTiming, text_stage: str) -> None:
        self._chat = chat
        self._audio_id = f"audio-{answer_id.rpartition('-')[2]}"
        self._head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": chat.model}
        self._with_text = "text" in chat.options.modalities
        self._header_sent = chat.audio_format != "wav"
        self._pieces = AnswerPieces(timing, may_call=chat.may_call, one_call=chat.one_call)
        self._text_stage = text_stage
        self._used = UsageSoFar(text_stage)
        self._opening = self._chunk(self._role(chat), "text")

    async def item(self, item: Item) -> bytes:
        """Its events; none for an item that only closes its edge."""
        self._used.take(item)
        return self._take_opening() + b"".join(self._event(piece) for piece in self._pieces.of(item))

    def _take_opening(self) -> bytes:
        opening, self._opening = self._opening, b""
        return opening

    def _role(self, chat: ChatRequest) -> dict[str, Any]:
        """Content is null for an answer that may turn out to be calls alone, and an empty text before words."""
        return {"role": "assistant", "content": None if chat.may_call else ""} if self._with_text else {"role": "assistant"}

    def _event(self, piece: Said) -> bytes:
        match piece:
            case Words(text):
                return self._chunk({"content": text}, "text") if self._with_text else b""
            case CallNew(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return self._chunk({"tool_calls": [call]}, "text")
            case CallArguments(index, text):
                return self._chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]}, "text")
            case Sound(samples, sample_rate):
                pcm = bytes(samples)
                if not self._header_sent:
                    self._header_sent = True
                    pcm = wav_header(sample_rate, None) + pcm
                return self._chunk({"audio": {"id": self._audio_id, "data": base64.b64encode(pcm).decode("ascii")}}, "audio")
            case Heard(text):
                return self._chunk({}, "text", input_transcript=text)

    async def finish(self, stream: RequestStream) -> bytes:
        """The last event with choices, the usage event if asked for, and the end."""
        last = self._take_opening() + b"".join(self._event(piece) for piece in self._pieces.rest())
        last += self._chunk({}, "text", finish_reason=self._pieces.finish_reason)
        return last + self._usage(answer_usage(stream, self._text_stage)) + DONE

    def failure(self, error: OmniBusError) -> bytes:
        return self._usage(broken_off_usage(self._used, self._text_stage)) + error_event(error) + DONE

    def _usage(self, usage: dict[str, Any]) -> bytes:
        return event({**self._head, "choices": [], "usage": usage}) if self._chat.include_usage else b""

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
