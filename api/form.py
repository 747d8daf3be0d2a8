"""A request's multipart form: its fields as text and its one file, read as they come. File names are never used."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from omni_bus.api.body import Limit, reading
from omni_bus.api.intake import IntakeShare
from omni_bus.errors import InvalidRequest

MAX_PARTS = 64
MAX_FIELD = 64 * 1024  # bytes of a field that is text
_CHUNK = 64 * 1024

# aiohttp quotes what a client sent in them, and the log is no place for that.
warnings.simplefilter("ignore", BadContentDispositionHeader)
warnings.simplefilter("ignore", BadContentDispositionParam)


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    fields: Mapping[str, Sequence[str]]  # name, without a closing "[]", → values in the order in which they came
    file: bytearray | None

    def one(self, name: str) -> str | None:
        """A field's value, None where it is not there. InvalidRequest for one that was given twice."""
        values = self.fields.get(name, ())
        if len(values) > 1:
            raise InvalidRequest(f"{name} must be given once", param=name)
        return values[0] if values else None


async def read_form(request: web.Request, share: IntakeShare, file_name: str) -> Form:
    """The form, whose file is the field `file_name`.

    Raises InvalidRequest (400), TooLarge (413), DeadlineExceeded (408) or Overloaded (503).
    """
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("send the body as a form, with Content-Type: multipart/form-data")
    fields: dict[str, list[str]] = {}
    file: bytearray | None = None
    async with reading(request):
        limit = Limit(request, share, f"send a shorter or better packed {file_name}")
        try:
            reader = await request.multipart()
            parts = 0
            while (part := await reader.next()) is not None:
                parts += 1
                if parts > MAX_PARTS:
                    raise InvalidRequest(f"a form may have up to {MAX_PARTS} fields")
                if not isinstance(part, BodyPartReader) or not part.name or not part.name.isascii():
                    raise InvalidRequest("each part of the form must be one field with a name")
                if part.name == file_name:
                    if file is not None:
                        raise InvalidRequest(f"{file_name} must be given once", param=file_name)
                    file = await _content(part, limit)
                else:
                    fields.setdefault(part.name.removesuffix("[]"), []).append(await _text(part, limit))
        except (ValueError, AssertionError, RuntimeError, HttpProcessingError):  # aiohttp's own of a malformed form
            raise InvalidRequest("the form is malformed: its parts do not follow its boundary") from None
    return Form(fields, file)


async def _content(part: BodyPartReader, limit: Limit, most: int | None = None) -> bytearray:
    content = bytearray()
    while chunk := await part.read_chunk(_CHUNK):
        limit.add(len(chunk))
        content += chunk
        if most is not None and len(content) > most:
            name = (part.name or "")[:40]
            raise InvalidRequest(f"{name}: a field may have up to {most // 1024} KiB", param=name)
    return content


async def _text(part: BodyPartReader, limit: Limit) -> str:
    content = await _content(part, limit, MAX_FIELD)
    try:
        return content.decode()
    except UnicodeDecodeError:
        name = (part.name or "")[:40]
        raise InvalidRequest(f"{name}: a field must be text in UTF-8", param=name) from None
