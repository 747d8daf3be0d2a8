"""One function call as a model writes it, `{"name": …, "arguments": {…}}`, read character by character."""

from __future__ import annotations

import dataclasses
import enum

import msgspec

MAX_NAME = 256  # characters; what is longer is no name, and need not be held back any further
_OUTSIDE_STRINGS = frozenset('{}[]:,"-+.0123456789eE truefalsn\t\r\n')


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


CallPiece = CallStarted | CallNamed | ArgumentsPiece | CallDone


class BrokenCall(Exception):
    """The character cannot stand here, or what it ends is not what a call has."""


class _At(enum.Enum):
    START = enum.auto()
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA_OR_END = enum.auto()


class CallObject:
    """started: its name has been given out; from then on its arguments are, as they come. done: its last brace has been read."""

    def __init__(self, index: int) -> None:
        self.started = self.done = False
        self._index = index
        self._at = _At.START
        self._token = ""  # the key or value that is being read
        self._depth = 0
        self._in_string = self._escaped = False
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # as far as they have been read, once they have begun
        self._given = 0  # characters of them that have gone out

    def read(self, character: str) -> list[CallPiece]:
        """Raises BrokenCall; the object is then of no more use but for `broken()`."""
        if self._token:
            return self._read_token(character)
        if character in " \t\r\n":
            return []
        match self._at, character:
            case _At.START, "{":
                self._at = _At.KEY_OR_END
            case ((_At.KEY_OR_END | _At.KEY), '"'):
                return self._read_token(character)
            case ((_At.KEY_OR_END | _At.COMMA_OR_END), "}"):
                return self._finish()
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.COMMA_OR_END, ",":
                self._at = _At.KEY
            case _At.VALUE, _:
                return self._read_token(character)
            case _:
                raise BrokenCall
        return []

    def broken(self) -> list[CallPiece]:
        """The end of a call that had started and cannot be read on."""
        assert self._name is not None
        arguments = self._arguments or ""
        rest: list[CallPiece] = [ArgumentsPiece(arguments[self._given :])] if len(arguments) > self._given else []
        return [*rest, CallDone(self._name, arguments, False)]

    def _read_token(self, character: str) -> list[CallPiece]:
        """A string, an object or list with all that is in it, or a number or word."""
        scalar = bool(self._token) and self._token[0] not in '"{['
        if scalar and character in ",} \t\r\n":
            return self._end_token() + self.read(character)
        self._token += character
        if self._in_string:
            if character < " " or (len(self._token) > MAX_NAME and not self._depth and self._key != "arguments"):
                raise BrokenCall
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character not in _OUTSIDE_STRINGS:
            raise BrokenCall
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        pieces = self._stream(character)
        if self._token[0] in '"{[' and not self._in_string and not self._depth:
            pieces += self._end_token()
        self._given = len(self._arguments or "") if self.started else 0
        return pieces

    def _stream(self, character: str) -> list[CallPiece]:
        """Arguments that are an object go out as they come, once the name is known."""
        if self._at is not _At.VALUE or self._key != "arguments" or self._token[0] != "{":
            return []
        if len(self._token) == 1:
            if self._arguments is not None:
                raise BrokenCall
            self._arguments = ""
            started = self._start()
        else:
            started = []
        assert self._arguments is not None
        self._arguments += character
        return [*started, ArgumentsPiece(character)] if self.started else []

    def _start(self) -> list[CallPiece]:
        """Give out what is known, if the name is."""
        if self._name is None or self.started:
            return []
        self.started = True
        held: list[CallPiece] = [ArgumentsPiece(self._arguments)] if self._arguments else []
        return [CallStarted(self._index), CallNamed(self._name), *held]

    def _end_token(self) -> list[CallPiece]:
        token, self._token = self._token, ""
        try:
            value = msgspec.json.decode(token)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise BrokenCall from None
        if self._at is not _At.VALUE:
            self._key, self._at = value, _At.COLON
            return []
        self._at = _At.COMMA_OR_END
        match self._key, value:
            case "name", str() if value and self._name is None:
                self._name = value
                return self._start() if self._arguments else []
            case "arguments", str() if self._arguments is None:
                self._arguments = _object_in(value)
            case "arguments", dict() | None:
                pass
            case (("name" | "arguments"), _):
                raise BrokenCall
        return []

    def _finish(self) -> list[CallPiece]:
        if self._name is None:
            raise BrokenCall
        self._arguments = self._arguments or "{}"
        pieces = self._start()
        self.done = True
        return [*pieces, CallDone(self._name, self._arguments, True)]


def _object_in(text: str) -> str:
    """Some models write the arguments as a string that holds the object; BrokenCall where it holds none."""
    try:
        msgspec.json.decode(text, type=dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise BrokenCall from None
    return text
