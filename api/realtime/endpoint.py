"""GET /v1/realtime: OpenAI's Realtime protocol on a WebSocket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from omni_bus.api.voice_socket import serve_socket

if TYPE_CHECKING:
    from omni_bus.api.realtime.connection import RealtimeConnection


async def realtime(request: web.Request) -> web.StreamResponse:
    return await serve_socket(request, "realtime", _load)


def _load() -> type[RealtimeConnection]:
    from omni_bus.api.realtime.connection import RealtimeConnection

    return RealtimeConnection
