"""The eleven events of a client as they stand in JSON, and how one that cannot be read is refused."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from omni_bus.api.chat_body import decode_json
from omni_bus.api.realtime.answer_fields import AnswerBody
from omni_bus.errors import InvalidRequest
from omni_bus.names import did_you_mean

MAX_EVENT_ID = 512  # characters of a client's event_id that come back in an error
Milliseconds = Annotated[int, Meta(ge=0, le=2**53)]
Index = Annotated[int, Meta(ge=0, le=2**31)]


class _Event(msgspec.Struct, kw_only=True, tag_field="type"):
    event_id: str | None = None


class SessionUpdate(_Event, tag="session.update"):
    session: msgspec.Raw


class AudioAppend(_Event, tag="input_audio_buffer.append"):
    audio: str  # base64


class AudioCommit(_Event, tag="input_audio_buffer.commit"):
    pass


class AudioClear(_Event, tag="input_audio_buffer.clear"):
    pass


class OutputClear(_Event, tag="output_audio_buffer.clear"):
    pass


class ItemCreate(_Event, tag="conversation.item.create"):
    item: msgspec.Raw
    previous_item_id: str | None = None


class ItemRetrieve(_Event, tag="conversation.item.retrieve"):
    item_id: str


class ItemTruncate(_Event, tag="conversation.item.truncate"):
    item_id: str
    content_index: Index
    audio_end_ms: Milliseconds


class ItemDelete(_Event, tag="conversation.item.delete"):
    item_id: str


class _AudioOutputBody(msgspec.Struct):
    format: Any = None
    voice: Any = None


class _AudioBody(msgspec.Struct):
    output: _AudioOutputBody | None = None


class ResponseBody(AnswerBody, kw_only=True):
    conversation: str | None = None
    input: list[msgspec.Raw] | None = None
    metadata: dict[str, str] | None = None
    audio: _AudioBody | None = None


class ResponseCreate(_Event, tag="response.create"):
    response: ResponseBody | None = None


class ResponseCancel(_Event, tag="response.cancel"):
    response_id: str | None = None


ClientEvent = (
    SessionUpdate
    | AudioAppend
    | AudioCommit
    | AudioClear
    | OutputClear
    | ItemCreate
    | ItemRetrieve
    | ItemTruncate
    | ItemDelete
    | ResponseCreate
    | ResponseCancel
)
_KINDS: dict[str, type[Any]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
    "output_audio_buffer.clear": OutputClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.truncate": ItemTruncate,
    "conversation.item.delete": ItemDelete,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}


class _Head(msgspec.Struct):
    type: Any = None
    event_id: Any = None


class Unreadable(Exception):
    """What was sent is no event. cause: its event_id, where that much could be read."""

    def __init__(self, error: InvalidRequest, cause: str | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.cause = cause


def parse_event(data: bytes) -> ClientEvent:
    """Raises Unreadable."""
    cause = None
    try:
        head = decode_json(data, _Head)
        if isinstance(head.event_id, str):
            cause = head.event_id[:MAX_EVENT_ID]
        if not isinstance(head.type, str):
            raise InvalidRequest("type is required: it says which event this is", param="type")
        kind = _KINDS.get(head.type)
        if kind is None:
            hint = did_you_mean(head.type[:64], _KINDS)
            raise InvalidRequest(f"type: there is no event {head.type[:64]!r}{hint}", param="type")
        event: ClientEvent = decode_json(data, kind)
    except InvalidRequest as error:
        raise Unreadable(error, cause) from None
    if event.event_id is not None:
        event.event_id = event.event_id[:MAX_EVENT_ID]
    return event
