"""The hello of a duplex client, and its updates, merged into a session's settings; and the hello that answers both."""

from __future__ import annotations

import dataclasses
from typing import Any

from msgspec import UNSET

from omni_bus.api.duplex.client_messages import HelloBody, SettingsBody
from omni_bus.api.served import ServedModel
from omni_bus.api.voice.formats import RATES, AudioFormat
from omni_bus.api.voice.settings import SessionSettings, Transcription
from omni_bus.api.voice.turn_config import parse_turn_detection, turn_detection_to_json
from omni_bus.deployment import ApiConfig
from omni_bus.errors import InvalidRequest

VERSION = 1
_FORMATS: dict[int, AudioFormat] = {RATES[name]: name for name in ("pcm16", "pcm16_16k", "pcm16_8k")}
_FRAMES_PER_S = 10  # audio messages of the server are at most so long, whatever an answer's pieces are


@dataclasses.dataclass(frozen=True)
class DuplexSettings:
    """captions: spoken answers are sent in writing too."""

    session: SessionSettings
    captions: bool

    @property
    def output(self) -> str:
        if not self.session.speaks:
            return "text"
        return "both" if self.captions else "audio"

    @property
    def audio_bytes(self) -> int:
        """Of one message of the server's audio, at most."""
        return RATES[self.session.output_format] * 2 // _FRAMES_PER_S


def first_settings(hello: HelloBody, before: SessionSettings, model: ServedModel) -> DuplexSettings:
    """Raises InvalidRequest, ModelRefused or ModelNotFound, naming the field."""
    if hello.version != VERSION:
        raise InvalidRequest(
            f"version must be {VERSION}: this server speaks no other", param="version", code="unsupported_version"
        )
    if hello.model is not None:
        model.check_name(hello.model)
    changed: dict[str, AudioFormat] = {}
    if hello.input_rate is not None:
        changed["input_format"] = _format(hello.input_rate, "input_rate")
    if hello.output_rate is not None:
        changed["output_format"] = _format(hello.output_rate, "output_rate")
    settings = dataclasses.replace(before, **changed)  # type: ignore[arg-type]
    return _merged(hello, DuplexSettings(settings, captions=True), model)


def updated_settings(body: SettingsBody, before: DuplexSettings, model: ServedModel, *, spoken: bool) -> DuplexSettings:
    """spoken: the voice has been heard. Raises InvalidRequest or ModelRefused, naming the field."""
    for name in ("input_rate", "output_rate"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is fixed by the hello; open another session", param=name, code="cannot_update_rate")
    after = _merged(body, before, model)
    if spoken and after.session.voice != before.session.voice:
        raise InvalidRequest(
            "voice: it cannot be changed once it has been heard; open another session",
            param="voice",
            code="cannot_update_voice",
        )
    return after


def _merged(body: SettingsBody, before: DuplexSettings, model: ServedModel) -> DuplexSettings:
    changed: dict[str, Any] = {}
    captions = before.captions
    if body.output is not None:
        model.check_makes({"text" if body.output == "text" else "audio"}, "output")
        changed["speaks"] = body.output != "text"
        captions = body.output == "both"
    if body.voice is not None:
        changed["voice"] = model.voice(body.voice, "voice")
    if body.instructions is not None:
        changed["instructions"] = body.instructions
    if body.turn_detection is not UNSET:
        changed["turn_detection"] = parse_turn_detection(body.turn_detection, "turn_detection", before.session.turn_detection)
    if body.transcripts is not None:
        changed["transcription"] = Transcription() if body.transcripts else None
    if body.lead_ms is not None:
        changed["max_lead_s"] = body.lead_ms / 1000
    if body.max_output_tokens is not None:
        changed["max_output_tokens"] = body.max_output_tokens
    return DuplexSettings(dataclasses.replace(before.session, **changed), captions)


def _format(rate: int, param: str) -> AudioFormat:
    if rate not in _FORMATS:
        raise InvalidRequest(f"{param} must be one of {', '.join(map(str, _FORMATS))}", param=param)
    return _FORMATS[rate]


def hello_to_json(settings: DuplexSettings, session_id: str, model: ServedModel, config: ApiConfig) -> dict[str, Any]:
    session = settings.session
    lead_s = min(config.voice_lead_s, session.max_lead_s or config.voice_lead_s)
    return {
        "version": VERSION,
        "session": session_id,
        "model": model.name,
        "input_rate": RATES[session.input_format],
        "output_rate": RATES[session.output_format],
        "output": settings.output,
        "voice": session.voice,
        "turn_detection": turn_detection_to_json(session.turn_detection),
        "transcripts": session.transcription is not None,
        "lead_ms": round(lead_s * 1000),
        "audio_bytes": settings.audio_bytes,
        "limits": {
            "message_bytes": config.session_event_mb * 2**20,
            "messages_per_s": config.session_events_per_s,
            "buffer_s": config.session_buffer_s,
            "idle_s": config.session_idle_s,
            "session_s": config.session_s,
        },
    }
