"""Items whose content is still on its way, such as a picture by URL: fetched behind what the session does, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from omni_bus.api.voice.items import Item

MAX_ON_THE_WAY = 16  # items of one session; whoever brings more waits

Fetch = Callable[[], Awaitable[None]]


class Arrivals:
    """One session's. One fetch runs at a time, in the order in which they were asked for, so that what it brings is bounded."""

    def __init__(self) -> None:
        self._tasks: dict[Item, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

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

    async def room(self) -> None:
        """Until one more may be begun."""
        while len(self._tasks) >= MAX_ON_THE_WAY:
            await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)

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
