"""The session object: what `session.update` may say, merged into the settings as a whole or not at all, and how they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from omni_bus.api.chat_body import Int64, SamplingBody, decode_json
from omni_bus.api.realtime.answer_fields import AnswerBody, merge_answer, tool_choice_to_json
from omni_bus.api.served import ServedModel
from omni_bus.api.voice.formats import MAX_SPEED, MIN_SPEED, format_to_json, parse_format
from omni_bus.api.voice.settings import SessionSettings, Transcription
from omni_bus.api.voice.turn_config import parse_turn_detection, turn_detection_to_json
from omni_bus.errors import InvalidRequest
from omni_bus.names import did_you_mean
from omni_bus.sampling import SamplingParams


class _TranscriptionBody(msgspec.Struct):
    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class _NoiseReductionBody(msgspec.Struct):
    """Read for its type alone, since stock clients ask for it without being told to: there is none, and it is shown as off."""

    type: str | None = None

    def check(self, param: str) -> None:
        if self.type not in (None, "near_field", "far_field"):
            raise InvalidRequest(f"{param}.type must be near_field or far_field", param=f"{param}.type")


class _InputBody(msgspec.Struct):
    format: Any = None
    noise_reduction: _NoiseReductionBody | None = None
    transcription: _TranscriptionBody | UnsetType | None = UNSET
    turn_detection: Any = UNSET


class _OutputBody(msgspec.Struct):
    format: Any = None
    voice: Any = None
    speed: float | None = None


class _AudioBody(msgspec.Struct):
    input: _InputBody | None = None
    output: _OutputBody | None = None


class SessionBody(AnswerBody, kw_only=True):
    """Fields that are not given stay as they are. sampling and seed are ours: as in /v1/chat/completions."""

    type: str | None = None
    audio: _AudioBody | None = None
    sampling: dict[str, msgspec.Raw] | UnsetType | None = UNSET
    seed: Int64 | UnsetType | None = UNSET


def merge_session(raw: msgspec.Raw, before: SessionSettings, model: ServedModel) -> SessionSettings:
    """Raises InvalidRequest or ModelRefused, naming the field below `session`."""
    body = decode_json(raw, SessionBody, "session")
    if body.type not in (None, "realtime"):
        raise InvalidRequest("session.type must be realtime: this server has no other kind of session", param="session.type")
    changed: dict[str, Any] = {}
    audio_in = body.audio.input if body.audio is not None else None
    audio_out = body.audio.output if body.audio is not None else None
    if audio_in is not None:
        if audio_in.format is not None:
            changed["input_format"] = parse_format(audio_in.format, "session.audio.input.format")
        if audio_in.noise_reduction is not None:
            audio_in.noise_reduction.check("session.audio.input.noise_reduction")
        if audio_in.turn_detection is not UNSET:
            changed["turn_detection"] = parse_turn_detection(
                audio_in.turn_detection, "session.audio.input.turn_detection", before.turn_detection
            )
        if not isinstance(audio_in.transcription, UnsetType):
            changed["transcription"] = _transcription(audio_in.transcription, before.transcription)
    if audio_out is not None and audio_out.speed is not None:
        if not MIN_SPEED <= audio_out.speed <= MAX_SPEED:
            raise InvalidRequest(
                f"session.audio.output.speed must be from {MIN_SPEED:g} to {MAX_SPEED:g}", param="session.audio.output.speed"
            )
        changed["speed"] = audio_out.speed
    if not isinstance(body.sampling, UnsetType):
        changed["sampling"] = _sampling(body.sampling or {}, model)
    if not isinstance(body.seed, UnsetType):
        changed["seed"] = body.seed
    settings = merge_answer(
        body,
        before,
        model,
        "session",
        voice=audio_out.voice if audio_out is not None else None,
        output_format=audio_out.format if audio_out is not None else None,
    )
    return dataclasses.replace(settings, **changed)


def _transcription(body: _TranscriptionBody | None, before: Transcription | None) -> Transcription | None:
    if body is None:
        return None
    kept = before or Transcription()
    return Transcription(
        model=kept.model if body.model is None else body.model,
        language=kept.language if body.language is None else body.language,
        prompt=kept.prompt if body.prompt is None else body.prompt,
    )


def _sampling(stages: Mapping[str, msgspec.Raw], model: ServedModel) -> dict[str, SamplingParams]:
    said = {}
    for name, raw in stages.items():
        if name not in model.generating_stages:
            hint = did_you_mean(name[:40], model.generating_stages)
            raise InvalidRequest(f"session.sampling: no generating stage {name[:40]!r}{hint}", param="session.sampling")
        where = f"session.sampling.{name}"
        said[name] = decode_json(raw, SamplingBody, where).params()
        said[name].check(f"{where}.")
    return said


def session_to_json(settings: SessionSettings, session_id: str, model: str, expires_at: int) -> dict[str, Any]:
    """The whole session. What this server does not do is shown as off."""
    transcription = settings.transcription
    shown: dict[str, Any] = {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "model": model,
        "expires_at": expires_at,
        "output_modalities": ["audio"] if settings.speaks else ["text"],
        "instructions": settings.instructions,
        "audio": {
            "input": {
                "format": format_to_json(settings.input_format),
                "noise_reduction": None,
                "transcription": transcription and _given(transcription),
                "turn_detection": turn_detection_to_json(settings.turn_detection),
            },
            "output": {
                "format": format_to_json(settings.output_format),
                "voice": settings.voice,
                "speed": settings.speed,
            },
        },
        "max_output_tokens": "inf" if settings.max_output_tokens is None else settings.max_output_tokens,
        "tools": list(settings.tools),
        "tool_choice": tool_choice_to_json(settings.tool_choice),
        "truncation": "auto",
        "tracing": None,
        "prompt": None,
        "include": None,
    }
    if settings.sampling:
        shown["sampling"] = {
            name: {field: value for field, value in msgspec.to_builtins(params).items() if value is not None}
            for name, params in settings.sampling.items()
        }
    if settings.seed is not None:
        shown["seed"] = settings.seed
    return shown


def _given(transcription: Transcription) -> dict[str, str]:
    return {name: value for name, value in dataclasses.asdict(transcription).items() if value}
