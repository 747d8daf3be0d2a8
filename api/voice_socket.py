"""The WebSockets of every voice protocol: who may open one, that the broker counts them, and that a stop of the server closes them with 1012."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
from collections.abc import Callable
from typing import Protocol

from aiohttp import WSCloseCode, WSMsgType, web
from yarl import URL

from omni_bus.api.auth import API_KEYS
from omni_bus.api.client_limit import client_name
from omni_bus.api.http_errors import OriginRefused
from omni_bus.api.keys import BUS, CONFIG, FETCHER, LABEL, METRICS, MODEL, REQUEST_ID, THREADS
from omni_bus.api.voice.services import VoiceServices
from omni_bus.errors import InvalidRequest, OmniBusError, TooLarge
from omni_bus.events import SESSION

PING_S = 30.0  # a client that does not answer within half of it is gone
CLOSE_S = 2.0  # for a client to answer a close
RESTART = 1012


class Connection(Protocol):
    async def serve(self) -> None: ...
    async def leave(self, code: int, reason: str) -> None: ...


class ConnectionType(Protocol):
    """A protocol's own part: voice_connection.VoiceConnection."""

    frame_type: WSMsgType

    def __call__(
        self, socket: web.WebSocketResponse, abort: Callable[[], None], services: VoiceServices, label: str
    ) -> Connection: ...

    def error_message(self, error: OmniBusError) -> bytes: ...


Load = Callable[[], ConnectionType]

CONNECTIONS: web.AppKey[set[Connection]] = web.AppKey("connections")


class _Socket(web.WebSocketResponse):
    """A message beyond what is read at all is answered with its reason before the close, which WebSocket asks for, says it again."""

    def __init__(self, protocol: str, load: Load, max_event_mb: int) -> None:
        self._load = load
        self._limit = TooLarge(f"a message may have up to {max_event_mb} MiB")
        super().__init__(
            protocols=(protocol,),
            compress=False,  # audio does not shrink, and small messages that unpack to large ones are refused with it
            decode_text=False,
            heartbeat=PING_S,
            timeout=CLOSE_S,
            max_msg_size=2 * max_event_mb * 2**20,
        )

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        if code == WSCloseCode.MESSAGE_TOO_BIG and not self.closed:
            connection = self._load()
            await self.send_frame(connection.error_message(self._limit), connection.frame_type)
            message = self._limit.message.encode()
        return await super().close(code=code, message=message, drain=drain)


async def serve_socket(request: web.Request, protocol: str, load: Load) -> web.StreamResponse:
    """protocol: its name among the subprotocols. load: imports what connections are made of, which brings numpy and PyAV with it."""
    check_origin(request)
    request.app[MODEL].check_name(request.query.get("model", request.app[MODEL].name))
    config = request.app[CONFIG]
    socket = _Socket(protocol, load, config.session_event_mb)
    connection_type = await asyncio.get_running_loop().run_in_executor(request.app[THREADS], load)
    metrics = request.app[METRICS]
    async with contextlib.AsyncExitStack() as session:
        await session.enter_async_context(request.app[BUS].lease(SESSION, client_name(request)))
        # Last: a browser does not tell a page why its WebSocket was refused, so the page asks again without one.
        if not socket.can_prepare(request):
            raise InvalidRequest(f"this address speaks WebSocket: connect with a {protocol} client")
        session.enter_context(metrics.voice_session())
        await socket.prepare(request)
        services = VoiceServices(
            bus=request.app[BUS],
            model=request.app[MODEL],
            config=config,
            metrics=metrics,
            fetcher=request.app[FETCHER],
            threads=request.app[THREADS],
        )
        label = " ".join(name for name in (request[REQUEST_ID], request[LABEL]) if name)
        connection = connection_type(socket, functools.partial(_abort, request), services, label)
        request.app[CONNECTIONS].add(connection)
        try:
            await connection.serve()
        finally:
            request.app[CONNECTIONS].discard(connection)
    return socket


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def close_all(app: web.Application) -> None:
    """An on_shutdown signal."""
    leaving = [connection.leave(RESTART, "the server is restarting; connect again") for connection in app[CONNECTIONS]]
    await asyncio.gather(*leaving, return_exceptions=True)


def check_origin(request: web.Request) -> None:
    """A page of another site must not speak, through a visitor's browser, to a server that asks for no key. Raises OriginRefused."""
    origin = request.headers.get("Origin")
    config = request.app[CONFIG]
    if origin is None or API_KEYS in request.app or origin in config.cors_origins or "*" in config.cors_origins:
        return
    try:
        same = URL(origin).authority == request.host and _is_own_name(URL(origin).host, config.host)
    except ValueError:
        same = False
    if not same:
        raise OriginRefused("pages of this origin may not connect; list it in api.cors_origins")


def _is_own_name(host: str | None, own: str) -> bool:
    """Not any name that somebody's DNS may point here."""
    if host in ("localhost", own):
        return True
    try:
        ipaddress.ip_address(host or "")
    except ValueError:
        return False
    return True


def add_voice_sockets(app: web.Application) -> None:
    """What the sockets of all protocols share, and what lives as long as the server."""
    app[CONNECTIONS] = set()
    app.on_shutdown.append(close_all)
