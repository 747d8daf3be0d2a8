"""Reads function calls out of a text stream, in the form that Qwen and Hermes models write them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is no call. Never empty."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStarted:
    """index: 0 for the first call of the stream. Its name is known, and comes next."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class CallNamed:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the arguments' JSON text. Never empty."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallDone:
    """arguments: the JSON text as the model wrote it. ok: False where it broke off or turned out not to be JSON."""

    name: str
    arguments: str
    ok: bool


Piece = TextPiece | CallStarted | CallNamed | ArgumentsPiece | CallDone


class ToolCallReader:
    """`<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>` in a text that may be cut anywhere.

    Text is held back only while it may be the beginning of a call. What looks like one but has no name, or is broken before its
    arguments begin, comes back as text.
    """

    def feed(self, text: str) -> list[Piece]:
        raise NotImplementedError

    def end(self) -> list[Piece]:
        """The stream is over: what was held back."""
        raise NotImplementedError
