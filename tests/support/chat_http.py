"""Cases of tests.support.qwen3_omni as chat requests over HTTP, and what a stream of events answers."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import urllib.request
from typing import Any

import numpy as np
import soundfile

from tests.support.qwen3_omni import Case, lossless_video, png


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    """A float WAV: the samples arrive bit for bit."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def messages(case: Case) -> list[dict[str, Any]]:
    return [{"role": role, "content": [_part(part) for part in parts]} for role, parts in case.turns]


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind, content = part
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(content)).decode(), "format": "wav"}}
    data, mime = (png(content), "image/png") if kind == "image" else (lossless_video(content, fps=4), "video/x-matroska")
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


@dataclasses.dataclass
class Answer:
    """A streamed answer put together. pcm: int16 [samples]; order: "text" and "audio" as the deltas came."""

    text: str = ""
    pcm: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int16))
    order: list[str] = dataclasses.field(default_factory=list)
    audio_sizes: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)
    errors: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def stream(url: str, body: dict[str, Any], seconds: float = 300.0) -> Answer:
    """POST the body as a streaming chat request and read it to its [DONE]."""
    said = {**body, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(said).encode(), {"Content-Type": "application/json"}
    )
    answer, done = Answer(), False
    with urllib.request.urlopen(request, timeout=seconds) as response:
        for line in response:
            if not line.startswith(b"data: "):
                assert not line.strip(), line
                continue
            assert not done, "an event after [DONE]"
            if line.strip() == b"data: [DONE]":
                done = True
            else:
                _take(answer, json.loads(line[6:]))
    assert done, "the stream ended without [DONE]"
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.errors.append(event["error"])
        return
    if event.get("usage"):
        answer.usage = event["usage"]
    for choice in event["choices"]:
        delta = choice["delta"]
        if delta.get("content"):
            answer.text += delta["content"]
            answer.order.append("text")
        if delta.get("audio"):
            pcm = np.frombuffer(base64.b64decode(delta["audio"]["data"]), np.int16)
            assert len(pcm), "an empty audio delta"
            answer.pcm = np.concatenate((answer.pcm, pcm))
            answer.order.append("audio")
            answer.audio_sizes.append(len(pcm))
        if choice["finish_reason"]:
            assert answer.finish_reason is None, "finish_reason came twice"
            answer.finish_reason = choice["finish_reason"]
