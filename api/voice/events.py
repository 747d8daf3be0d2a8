"""What a voice session tells its endpoint: one frozen dataclass an event, free of any protocol's JSON.

Items and parts inside an event are copies of their own: what happens to the conversation later does not change what was said of it.
Ids are ours, but for items that a client labelled itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from omni_bus.api.voice.formats import AudioFormat
from omni_bus.api.voice.items import Item, Part
from omni_bus.errors import OmniBusError

ResponseStatus = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]
Reason = Literal["turn_detected", "client_cancelled", "max_output_tokens"]


def snapshot(item: Item) -> Item:
    """The item as it is now. The user's audio is shared: it is never written to."""
    return dataclasses.replace(item, content=[dataclasses.replace(part) for part in item.content])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one response. Audio tokens of an answer are codec frames. cached: input tokens whose work was not done again."""

    input_text: int = 0
    input_audio: int = 0
    input_image: int = 0
    cached: int = 0
    output_text: int = 0
    output_audio: int = 0

    @property
    def input(self) -> int:
        return self.input_text + self.input_audio + self.input_image

    @property
    def output(self) -> int:
        return self.output_text + self.output_audio


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResponseState:
    """One response at one moment. usage: None until it has ended. conversation_id: None for an out-of-band one."""

    id: str
    status: ResponseStatus
    reason: Reason | None = None
    error: OmniBusError | None = None
    output: tuple[Item, ...] = ()
    conversation_id: str | None
    speaks: bool
    voice: str | None
    output_format: AudioFormat
    max_output_tokens: int | None
    metadata: Mapping[str, str] | None
    usage: Usage | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SessionEvent:
    """Base of all."""


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorRaised(SessionEvent):
    """Something could not be done, and the session goes on. cause: the client's own name for what it asked, if it was asked for."""

    error: OmniBusError
    cause: str | None = None


# ---- conversation


@dataclasses.dataclass(frozen=True, slots=True)
class ItemAdded(SessionEvent):
    item: Item
    previous_item_id: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class ItemDone(SessionEvent):
    item: Item
    previous_item_id: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class ItemRetrieved(SessionEvent):
    """audio: content index → the user's audio that stands there, in the session's input format."""

    item: Item
    audio: Mapping[int, bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class ItemTruncated(SessionEvent):
    item_id: str
    content_index: int
    audio_end_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class ItemDeleted(SessionEvent):
    """By the client, or dropped by the conversation's limits."""

    item_id: str


# ---- the user's audio


@dataclasses.dataclass(frozen=True, slots=True)
class UserSpeechStarted(SessionEvent):
    """item_id: of the item that the turn will become."""

    item_id: str
    audio_start_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class UserSpeechStopped(SessionEvent):
    item_id: str
    audio_end_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class UserIdle(SessionEvent):
    """Nobody spoke for as long as the session waits; the item is the silence."""

    item_id: str
    audio_start_ms: int
    audio_end_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class InputCommitted(SessionEvent):
    item_id: str
    previous_item_id: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class InputCleared(SessionEvent):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class InputTranscriptDelta(SessionEvent):
    item_id: str
    content_index: int
    delta: str


@dataclasses.dataclass(frozen=True, slots=True)
class InputTranscriptDone(SessionEvent):
    """seconds: of the audio. input_tokens, output_tokens: where a model of text wrote it down, else None."""

    item_id: str
    content_index: int
    transcript: str
    seconds: float
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class InputTranscriptFailed(SessionEvent):
    item_id: str
    content_index: int
    error: OmniBusError


# ---- responses


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseCreated(SessionEvent):
    response: ResponseState


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseDone(SessionEvent):
    response: ResponseState


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerInterrupted(SessionEvent):
    """A spoken answer that was being given, or heard, counts as heard up to here: what the client has not played of it is void."""

    item_id: str
    played_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class OutputItemAdded(SessionEvent):
    response_id: str
    output_index: int
    item: Item


@dataclasses.dataclass(frozen=True, slots=True)
class OutputItemDone(SessionEvent):
    response_id: str
    output_index: int
    item: Item


@dataclasses.dataclass(frozen=True, slots=True)
class InPart(SessionEvent):
    """Something in one content part of one output item."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int


@dataclasses.dataclass(frozen=True, slots=True)
class PartAdded(InPart):
    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class PartDone(InPart):
    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class OutputTextDelta(InPart):
    delta: str


@dataclasses.dataclass(frozen=True, slots=True)
class OutputTextDone(InPart):
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class OutputTranscriptDelta(InPart):
    delta: str


@dataclasses.dataclass(frozen=True, slots=True)
class OutputTranscriptDone(InPart):
    transcript: str


@dataclasses.dataclass(frozen=True, slots=True)
class OutputAudioDelta(InPart):
    """data: whole samples in the session's output format; never empty."""

    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class OutputAudioDone(InPart):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class CallArgumentsDelta(SessionEvent):
    response_id: str
    item_id: str
    output_index: int
    call_id: str
    delta: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArgumentsDone(SessionEvent):
    response_id: str
    item_id: str
    output_index: int
    call_id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class OutputCleared(SessionEvent):
    """The client had the audio thrown away that it has not played yet. response_id: whose it was, None for nobody's."""

    response_id: str | None
