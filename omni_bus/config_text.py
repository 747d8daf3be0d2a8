"""TOML text → values, and the line on which each key stands. tomllib parses; this file only finds lines.

`locate` walks text that tomllib has already accepted, so it needs no error handling of its own: it skips values, follows table
headers and inline tables, and leaves the spelling of each key (bare, quoted, dotted, escaped) to tomllib.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

KeyPath = tuple[str, ...]

_ERROR_LINE = re.compile(r"\s*\(at line (\d+), column \d+\)$")
_QUOTES = ('"""', "'''", '"', "'")


class TomlError(Exception):
    """Text that is not TOML, with the line where that shows (the last one where the text ends too early)."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


def parse(text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The values, and for every key and table its path → line, counted from 1. Raises TomlError."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        found = _ERROR_LINE.search(message)
        line = int(found[1]) if found else text.rstrip().count("\n") + 1
        return_message = _ERROR_LINE.sub("", message).replace(" (at end of document)", " at the end of the file")
        raise TomlError(return_message, line) from error
    return values, locate(text)


def parse_value(text: str) -> Any:
    """One value as TOML where it is TOML, else the text itself: `4` → 4, `["cuda:0"]` → a list, `/models/x` → a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


def parse_path(text: str) -> KeyPath | None:
    """A dotted key as TOML spells it: `edges."a->b".credits` → ("edges", "a->b", "credits"); None where it is not one."""
    if "=" in text or "\n" in text or "#" in text:
        return None
    try:
        return _descend(tomllib.loads(f"{text} = 0"))
    except tomllib.TOMLDecodeError:
        return None


def locate(text: str) -> dict[KeyPath, int]:
    """Path of every key and table → the line where it first stands. `text` must be valid TOML."""
    walker = _Walker(text)
    walker.document()
    return walker.lines


def _descend(nested: Any) -> KeyPath:
    path: list[str] = []
    while isinstance(nested, dict) and nested:
        [(name, nested)] = nested.items()
        path.append(name)
    return tuple(path)


class _Walker:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.lines: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        while self._skip(" \t\r\n"):
            if self._peek() == "[":
                start = self._at
                self._at += 1 + (self._text[start + 1] == "[")
                table = self._key("]", ())
                self._at = self._text.find("\n", self._at)
                if self._at < 0:
                    return
            else:
                self._pair(table)

    def _pair(self, table: KeyPath) -> None:
        path = self._key("=", table)
        self._at += 1
        self._skip(" \t")
        self._value(path)

    def _key(self, end: str, table: KeyPath) -> KeyPath:
        """Reads up to the unquoted `end`, notes the line of the key and of the tables it makes, and returns its full path."""
        start = self._at
        while self._peek() != end:
            if self._peek() in "\"'":
                self._string()
            else:
                self._at += 1
        path = table + _descend(tomllib.loads(f"{self._text[start : self._at].strip()} = 0"))
        line = self._text.count("\n", 0, start) + 1
        for length in range(len(table) + 1, len(path) + 1):
            self.lines.setdefault(path[:length], line)
        return path

    def _value(self, path: KeyPath) -> None:
        match self._peek():
            case '"' | "'":
                self._string()
            case "{":
                self._items("}", lambda: self._pair(path))
            case "[":
                self._items("]", lambda: self._value(path))
            case _:
                while self._at < len(self._text) and self._peek() not in ",]}#\n":
                    self._at += 1

    def _items(self, end: str, item: Any) -> None:
        self._at += 1
        while self._skip(" \t\r\n,") and self._peek() != end:
            item()
        self._at += 1

    def _string(self) -> None:
        quote = next(quote for quote in _QUOTES if self._text.startswith(quote, self._at))
        self._at += len(quote)
        while not self._text.startswith(quote, self._at):
            self._at += 2 if quote[0] == '"' and self._peek() == "\\" else 1
        self._at += len(quote)
        # A multi-line string may end in quotes of its own: `"""a"""""` holds two.
        while len(quote) == 3 and self._peek() == quote[0]:
            self._at += 1

    def _skip(self, characters: str) -> bool:
        """Passes those characters and comments; False at the end of the text."""
        while self._at < len(self._text):
            if self._peek() == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif self._peek() in characters:
                self._at += 1
            else:
                return True
        return False

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]
