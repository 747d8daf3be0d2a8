"""The whole answer at once: one OpenAI chat.completion."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import Executor
from typing import Any

import msgspec

from omni_bus.api.audio_encode import encode_audio
from omni_bus.api.bus import RequestStream
from omni_bus.api.chat_request import ChatRequest
from omni_bus.api.chat_usage import answer_usage
from omni_bus.api.timing import AnswerTiming
from omni_bus.payloads import AudioDelta, InputTranscript, TextDelta

_SLICE = 3 * 2**18  # bytes to base64 at a time: a multiple of 3, and short enough to let the loop in between


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
    pcm = bytearray()
    sample_rate = 0
    transcripts: list[str] = []
    finish_reason = "stop"
    async for item in stream:
        match item.payload:
            case TextDelta(text, token_ids, reason):
                finish_reason = reason or finish_reason
                if text:
                    texts.append(text)
                    timing.text(max(1, len(token_ids)))
            case AudioDelta(rate):
                if "pcm" in item.tensors:
                    sample_rate = rate
                    pcm += item.tensors["pcm"].data
                    timing.audio(len(item.tensors["pcm"].data) / 2 / rate)
            case InputTranscript(heard):
                if heard:
                    transcripts.append(heard)
            case other:
                raise TypeError(f"no client payload: {type(other).__name__}")
    timing.ended()
    content = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": content if "text" in chat.options.modalities else None}
    if transcripts:
        message["input_transcript"] = "\n".join(transcripts)  # one for each piece of audio
    body = {
        "id": answer_id,
        "object": "chat.completion",
        "created": created,
        "model": chat.model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
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
