"""What a chat answer says, piece by piece: words, function calls and sound told apart, from the bus's items as they come.

Where functions may be called, sound waits until the text that it speaks is known to be words: what was heard cannot be unsaid. Of a
call nothing is heard, nor of anything behind it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from omni_bus.api.bus import Item
from omni_bus.api.timing import AnswerTiming
from omni_bus.api.tools import new_call_id
from omni_bus.api.voice.tool_calls import ArgumentsPiece, CallDone, CallNamed, CallStarted, Piece, TextPiece, ToolCallReader
from omni_bus.payloads import AudioDelta, InputTranscript, TextDelta
from omni_bus.wire import HostTensor


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallNew:
    """index: 0 for the answer's first call. Its arguments follow, in one CallArguments or more."""

    index: int
    call_id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the arguments of that call."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sound:
    """pcm: int16 [samples], mono, as bytes."""

    pcm: bytes | bytearray | memoryview
    sample_rate: int


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """What a recogniser wrote down of one piece of the user's audio."""

    text: str


Said = Words | CallNew | CallArguments | Sound | Heard


class AnswerPieces:
    """`of` each item in order, then `rest` once. Keeps the times of what it gives out."""

    def __init__(self, timing: AnswerTiming, *, may_call: bool, one_call: bool) -> None:
        """one_call: calls behind the first are left out."""
        self._timing = timing
        self._reader = ToolCallReader() if may_call else None
        self._one_call = one_call
        self._index = -1  # of the call that was begun last
        self._leaving_out = False  # the call that is being read
        self._read = 0  # characters of text that have come
        self._words = 0  # of them, those that are known to be words; up to the first call
        self._sound: collections.deque[tuple[AudioDelta, HostTensor]] = collections.deque()  # may be of a call
        self._text_ended = False
        self._reason = "stop"

    @property
    def finish_reason(self) -> str:
        """OpenAI's, once the answer is complete: length also where the limit cut a call off."""
        return "tool_calls" if self._called and self._reason == "stop" else self._reason

    def of(self, item: Item) -> Iterator[Said]:
        match item.payload:
            case TextDelta(text, token_ids, reason):
                self._reason = reason or self._reason
                if text:
                    self._timing.text(max(1, len(token_ids)))
                    yield from self._text(text)
                if reason is not None:
                    yield from self._end_text()
                yield from self._known_sound()
            case AudioDelta() as delta:
                if "pcm" in item.tensors:
                    self._sound.append((delta, item.tensors["pcm"]))
                yield from self._known_sound()
            case InputTranscript(text):
                if text:
                    yield Heard(text)
            case other:
                raise TypeError(f"no client payload: {type(other).__name__}")

    def rest(self) -> Iterator[Said]:
        """The stream is over: what was held back."""
        yield from self._end_text()
        yield from self._known_sound()

    @property
    def _called(self) -> bool:
        return self._index >= 0

    def _text(self, text: str) -> Iterator[Said]:
        self._read += len(text)
        pieces: list[Piece] = [TextPiece(text)] if self._reader is None else self._reader.feed(text)
        for piece in pieces:
            yield from self._piece(piece)

    def _end_text(self) -> Iterator[Said]:
        if self._reader is not None and not self._text_ended:
            for piece in self._reader.end():
                yield from self._piece(piece)
        self._text_ended = True

    def _piece(self, piece: Piece) -> Iterator[Said]:
        match piece:
            case TextPiece(text):
                if not self._called:
                    self._words += len(text)
                yield Words(text)
            case CallStarted():
                self._leaving_out = self._one_call and self._called
            case CallNamed(name) if not self._leaving_out:
                self._index += 1
                yield CallNew(self._index, new_call_id(), name)
            case ArgumentsPiece(text) if not self._leaving_out:
                yield CallArguments(self._index, text)
            case CallDone():
                self._leaving_out = False

    def _known_sound(self) -> Iterator[Sound]:
        """What is known to be of words, as far as it has come; what is known to be of a call is dropped."""
        while self._sound:
            delta, pcm = self._sound[0]
            if not self._is_words(delta.spoken):
                if not self._called:
                    return
                self._sound.popleft()
                continue
            self._sound.popleft()
            self._timing.audio(len(pcm.data) / 2 / delta.sample_rate)
            yield Sound(pcm.data, delta.sample_rate)

    def _is_words(self, spoken: int | None) -> bool:
        """Whether sound that goes so far in the text speaks words. Of a model that does not tell how far, what comes while all text
        is known to be words; it falls silent where a call begins."""
        if self._reader is None or (self._text_ended and not self._called):
            return True
        if spoken is None:
            return not self._called and 0 < self._words == self._read
        return 0 < self._words >= spoken
