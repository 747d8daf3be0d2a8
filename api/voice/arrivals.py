"""Items whose content is still on its way, such as a picture by URL: fetched behind what the session does, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from omni_bus.api.voice.items import Item
from omni_bus.errors import RateLimited

MAX_ON_THE_WAY = 16  # items of one session

Fetch = Callable[[], Awaitable[None]]


class Arrivals:
    """One session's. One fetch runs at a time, in the order in which they were asked for, so that what it brings is bounded."""

    def __init__(self) -> None:
        self._tasks: dict[Item, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    def check_room(self) -> None:
        """Raises RateLimited where one more would be too many: refused and not waited for, since a client that is not read meanwhile
        could interrupt nothing."""
        if len(self._tasks) >= MAX_ON_THE_WAY:
            raise RateLimited(
                f"item: {MAX_ON_THE_WAY} items with images to fetch are on their way, which is as many as may be; "
                "wait for the conversation.item.done of one, or send the image as a data URL",
                param="item",
                code="too_many_images",
            )

    def begin(self, item: Item, fetch: Fetch, ended: Callable[[Exception | None], None]) -> None:
        """ended: called once with what `fetch` raised, if it did; not called for an item that is forgotten before."""
        task = asyncio.create_task(self._one(item, fetch, ended))
        self._tasks[item] = task
        task.add_done_callback(lambda _: self._tasks.pop(item, None))

    def forget(self, item: Item) -> None:
        """The item is no longer part of the conversation."""
        if item in self._tasks:
            self._tasks[item].cancel()

    def __len__(self) -> int:
        """Items on their way."""
        return len(self._tasks)

    def __contains__(self, item: Item) -> bool:
        return item in self._tasks

    async def in_turn(self, fetch: Fetch) -> None:
        """What is not an item's own, behind what was asked for before. Raises what `fetch` raises."""
        async with self._turn:
            await fetch()

    async def have_ended(self, items: Iterable[Item]) -> None:
        """Until none of these is on its way, whatever came of it."""
        if tasks := [self._tasks[item] for item in items if item in self._tasks]:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, item: Item, fetch: Fetch, ended: Callable[[Exception | None], None]) -> None:
        try:
            await self.in_turn(fetch)
        except Exception as error:
            ended(error)
        else:
            ended(None)
