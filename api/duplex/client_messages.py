"""What a duplex client sends: the kinds of messages, and its control messages as they stand in JSON."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from omni_bus.api.chat_body import Int64, decode_json
from omni_bus.errors import InvalidRequest
from omni_bus.names import did_you_mean

MIN_LEAD_MS, MAX_LEAD_MS = 200, 60_000


class Kind(enum.IntEnum):
    """A message's first byte. Others are ignored, in both directions: later versions may have them."""

    HELLO = 0  # JSON
    AUDIO = 1  # PCM16
    TEXT = 2  # UTF-8
    CONTROL = 3  # JSON, of clients
    EVENT = 4  # JSON, of the server


class InvalidMessage(InvalidRequest):
    """A message that cannot be read, or may not come now."""

    code = "invalid_message"


class SettingsBody(msgspec.Struct, kw_only=True):
    """Fields that are not given stay as they are, or as the server has them by itself. The rates are for the hello alone."""

    input_rate: int | None = None
    output_rate: int | None = None
    instructions: str | None = None
    voice: str | None = None
    output: Literal["both", "audio", "text"] | None = None
    turn_detection: Any = UNSET
    transcripts: bool | None = None
    lead_ms: Annotated[int, Meta(ge=MIN_LEAD_MS, le=MAX_LEAD_MS)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class HelloBody(SettingsBody, kw_only=True):
    version: int
    model: str | None = None


class Commit(msgspec.Struct):
    """The user has finished: answer."""


class Clear(msgspec.Struct):
    """Forget the audio that has not become a turn."""


class Cancel(msgspec.Struct):
    """No more of what is being said."""


class Played(msgspec.Struct):
    """id: of the answer; None: the one whose audio was sent last."""

    ms: Annotated[float, Meta(ge=0, le=2**53)]
    id: str | None = None


class Update(SettingsBody):
    pass


class Ping(msgspec.Struct):
    id: Int64 | None = None


Control = Commit | Clear | Cancel | Played | Update | Ping
_CONTROLS: dict[str, type[Any]] = {
    "commit": Commit,
    "clear": Clear,
    "cancel": Cancel,
    "played": Played,
    "update": Update,
    "ping": Ping,
}


class _Head(msgspec.Struct):
    type: Any = None


def parse_control(body: bytes) -> Control:
    """Raises InvalidRequest."""
    said = decode_json(body, _Head).type
    if not isinstance(said, str):
        raise InvalidMessage("type is required: it says what a control message asks", param="type")
    if said not in _CONTROLS:
        hint = did_you_mean(said[:64], _CONTROLS)
        raise InvalidMessage(f"type: there is no control message {said[:64]!r}{hint}", param="type")
    control: Control = decode_json(body, _CONTROLS[said])
    return control


def parse_text(body: bytes) -> str:
    """Raises InvalidMessage."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise InvalidMessage("a text message must be UTF-8") from None
    if not text.strip():
        raise InvalidMessage("a text message must hold words")
    return text
