"""A conversation item as a client sends it, checked, to an Item."""

from __future__ import annotations

import msgspec

from omni_bus.api.voice.formats import AudioFormat
from omni_bus.api.voice.items import Item


def item_from_json(
    raw: bytes | msgspec.Raw,
    *,
    input_format: AudioFormat = "pcm16",
    accepts: frozenset[str] = frozenset({"audio", "image"}),
    where: str = "item",
) -> Item:
    """raw: JSON of a message, function_call or function_call_output. Audio is base64 in `input_format`, images are data: URLs.

    Raises InvalidRequest, ModelRefused (a kind of media the pipeline does not take) or UndecodableMedia, naming the field below
    `where`. Fields that are not known are ignored.
    """
    raise NotImplementedError
