"""Reads function calls out of a text stream, in the form that Qwen and Hermes models write them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from omni_bus.api.voice.call_object import ArgumentsPiece, BrokenCall, CallDone, CallNamed, CallObject, CallPiece, CallStarted

__all__ = ["ArgumentsPiece", "CallDone", "CallNamed", "CallStarted", "Piece", "TextPiece", "ToolCallReader"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclasses.dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is no call. Never empty."""

    text: str


Piece = TextPiece | CallPiece


class _At(enum.Enum):
    """Where in the stream the next character stands."""

    TEXT = enum.auto()
    TAG = enum.auto()  # behind <tool_call>, or behind an object in it
    OBJECT = enum.auto()


class ToolCallReader:
    """`<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>` in a text that may be cut anywhere.

    Between the tags there may be several objects, in a list or not. Text is held back only while it may be the beginning of a
    call, white space included: that around calls is dropped. What looks like a call but has no name, or breaks before its
    arguments begin, comes back as text. One that breaks in its arguments ends with ok = False, and what is left of it up to the
    next tag is dropped. A call is whole with its object's last brace: a missing closing tag does not undo it.
    """

    def __init__(self) -> None:
        self._at = _At.TEXT
        self._space = ""  # white space in the text, which is dropped if a call follows
        self._tag = ""  # what may be the beginning of a tag
        self._raw = ""  # since the tag opened, or since its last call: what comes back if this is no call
        self._object = CallObject(0)
        self._calls = 0
        self._calls_in_tag = 0
        self._dropping = False  # the rest of a broken call
        self._after_call = False  # no text since the last call
        self._has_text = False

    def feed(self, text: str) -> list[Piece]:
        return _joined(piece for character in text for piece in self._read(character))

    def end(self) -> list[Piece]:
        """The stream is over: what was held back."""
        pieces: list[Piece] = []
        match self._at:
            case _At.TEXT:
                pieces = [] if self._after_call and not self._tag else self._say(self._tag)
            case _At.OBJECT if self._object.started:
                pieces = list(self._object.broken())
            case _ if not self._dropping and self._raw.strip("[,]} \t\r\n"):
                pieces = self._say(self._raw)
        self._at, self._space, self._tag, self._raw = _At.TEXT, "", "", ""
        return pieces

    def _read(self, character: str) -> list[Piece]:
        match self._at:
            case _At.TEXT:
                return self._read_text(character)
            case _At.TAG:
                return self._read_tag(character)
            case _At.OBJECT:
                return self._read_object(character)

    def _read_text(self, character: str) -> list[Piece]:
        if OPEN.startswith(self._tag + character):
            self._tag += character
            if self._tag == OPEN:
                self._open(self._held_space() + OPEN)
            return []
        if self._tag:
            no_tag, self._tag = self._tag, ""
            return self._say(no_tag) + self._read_text(character)
        if character.isspace():
            self._space += character
            return []
        return self._say(character)

    def _say(self, text: str) -> list[Piece]:
        text = self._held_space() + text
        self._space = ""
        if not text:
            return []
        self._has_text, self._after_call = True, False
        return [TextPiece(text)]

    def _held_space(self) -> str:
        """White space before the next text: none between calls and the first word."""
        return self._space if self._has_text or not self._after_call else ""

    def _open(self, raw: str) -> None:
        self._at, self._raw, self._space, self._tag = _At.TAG, raw, "", ""
        self._calls_in_tag, self._dropping = 0, False

    def _read_tag(self, character: str) -> list[Piece]:
        """Between the tags, outside an object."""
        self._raw += character
        if any(tag.startswith(self._tag + character) for tag in (OPEN, CLOSE)):
            self._tag += character
            return self._whole_tag()
        self._tag = ""
        if self._dropping:
            return []
        if character == "{":
            self._at, self._object = _At.OBJECT, CallObject(self._calls)
            self._object.read(character)
            return []
        if character in "[,] \t\r\n" or (character == "}" and self._calls_in_tag):
            return []
        return self._no_call(character)

    def _whole_tag(self) -> list[Piece]:
        """What `_tag` means once it is one."""
        if self._tag not in (OPEN, CLOSE):
            return []
        empty = self._raw if not self._calls_in_tag else ""
        if self._tag == OPEN:  # the tag before was not closed
            pieces = self._say(empty.removesuffix(OPEN)) if empty else []
            self._open(OPEN)
            return pieces
        self._at, self._tag = _At.TEXT, ""
        return self._say(empty) if empty else []

    def _read_object(self, character: str) -> list[Piece]:
        self._raw += character
        try:
            pieces: list[Piece] = list(self._object.read(character))
        except BrokenCall:
            if not self._object.started:
                return self._no_call(character)
            broken = self._object.broken()
            self._end_call()
            self._dropping = True
            return [*broken, *self._read_tag(character)]
        if self._object.done:
            self._end_call()
        return pieces

    def _end_call(self) -> None:
        self._at, self._raw, self._tag = _At.TAG, "", ""
        self._calls += 1
        self._calls_in_tag += 1
        self._after_call = True

    def _no_call(self, character: str) -> list[Piece]:
        """What was held back is text after all, and the character that shows it begins more; white space alone is dropped."""
        self._at, self._tag = _At.TEXT, ""
        held = self._raw.removesuffix(character)
        if self._calls_in_tag and not held.strip("[,]} \t\r\n"):
            self._space = "".join(filter(str.isspace, held))
            held = ""
        return (self._say(held) if held else []) + self._read_text(character)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of the same kind of text as one."""
    joined: list[Piece] = []
    for piece in pieces:
        match joined[-1] if joined else None, piece:
            case TextPiece(before), TextPiece(text):
                joined[-1] = TextPiece(before + text)
            case ArgumentsPiece(before), ArgumentsPiece(text):
                joined[-1] = ArgumentsPiece(before + text)
            case _:
                joined.append(piece)
    return joined
