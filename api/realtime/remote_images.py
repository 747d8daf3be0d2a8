"""Images that an event names by http(s) URL: fetched by the rules of all media URLs, while the session goes on."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence

from omni_bus.api.media_fetch import MediaFetcher
from omni_bus.api.voice.conversation import ConversationLimits
from omni_bus.api.voice.item_json import RemoteImage
from omni_bus.errors import TooLarge

MAX_BYTES = ConversationLimits().max_other_bytes  # by one event: more, no conversation would take


def fetching(images: Sequence[RemoteImage], fetcher: MediaFetcher) -> Callable[[], Awaitable[None]] | None:
    """What fetches them; None where there are none. Raises MediaRefused of a URL that nobody need be asked about."""
    for image in images:
        fetcher.check(image.url, image.param)
    return functools.partial(fetch_images, images, fetcher) if images else None


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
