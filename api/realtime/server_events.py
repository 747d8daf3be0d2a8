"""A voice session's events as the Realtime protocol's: every server event's name and fields, in one table."""

from __future__ import annotations

import base64
import dataclasses
import secrets
from typing import Any

import msgspec

from omni_bus.api.errors_render import error_body
from omni_bus.api.voice import events
from omni_bus.api.voice.events import InPart, ResponseState, SessionEvent, Usage
from omni_bus.api.voice.formats import format_to_json
from omni_bus.api.voice.items import OutputAudio, OutputText, Part
from omni_bus.errors import OmniBusError


@dataclasses.dataclass(frozen=True, slots=True)
class SessionShown(SessionEvent):
    """`created` or `updated`, and the whole session object."""

    what: str
    session: dict[str, Any]


def render(event: SessionEvent) -> bytes:
    """The event's JSON, with an event_id of ours."""
    kind, fields = _fields(event)
    return msgspec.json.encode({"type": kind, "event_id": f"event_{secrets.token_hex(10)}", **fields})


def _fields(event: SessionEvent) -> tuple[str, dict[str, Any]]:
    match event:
        case events.OutputAudioDelta(data=data):
            return "response.output_audio.delta", {**_where(event), "delta": base64.b64encode(data).decode("ascii")}
        case events.OutputTranscriptDelta(delta=delta):
            return "response.output_audio_transcript.delta", {**_where(event), "delta": delta}
        case events.OutputTextDelta(delta=delta):
            return "response.output_text.delta", {**_where(event), "delta": delta}
        case events.OutputAudioDone():
            return "response.output_audio.done", _where(event)
        case events.OutputTranscriptDone(transcript=transcript):
            return "response.output_audio_transcript.done", {**_where(event), "transcript": transcript}
        case events.OutputTextDone(text=text):
            return "response.output_text.done", {**_where(event), "text": text}
        case events.PartAdded(part=part):
            return "response.content_part.added", {**_where(event), "part": _part(part)}
        case events.PartDone(part=part):
            return "response.content_part.done", {**_where(event), "part": _part(part)}
        case events.OutputItemAdded(response_id, output_index, item):
            return "response.output_item.added", {
                "response_id": response_id,
                "output_index": output_index,
                "item": item.to_json(),
            }
        case events.OutputItemDone(response_id, output_index, item):
            return "response.output_item.done", {
                "response_id": response_id,
                "output_index": output_index,
                "item": item.to_json(),
            }
        case events.CallArgumentsDelta(response_id, item_id, output_index, call_id, delta):
            return "response.function_call_arguments.delta", {
                "response_id": response_id,
                "item_id": item_id,
                "output_index": output_index,
                "call_id": call_id,
                "delta": delta,
            }
        case events.CallArgumentsDone(response_id, item_id, output_index, call_id, name, arguments):
            return "response.function_call_arguments.done", {
                "response_id": response_id,
                "item_id": item_id,
                "output_index": output_index,
                "call_id": call_id,
                "name": name,
                "arguments": arguments,
            }
        case events.ResponseCreated(response):
            return "response.created", {"response": response_to_json(response)}
        case events.ResponseDone(response):
            return "response.done", {"response": response_to_json(response)}
        case events.ItemAdded(item, previous):
            return "conversation.item.added", {"previous_item_id": previous, "item": item.to_json()}
        case events.ItemDone(item, previous):
            return "conversation.item.done", {"previous_item_id": previous, "item": item.to_json()}
        case events.ItemRetrieved(item, audio):
            shown = item.to_json()
            for index, data in audio.items():
                shown["content"][index]["audio"] = base64.b64encode(data).decode("ascii")
            return "conversation.item.retrieved", {"item": shown}
        case events.ItemDeleted(item_id):
            return "conversation.item.deleted", {"item_id": item_id}
        case events.ItemTruncated(item_id, content_index, audio_end_ms):
            return "conversation.item.truncated", {
                "item_id": item_id,
                "content_index": content_index,
                "audio_end_ms": audio_end_ms,
            }
        case events.InputTranscriptDelta(item_id, content_index, delta):
            return "conversation.item.input_audio_transcription.delta", {
                "item_id": item_id,
                "content_index": content_index,
                "delta": delta,
            }
        case events.InputTranscriptDone(item_id, content_index, transcript):
            return "conversation.item.input_audio_transcription.completed", {
                "item_id": item_id,
                "content_index": content_index,
                "transcript": transcript,
                "usage": _transcript_usage(event),
            }
        case events.InputTranscriptFailed(item_id, content_index, error):
            return "conversation.item.input_audio_transcription.failed", {
                "item_id": item_id,
                "content_index": content_index,
                "error": error_body(error)["error"],
            }
        case events.InputCommitted(item_id, previous):
            return "input_audio_buffer.committed", {"previous_item_id": previous, "item_id": item_id}
        case events.InputCleared():
            return "input_audio_buffer.cleared", {}
        case events.UserSpeechStarted(item_id, audio_start_ms):
            return "input_audio_buffer.speech_started", {"audio_start_ms": audio_start_ms, "item_id": item_id}
        case events.UserSpeechStopped(item_id, audio_end_ms):
            return "input_audio_buffer.speech_stopped", {"audio_end_ms": audio_end_ms, "item_id": item_id}
        case events.UserIdle(item_id, audio_start_ms, audio_end_ms):
            return "input_audio_buffer.timeout_triggered", {
                "audio_start_ms": audio_start_ms,
                "audio_end_ms": audio_end_ms,
                "item_id": item_id,
            }
        case events.OutputCleared(response_id):
            return "output_audio_buffer.cleared", {"response_id": response_id or ""}
        case events.ErrorRaised(error, cause):
            return "error", {"error": {**error_body(error)["error"], "event_id": cause}}
        case SessionShown(what, session):
            return f"session.{what}", {"session": session}
        case other:
            raise TypeError(f"no server event for {type(other).__name__}")


