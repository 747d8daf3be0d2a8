"""How many requests of one client are in flight: one more than `api.max_requests_per_client` is refused.

A client is a key of `api_keys_file`, or an address where there are no keys. The broker counts them, for all API processes.
"""

from __future__ import annotations

import hashlib

from aiohttp import web

from omni_bus.api.errors_render import Handler
from omni_bus.api.keys import BUS, CLIENT, CONFIG
from omni_bus.events import REQUEST


def client_name(request: web.Request) -> str:
    """The name under which a request's client is counted: nothing that it sent is in it."""
    if CLIENT in request:
        return request[CLIENT]
    return f"address {hashlib.sha256((request.remote or '').encode()).hexdigest()[:16]}"


@web.middleware
async def limit_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever makes work is a POST; asking how the server stands is never refused."""
    if request.method != "POST" or not request.app[CONFIG].max_requests_per_client:
        return await handler(request)
    async with request.app[BUS].lease(REQUEST, client_name(request)):
        return await handler(request)
