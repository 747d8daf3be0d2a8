"""GET /v1/duplex: the thin duplex protocol on a WebSocket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from omni_bus.api.voice_socket import serve_socket

if TYPE_CHECKING:
    from omni_bus.api.duplex.connection import DuplexConnection


async def duplex(request: web.Request) -> web.StreamResponse:
    return await serve_socket(request, "duplex", _load)


def _load() -> type[DuplexConnection]:
    from omni_bus.api.duplex.connection import DuplexConnection

    return DuplexConnection
