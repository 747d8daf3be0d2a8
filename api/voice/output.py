"""The output of one response: its items, opened and closed one after the other, each step told as the events that belong to it."""

from __future__ import annotations

from collections.abc import Callable

from omni_bus.api.voice import events
from omni_bus.api.voice.conversation import Conversation
from omni_bus.api.voice.events import SessionEvent, snapshot
from omni_bus.api.voice.items import Item, OutputAudio, OutputText
from omni_bus.api.voice.items import Status as ItemStatus

PART = 0  # an answer's message has one part


class ResponseOutput:
    """At most one item is open. conversation: where the items go; None for an out-of-band response."""

    def __init__(
        self, response_id: str, conversation: Conversation | None, *, speaks: bool, emit: Callable[[SessionEvent], None]
    ) -> None:
        self._response_id = response_id
        self._conversation = conversation
        self._speaks = speaks
        self._emit = emit
        self.items: list[Item] = []
        self._open: Item | None = None

    @property
    def message(self) -> Item | None:
        """The message that is being given."""
        return self._open if self._open is not None and self._open.kind == "message" else None

    @property
    def call(self) -> Item | None:
        """The function call that is being written."""
        return self._open if self._open is not None and self._open.kind == "function_call" else None

    # ---- a message

    def open_message(self) -> Item:
        part = OutputAudio() if self._speaks else OutputText("")
        item = Item.message("assistant", status="in_progress")
        self._add(item)
        item.content.append(part)
        if self._speaks:
            self._emit(events.PartAdded(*self._where, OutputAudio()))
        else:
            self._emit(events.PartAdded(*self._where, OutputText("")))
        return item

    def text(self, text: str) -> None:
        """More of the open message's text: a transcript, where the message is spoken."""
        part = self._part()
        if isinstance(part, OutputAudio):
            part.add_text(text)
            self._emit(events.OutputTranscriptDelta(*self._where, text))
        else:
            part.text += text
            self._emit(events.OutputTextDelta(*self._where, text))

    def audio(self, data: bytes, duration_ms: float, spoken: int | None) -> None:
        """More of the open message's audio. spoken: characters of its transcript said at its end, where that is known."""
        part = self._part()
        assert isinstance(part, OutputAudio)
        part.add_audio(duration_ms, None if spoken is None else min(spoken, len(part.transcript)))
        self._emit(events.OutputAudioDelta(*self._where, data))

    def close_message(self, status: ItemStatus) -> None:
        part = self._part()
        if isinstance(part, OutputAudio):
            self._emit(events.OutputAudioDone(*self._where))
            self._emit(events.OutputTranscriptDone(*self._where, part.transcript))
            self._emit(events.PartDone(*self._where, OutputAudio(part.transcript)))
        else:
            self._emit(events.OutputTextDone(*self._where, part.text))
            self._emit(events.PartDone(*self._where, OutputText(part.text)))
        self._close(status)

    # ---- a function call

    def open_call(self, name: str) -> None:
        self._add(Item.function_call(name, status="in_progress"))

    def arguments(self, text: str) -> None:
        call = self._opened()
        call.arguments += text
        self._emit(events.CallArgumentsDelta(self._response_id, call.id, self._index, call.call_id, text))

    def close_call(self, arguments: str, status: ItemStatus) -> None:
        call = self._opened()
        call.arguments = arguments
        self._emit(events.CallArgumentsDone(self._response_id, call.id, self._index, call.call_id, call.name, arguments))
        self._close(status)

    # ---- either

    def break_off(self) -> None:
        """The response ends before what is open was complete."""
        if self.message is not None:
            self.close_message("incomplete")
        elif self.call is not None:
            self.close_call(self.call.arguments, "incomplete")

    def _add(self, item: Item) -> None:
        assert self._open is None
        self._open = item
        self.items.append(item)
        self._emit(events.OutputItemAdded(self._response_id, self._index, snapshot(item)))
        if self._conversation is not None:
            previous = self._conversation.add(item)
            self._emit(events.ItemAdded(snapshot(item), previous))

    def _close(self, status: ItemStatus) -> None:
        item = self._opened()
        item.status = status
        self._emit(events.OutputItemDone(self._response_id, self._index, snapshot(item)))
        if self._conversation is not None and item.id in self._conversation:  # a client may have deleted it meanwhile
            self._emit(events.ItemDone(snapshot(item), self._conversation.previous_id(item.id)))
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    @property
    def _where(self) -> tuple[str, str, int, int]:
        return self._response_id, self._opened().id, self._index, PART

    def _opened(self) -> Item:
        assert self._open is not None
        return self._open

    def _part(self) -> OutputText | OutputAudio:
        part = self._opened().content[PART]
        assert isinstance(part, OutputText | OutputAudio)
        return part
