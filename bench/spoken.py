"""A spoken turn over HTTP: makes the question, sends it as `input_audio`, reads the streamed answer and times it."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import io
import json
import time
import urllib.parse
import wave
from collections.abc import Iterator
from typing import Any

QUESTION = "What is the capital of France?"


@dataclasses.dataclass(slots=True)
class Answer:
    """What came back. Times are in seconds from the moment the client began to send the request (the end of the user's input)."""

    heard: str = ""
    text: str = ""
    pcm: bytes = b""  # int16 little-endian, mono, 24 kHz
    first_text_s: float | None = None
    first_audio_s: float | None = None
    last_text_s: float | None = None
    total_s: float = 0.0

    def wav(self) -> bytes:
        return wav(self.pcm, 24_000)


def wav(pcm: bytes, rate: int) -> bytes:
    """int16 little-endian mono samples as a WAV file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm)
    return out.getvalue()


def spoken(text: str) -> bytes:
    """The text as speech: a WAV file, made by the same small voice that answers."""
    import hibari
    import numpy

    audio = numpy.clip(hibari.Hibari()(text, seed=0), -1.0, 1.0)
    return wav((audio * 32767.0).astype("<i2").tobytes(), hibari.SAMPLE_RATE)


def ask(address: str, content: str | bytes, *, modalities: tuple[str, ...] = ("text", "audio"), **fields: Any) -> Answer:
    """One streamed chat completion at `address` (http://host:port). `content`: text, or a WAV file that is the spoken question.

    RuntimeError carries the server's own message when it answers with an error.
    """
    part = (
        {"type": "text", "text": content}
        if isinstance(content, str)
        else {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": "wav"}}
    )
    body = {
        "model": "cascade",
        "messages": [{"role": "user", "content": [part]}],
        "modalities": list(modalities),
        "stream": True,
        **fields,
    }
    if "audio" in modalities:
        body["audio"] = {"voice": "heart", "format": "pcm16"}
    encoded = json.dumps(body).encode()
    answer = Answer()
    url = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=120)
    try:
        connection.connect()
        begin = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", encoded, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {response.read().decode(errors='replace')}")
        for event in _events(response):
            _add(answer, event, time.perf_counter() - begin)
        answer.total_s = time.perf_counter() - begin
    finally:
        connection.close()
    return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise RuntimeError("the server closed the stream before its end")


def _add(answer: Answer, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        raise RuntimeError(f"the server failed: {event['error']['message']}")
    answer.heard = f"{answer.heard} {event.get('input_transcript') or ''}".strip()
    for choice in event["choices"]:
        delta = choice["delta"]
        if text := delta.get("content"):
            answer.text += text
            answer.last_text_s = now
            if answer.first_text_s is None:
                answer.first_text_s = now
        if data := (delta.get("audio") or {}).get("data"):
            answer.pcm += base64.b64decode(data)
            if answer.first_audio_s is None:
                answer.first_audio_s = now
