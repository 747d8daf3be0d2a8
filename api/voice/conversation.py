"""A conversation: its items in order, inserted, deleted and truncated as a client asks. No I/O, no asyncio."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omni_bus.api.voice.chat_prompt import to_chat
from omni_bus.api.voice.items import Item, OutputAudio, whole_ms
from omni_bus.api.voice.spoken_words import spoken_part
from omni_bus.errors import InvalidRequest
from omni_bus.payloads import ChatInput
from omni_bus.wire import HostTensor

ROOT = "root"  # `previous_item_id` of an item that is to come first


class ConversationError(InvalidRequest):
    """What a client asked of a conversation cannot be done; nothing was changed. `code` and `param` as OpenAI's error events."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationLimits:
    """What one conversation may hold; beyond it the oldest items are dropped, each whole."""

    max_items: int = 1000
    max_audio_s: float = 1800.0  # of the users' audio; 64 kB a second
    max_other_bytes: int = 32 * 1024 * 1024  # images and text


class Conversation:
    """evicted: called with each item that the limits drop, after it is gone."""

    def __init__(self, limits: ConversationLimits | None = None, *, evicted: Callable[[Item], None] | None = None) -> None:
        self._limits = limits or ConversationLimits()
        self._evicted = evicted
        self._items: list[Item] = []
        self._by_id: dict[str, Item] = {}

    @property
    def items(self) -> Sequence[Item]:
        """Oldest first. A view: copy it to keep it."""
        return self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._by_id

    def add(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Behind the item of that id; at the end for None, at the beginning for "root". Returns the id before it, None for none.

        Raises ConversationError: an id that is there already, a previous item that is not, an item larger than the limits.
        """
        if item.id in self._by_id:
            raise ConversationError(
                f"item.id: this conversation has an item {item.id[:64]!r} already; choose another id or leave it out",
                code="item_create_duplicate_item_id",
                param="item.id",
            )
        self._check_size(item)
        position = len(self._items)
        if previous_item_id == ROOT:
            position = 0
        elif previous_item_id is not None:
            position = self._position(previous_item_id, "create", "previous_item_id") + 1
        self._items.insert(position, item)
        self._by_id[item.id] = item
        self._evict(item)
        return self.previous_id(item.id)

    def complete(self, item: Item) -> None:
        """All of an item that was added while it was in progress is there. Raises ConversationError where it is larger than the limits."""
        self._check_size(item)
        item.status = "completed"
        self._evict(item)

    def previous_id(self, item_id: str) -> str | None:
        """The id of the item before this one; None for the first."""
        position = self._position(item_id, "retrieve", "item_id")
        return self._items[position - 1].id if position else None

    def get(self, item_id: str, action: str = "retrieve") -> Item:
        """ConversationError with the code `item_<action>_invalid_item_id` where there is none of that id."""
        return self._item(item_id, action, "item_id")

    def delete(self, item_id: str) -> Item:
        position = self._position(item_id, "delete", "item_id")
        return self._forget(position)

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> OutputAudio:
        """Cut a spoken answer to what was heard by `audio_end_ms`: its transcript keeps the words said by then, 0 keeps none.

        Raises ConversationError, also where the audio given out is shorter than `audio_end_ms`.
        """
        item = self.get(item_id, "truncate")
        if item.role != "assistant":
            raise ConversationError(
                "item_id: only the assistant's messages can be truncated", code="invalid_value", param="item_id"
            )
        part = item.content[content_index] if 0 <= content_index < len(item.content) else None
        if not isinstance(part, OutputAudio):
            raise ConversationError(
                f"content_index: the item has no audio at {content_index}", code="invalid_value", param="content_index"
            )
        if audio_end_ms < 0:
            raise ConversationError("audio_end_ms must be 0 or more", code="invalid_value", param="audio_end_ms")
        if audio_end_ms > whole_ms(part.duration_ms):
            raise ConversationError(
                f"audio_end_ms: the item's audio of {whole_ms(part.duration_ms)} ms is already shorter than {audio_end_ms} ms",
                code="invalid_value",
                param="audio_end_ms",
            )
        spoken_part(part, audio_end_ms, finished=item.status == "completed")
        return part

    def to_chat(
        self,
        instructions: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        items: Sequence[Item] | None = None,
        accepts: frozenset[str],
        prefer_transcripts: bool = False,
    ) -> tuple[ChatInput, dict[str, HostTensor]]:
        """What the pipeline is asked with: see chat_prompt.to_chat. `items`: these in place of the conversation's."""
        return to_chat(
            self._items if items is None else items, instructions, tools, accepts=accepts, prefer_transcripts=prefer_transcripts
        )

    def _position(self, item_id: str, action: str, param: str) -> int:
        return self._items.index(self._item(item_id, action, param))

    def _item(self, item_id: str, action: str, param: str) -> Item:
        item = self._by_id.get(item_id)
        if item is None:
            raise ConversationError(
                f"{param}: this conversation has no item {item_id[:64]!r}", code=f"item_{action}_invalid_{param}", param=param
            )
        return item

    def _check_size(self, item: Item) -> None:
        if item.audio_s > self._limits.max_audio_s or item.other_bytes > self._limits.max_other_bytes:
            raise ConversationError(
                f"item: a conversation keeps up to {self._limits.max_audio_s:g} s of audio and "
                f"{self._limits.max_other_bytes} bytes of images and text; this item alone is larger",
                code="item_create_too_large",
                param="item",
            )

    def _forget(self, position: int) -> Item:
        item = self._items.pop(position)
        del self._by_id[item.id]
        return item

    def _evict(self, newest: Item) -> None:
        """Drop the oldest until the limits hold; never the newest, nor what is still being given or fetched."""
        audio_s = sum(item.audio_s for item in self._items)
        other = sum(item.other_bytes for item in self._items)
        for item in list(self._items):
            limits = self._limits
            if len(self._items) <= limits.max_items and audio_s <= limits.max_audio_s and other <= limits.max_other_bytes:
                return
            if item is newest or item.status == "in_progress":
                continue
            self._forget(self._items.index(item))
            audio_s -= item.audio_s
            other -= item.other_bytes
            if self._evicted is not None:
                self._evicted(item)
