"""How many requests of one client are in flight: one more than `api.max_requests_per_client` is refused.

A client is a key of `api_keys_file`, or an address where there are no keys. Counted in this process alone.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

from aiohttp import web

from omni_bus.api.errors_render import Handler
from omni_bus.api.keys import CLIENT
from omni_bus.errors import RateLimited


class ClientLimit:
    """`most` = 0: nobody is refused."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_flight: collections.Counter[str] = collections.Counter()  # only of those that have any

    @contextlib.contextmanager
    def one(self, client: str) -> Iterator[None]:
        """One request of that client, for as long as the block lasts. Raises RateLimited where it has too many."""
        if 0 < self._most <= self._in_flight[client]:
            most = "1 request" if self._most == 1 else f"{self._most} requests"
            raise RateLimited(f"a client may have {most} in flight at a time; try again when one has ended")
        self._in_flight[client] += 1
        try:
            yield
        finally:
            self._in_flight[client] -= 1
            if not self._in_flight[client]:
                del self._in_flight[client]


LIMIT = web.AppKey("limit", ClientLimit)


@web.middleware
async def limit_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever makes work is a POST; asking how the server stands is never refused."""
    if request.method != "POST":
        return await handler(request)
    with request.app[LIMIT].one(request.get(CLIENT, request.remote or "")):
        return await handler(request)
