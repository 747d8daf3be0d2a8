"""`response.create`: what one response is asked to be, over what the session says."""

from __future__ import annotations

from typing import Protocol

import msgspec

from omni_bus.api.chat_body import decode_json
from omni_bus.api.realtime.answer_fields import merge_answer
from omni_bus.api.realtime.client_events import ResponseBody
from omni_bus.api.served import ServedModel
from omni_bus.api.voice.item_json import RemoteImage, item_from_json
from omni_bus.api.voice.items import Item
from omni_bus.api.voice.settings import ResponseWish, SessionSettings
from omni_bus.errors import InvalidRequest

MAX_METADATA = 16  # pairs, and
MAX_KEY, MAX_VALUE = 64, 512  # characters, as OpenAI has them
MAX_INPUT = 1000


class _Session(Protocol):
    @property
    def settings(self) -> SessionSettings: ...
    @property
    def spoken(self) -> bool: ...
    def get_item(self, item_id: str) -> Item: ...


class _Kind(msgspec.Struct):
    type: str | None = None
    id: str | None = None


def read_wish(body: ResponseBody | None, session: _Session, model: ServedModel, remote: list[RemoteImage]) -> ResponseWish:
    """remote: gets the images of `input` that are yet to be fetched. Raises InvalidRequest, ModelRefused or ConversationError, naming the field below `response`."""
    if body is None:
        return ResponseWish(settings=session.settings)
    if body.conversation not in (None, "auto", "none"):
        raise InvalidRequest("response.conversation must be auto or none", param="response.conversation")
    output = body.audio.output if body.audio is not None else None
    settings = merge_answer(
        body,
        session.settings,
        model,
        "response",
        voice=output.voice if output is not None else None,
        output_format=output.format if output is not None else None,
    )
    if session.spoken and settings.voice != session.settings.voice:
        raise InvalidRequest(
            "response.audio.output.voice: the voice cannot be changed once it has been heard",
            param="response.audio.output.voice",
            code="cannot_update_voice",
        )
    return ResponseWish(
        settings=settings,
        in_conversation=body.conversation != "none",
        input=None if body.input is None else _input(body.input, session, model, remote),
        metadata=_metadata(body.metadata),
    )


def _input(raws: list[msgspec.Raw], session: _Session, model: ServedModel, remote: list[RemoteImage]) -> tuple[Item, ...]:
    if len(raws) > MAX_INPUT:
        raise InvalidRequest(f"response.input may hold up to {MAX_INPUT} items", param="response.input")
    items = []
    for index, raw in enumerate(raws):
        where = f"response.input[{index}]"
        kind = decode_json(raw, _Kind, where)
        if kind.type == "item_reference":
            items.append(session.get_item(kind.id or ""))
        else:
            accepts = model.pipeline.input_kinds
            input_format = session.settings.input_format
            items.append(item_from_json(raw, input_format=input_format, accepts=accepts, where=where, remote=remote))
    return tuple(items)


def _metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"response.metadata may hold up to {MAX_METADATA} pairs", param="response.metadata")
    if any(len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in metadata.items()):
        raise InvalidRequest(
            f"response.metadata: keys have up to {MAX_KEY} characters and values up to {MAX_VALUE}", param="response.metadata"
        )
    return metadata