def _where(event: InPart) -> dict[str, Any]:
    return {
        "response_id": event.response_id,
        "item_id": event.item_id,
        "output_index": event.output_index,
        "content_index": event.content_index,
    }


def _part(part: Part) -> dict[str, Any]:
    """As content_part events show it: the types there are shorter than an item's."""
    if isinstance(part, OutputAudio):
        return {"type": "audio", "transcript": part.transcript}
    assert isinstance(part, OutputText)
    return {"type": "text", "text": part.text}


def response_to_json(response: ResponseState) -> dict[str, Any]:
    output: dict[str, Any] = {"format": format_to_json(response.output_format), "voice": response.voice}
    return {
        "id": response.id,
        "object": "realtime.response",
        "status": response.status,
        "status_details": _status_details(response),
        "output": [item.to_json() for item in response.output],
        "conversation_id": response.conversation_id,
        "output_modalities": ["audio"] if response.speaks else ["text"],
        "max_output_tokens": "inf" if response.max_output_tokens is None else response.max_output_tokens,
        "audio": {"output": output},
        "metadata": response.metadata,
        "usage": None if response.usage is None else _usage(response.usage),
    }


def _status_details(response: ResponseState) -> dict[str, Any] | None:
    if response.status in ("in_progress", "completed"):
        return None
    details: dict[str, Any] = {"type": response.status}
    if response.reason is not None:
        details["reason"] = response.reason
    if response.error is not None:
        details["error"] = _error(response.error)
    return details


def _error(error: OmniBusError) -> dict[str, Any]:
    whole = error_body(error)["error"]
    return {name: whole[name] for name in ("type", "code", "message")}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "total_tokens": usage.input + usage.output,
        "input_tokens": usage.input,
        "output_tokens": usage.output,
        "input_token_details": {
            "text_tokens": usage.input_text,
            "audio_tokens": usage.input_audio,
            "image_tokens": usage.input_image,
            "cached_tokens": usage.cached,
        },
        "output_token_details": {"text_tokens": usage.output_text, "audio_tokens": usage.output_audio},
    }


def _transcript_usage(event: events.InputTranscriptDone) -> dict[str, Any]:
    if event.input_tokens is None or event.output_tokens is None:
        return {"type": "duration", "seconds": round(event.seconds, 3)}
    return {
        "type": "tokens",
        "total_tokens": event.input_tokens + event.output_tokens,
        "input_tokens": event.input_tokens,
        "output_tokens": event.output_tokens,
    }
