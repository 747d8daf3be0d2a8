"""How turns of a user are told: server_vad and semantic_vad with their fields, as a session's JSON has them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Eagerness = Literal["low", "medium", "high", "auto"]


class ServerVad(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="server_vad"):
    """A turn ends when silence has lasted long enough.

    idle_timeout_ms: so long after an answer has been played without a word of the user, the model is asked to say something.
    """

    threshold: float = 0.5  # 0 to 1: probability from which a frame counts as speech
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None
    create_response: bool = True
    interrupt_response: bool = True


class SemanticVad(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="semantic_vad"):
    """A turn ends when silence has lasted long enough for how finished the user sounded: see turn_end.py."""

    eagerness: Eagerness = "auto"
    create_response: bool = True
    interrupt_response: bool = True


TurnDetection = ServerVad | SemanticVad


def parse_turn_detection(raw: object, param: str, before: TurnDetection | None = None) -> TurnDetection | None:
    """raw: decoded JSON, or None for no detection. Fields not given keep what `before` says, where it is of the same type.

    Raises InvalidRequest naming the field below `param`.
    """
    raise NotImplementedError


def turn_detection_to_json(config: TurnDetection | None) -> dict[str, Any] | None:
    raise NotImplementedError
