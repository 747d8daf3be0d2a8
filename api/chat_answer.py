"""The whole answer at once: one OpenAI chat.completion."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any

import msgspec

from omni_bus.api.audio_encode import encode_audio
from omni_bus.api.bus import RequestStream
from omni_bus.api.chat_pieces import AnswerPieces, CallArguments, CallNew, Heard, Said, Sound, Words
from omni_bus.api.chat_request import ChatRequest
from omni_bus.api.chat_usage import answer_usage
from omni_bus.api.timing import AnswerTiming

_SLICE = 3 * 2**18  # bytes to base64 at a time: a multiple of 3, and short enough to let the loop in between


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    call_id: str
    name: str
    arguments: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


async def whole_answer(
    chat: ChatRequest,
    stream: RequestStream,
    answer_id: str,
    created: int,
    timing: AnswerTiming,
    text_stage: str,
    threads: Executor,
) -> bytes:
    """The JSON. Audio is encoded in a thread."""
    texts: list[str] = []
    calls: list[_Call] = []
    pcm = bytearray()
    sample_rate = 0
    transcripts: list[str] = []
    pieces = AnswerPieces(timing, may_call=chat.may_call, one_call=chat.one_call)

    def take(said: Iterable[Said]) -> None:
        nonlocal sample_rate
        for piece in said:
            match piece:
                case Words(text):
                    texts.append(text)
                case CallNew(_, call_id, name):
                    calls.append(_Call(call_id, name))
                case CallArguments(index, text):
                    calls[index].arguments.append(text)
                case Sound(samples, rate):
                    sample_rate = rate
                    pcm.extend(samples)
                case Heard(text):
                    transcripts.append(text)

    async for item in stream:
        take(pieces.of(item))
    take(pieces.rest())
    timing.ended()
    content = "".join(texts)
    written = "text" in chat.options.modalities and (content or not calls)
    message: dict[str, Any] = {"role": "assistant", "content": content if written else None}
    if calls:
        message["tool_calls"] = [call.to_json() for call in calls]
    if transcripts:
        message["input_transcript"] = "\n".join(transcripts)  # one for each piece of audio
    body = {
        "id": answer_id,
        "object": "chat.completion",
        "created": created,
        "model": chat.model,
        "choices": [{"index": 0, "message": message, "finish_reason": pieces.finish_reason, "logprobs": None}],
        "usage": answer_usage(stream, text_stage),
    }
    if not pcm:
        return msgspec.json.encode(body)
    # The answer is not kept, so its audio cannot be referred to later: it expires as it is made.
    message["audio"] = {"id": f"audio-{answer_id.rpartition('-')[2]}", "transcript": content, "expires_at": created}
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(threads, _with_audio, body, message["audio"], pcm, sample_rate, chat.audio_format)


def _with_audio(body: dict[str, Any], audio: dict[str, Any], pcm: bytearray, sample_rate: int, audio_format: str) -> bytes:
    encoded = encode_audio(pcm, sample_rate, audio_format)
    text = b"".join(base64.b64encode(encoded[start : start + _SLICE]) for start in range(0, len(encoded), _SLICE))
    audio["data"] = msgspec.Raw(b'"' + text + b'"')
    return msgspec.json.encode(body)
