"""OpenAI's speech request as it stands in JSON, checked against the served model: a text for the speaking stages."""

from __future__ import annotations

import dataclasses

import msgspec

from omni_bus.api.chat_body import Int64, Priority, VoiceBody, decode_json
from omni_bus.api.served import ServedModel
from omni_bus.api.submission import deadline_s
from omni_bus.api.tempo import MAX_SPEED, MIN_SPEED
from omni_bus.errors import InvalidRequest
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, Message, TextPart

MAX_CHARACTERS = 4096  # of the input, as OpenAI has it, and of the instructions
FORMATS = {"mp3": "mp3", "opus": "opus", "aac": "aac", "flac": "flac", "wav": "wav", "pcm": "pcm16"}  # theirs → ours
_ASKED = "Read the text aloud, word for word."  # what a user asked whom a chat model's speech would answer so


class SpeechBody(msgspec.Struct, kw_only=True):
    """Fields that are not declared here are ignored."""

    model: str
    input: str
    voice: str | VoiceBody | None = None
    response_format: str | None = None
    speed: float | None = None
    instructions: str | None = None
    stream_format: str | None = None
    seed: Int64 | None = None
    timeout: float | None = None
    priority: Priority | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechRequest:
    payload: ChatInput
    options: RequestOptions
    audio_format: str  # of audio_encode.FORMATS
    speed: float
    events: bool  # SSE instead of the audio itself
    deadline_s: float
    priority: str | None  # None: not said


def parse_speech(body: bytes | bytearray, model: ServedModel, timeout_header: str | None = None) -> SpeechRequest:
    """InvalidRequest (400), NotFound (404, another model) or ModelRefused (422), each naming the field."""
    speech = decode_json(body, SpeechBody)
    model.check_name(speech.model)
    model.check_makes(("audio",), "model")
    _check_text("input", speech.input)
    if not speech.input.strip():
        raise InvalidRequest("input must hold a text to speak", param="input")
    _check_text("instructions", speech.instructions or "")
    audio_format = FORMATS.get(speech.response_format or "mp3")
    if audio_format is None:
        raise InvalidRequest(f"response_format must be one of {', '.join(FORMATS)}", param="response_format")
    if speech.stream_format not in (None, "audio", "sse"):
        raise InvalidRequest("stream_format must be audio or sse", param="stream_format")
    speed = 1.0 if speech.speed is None else speech.speed
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise InvalidRequest(f"speed must be a number from {MIN_SPEED:g} to {MAX_SPEED:g}", param="speed")
    name = speech.voice.id if isinstance(speech.voice, VoiceBody) else speech.voice
    # What speaks may read the user's turns and no system message: Qwen3-Omni's Talker does.
    asked = f"{_ASKED} {speech.instructions}" if speech.instructions else _ASKED
    return SpeechRequest(
        payload=ChatInput((Message("user", (TextPart(asked),)),), say=speech.input),
        options=RequestOptions(
            modalities=("audio",), voice=None if name is None else model.voice(name, "voice"), seed=speech.seed
        ),
        audio_format=audio_format,
        speed=speed,
        events=speech.stream_format == "sse",
        deadline_s=deadline_s(speech.timeout, timeout_header, model.max_deadline_s),
        priority=speech.priority,
    )


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"{name} may have up to {MAX_CHARACTERS} characters; it has {len(text)}", param=name)
