"""Marks that stand for texts while a chat template is rendered, so that no text of a client is ever read as the template's own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from omni_bus.errors import ModelRefused

# Private-use characters; texts are put in after rendering, so they may hold them too.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class MarkedTexts:
    """The texts of one conversation, in the order in which they were marked."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._fields: list[str] = []
        self._json: list[str] = []

    def mark(self, text: str, *, field: str = "messages") -> str:
        """What stands for `text` until `put_in`. `field`: of the request, named where the template has no place for it."""
        self._texts.append(text)
        self._fields.append(field)
        return f"{_OPEN}{len(self._texts) - 1}{_CLOSE}"

    def mark_json(self, text: str, *, field: str = "messages") -> str:
        """The same for JSON text: a template that takes it for a string puts it in quotes, which then are not its own."""
        mark = self.mark(text, field=field)
        self._json.append(mark)
        return mark

    def put_in(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Pieces of the rendered template in order, each with whether the template wrote it (True) or it is one of the texts.
        ModelRefused where a text is missing: silently, the model would answer another conversation."""
        for mark in self._json:
            rendered = rendered.replace(f'"{mark}"', mark)
        pieces = _MARK.split(rendered)
        places = {int(piece) for piece in pieces[1::2]}
        missing = next((index for index, text in enumerate(self._texts) if text and index not in places), None)
        if missing is not None:
            field = self._fields[missing]
            raise ModelRefused(f"the model's chat template has no place for a part of {field}; leave it out", param=field)
        for index, piece in enumerate(pieces):
            yield (self._texts[int(piece)], False) if index % 2 else (piece, True)
