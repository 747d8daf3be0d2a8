"""How turns of a user are told: server_vad and semantic_vad with their fields, as a session's JSON has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_bus.api.chat_body import decode_json
from omni_bus.errors import InvalidRequest

Eagerness = Literal["low", "medium", "high", "auto"]

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Padding = Annotated[int, Meta(ge=0, le=5_000)]
Silence = Annotated[int, Meta(ge=0, le=10_000)]
Idle = Annotated[int, Meta(ge=5_000, le=30_000)]


class ServerVad(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="server_vad"):
    """A turn ends when silence has lasted long enough.

    idle_timeout_ms: so long after an answer has been played without a word of the user, the model is asked to say something.
    """

    threshold: Probability = 0.5  # from which a frame counts as speech
    prefix_padding_ms: Padding = 300
    silence_duration_ms: Silence = 500
    idle_timeout_ms: Idle | None = None
    create_response: bool = True
    interrupt_response: bool = True


class SemanticVad(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="semantic_vad"):
    """A turn ends when silence has lasted long enough for how finished the user sounded: see turn_end.py."""

    eagerness: Eagerness = "auto"
    create_response: bool = True
    interrupt_response: bool = True


TurnDetection = ServerVad | SemanticVad

_TYPES: dict[str, type[ServerVad] | type[SemanticVad]] = {"server_vad": ServerVad, "semantic_vad": SemanticVad}


def parse_turn_detection(raw: object, param: str, before: TurnDetection | None = None) -> TurnDetection | None:
    """raw: decoded JSON, or None for no detection. Fields not given keep what `before` says, where it is of the same type.

    Raises InvalidRequest naming the field below `param`.
    """
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{param} must be an object or null", param=param)
    named = raw.get("type", "server_vad" if before is None else turn_detection_type(before))
    if not isinstance(named, str) or named not in _TYPES:
        raise InvalidRequest(f"{param}.type must be one of {', '.join(_TYPES)}, or {param} null", param=f"{param}.type")
    given = {key: value for key, value in raw.items() if value is not None or key == "idle_timeout_ms"}
    kept = turn_detection_to_json(before) or {}
    whole = {**(kept if kept.get("type") == named else {}), **given, "type": named}
    text = msgspec.json.encode(whole)
    return decode_json(text, ServerVad, param) if named == "server_vad" else decode_json(text, SemanticVad, param)


def turn_detection_type(config: TurnDetection) -> str:
    return "server_vad" if isinstance(config, ServerVad) else "semantic_vad"


def turn_detection_to_json(config: TurnDetection | None) -> dict[str, Any] | None:
    if config is None:
        return None
    shown: dict[str, Any] = msgspec.to_builtins(config)
    return shown
