"""Images that an event names by http(s) URL: fetched by the rules of all media URLs, before the event is carried out."""

from __future__ import annotations

from collections.abc import Sequence

from omni_bus.api.media_fetch import MediaFetcher
from omni_bus.api.voice.conversation import ConversationLimits
from omni_bus.api.voice.item_json import RemoteImage
from omni_bus.errors import TooLarge

MAX_BYTES = ConversationLimits().max_other_bytes  # by one event: more, no conversation would take


async def fetch_images(images: Sequence[RemoteImage], fetcher: MediaFetcher) -> None:
    """One after the other, into their parts. Raises MediaRefused, MediaUnreachable or TooLarge, naming the field."""
    most = min(MAX_BYTES, fetcher.max_bytes)
    left = most
    for image in images:
        try:
            image.part.content = await fetcher.fetch(image.url, image.param, left)
        except TooLarge:
            raise TooLarge(f"{image.param}: one event may fetch up to {most // 2**20} MiB", param=image.param) from None
        left -= len(image.part.content)
