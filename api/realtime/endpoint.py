"""GET /v1/realtime: who may open a session, and the sockets that are open, which a stop of the server closes with 1012."""

from __future__ import annotations

import asyncio
import functools
import importlib
import ipaddress
from typing import Protocol

from aiohttp import WSCloseCode, WSMsgType, web
from yarl import URL

from omni_bus.api.auth import API_KEYS
from omni_bus.api.http_errors import OriginRefused
from omni_bus.api.keys import BUS, CLIENT, CONFIG, LABEL, METRICS, MODEL, REQUEST_ID, THREADS
from omni_bus.api.voice.limits import SessionCount
from omni_bus.errors import InvalidRequest, TooLarge

PING_S = 30.0  # a client that does not answer within half of it is gone
CLOSE_S = 2.0  # for a client to answer a close
RESTART = 1012
PROTOCOL = "realtime"
_CONNECTION = "omni_bus.api.realtime.connection"  # with numpy and PyAV behind it: loaded when somebody connects


class Connection(Protocol):
    async def leave(self, code: int, reason: str) -> None: ...


SESSIONS = web.AppKey("sessions", SessionCount)
CONNECTIONS: web.AppKey[set[Connection]] = web.AppKey("connections")


class _Socket(web.WebSocketResponse):
    """A message beyond what is read at all is answered with its reason before the close, which the protocol asks for, says it again."""

    def __init__(self, max_event_mb: int) -> None:
        self._limit = TooLarge(f"an event may have up to {max_event_mb} MiB")
        super().__init__(
            protocols=(PROTOCOL,),
            compress=False,  # audio does not shrink, and small messages that unpack to large ones are refused with it
            decode_text=False,
            heartbeat=PING_S,
            timeout=CLOSE_S,
            max_msg_size=2 * max_event_mb * 2**20,
        )

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        if code == WSCloseCode.MESSAGE_TOO_BIG and not self.closed:
            from omni_bus.api.realtime.server_events import render
            from omni_bus.api.voice.events import ErrorRaised

            await self.send_frame(render(ErrorRaised(self._limit)), WSMsgType.TEXT)
            message = self._limit.message.encode()
        return await super().close(code=code, message=message, drain=drain)


async def realtime(request: web.Request) -> web.StreamResponse:
    check_origin(request)
    request.app[MODEL].check_name(request.query.get("model", request.app[MODEL].name))
    config = request.app[CONFIG]
    socket = _Socket(config.session_event_mb)
    if not socket.can_prepare(request):
        raise InvalidRequest("this address speaks WebSocket: connect with a Realtime client")
    await asyncio.get_running_loop().run_in_executor(request.app[THREADS], importlib.import_module, _CONNECTION)
    from omni_bus.api.realtime.connection import RealtimeConnection
    from omni_bus.api.voice.services import VoiceServices

    metrics = request.app[METRICS]
    with request.app[SESSIONS].one(request.get(CLIENT, request.remote or "")), metrics.voice_session():
        await socket.prepare(request)
        services = VoiceServices(
            bus=request.app[BUS],
            model=request.app[MODEL],
            config=config,
            metrics=metrics,
            threads=request.app[THREADS],
        )
        label = " ".join(name for name in (request[REQUEST_ID], request[LABEL]) if name)
        connection = RealtimeConnection(socket, functools.partial(_abort, request), services, label)
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


def add_realtime(app: web.Application) -> None:
    """The route, and what lives as long as the server."""
    app[SESSIONS] = SessionCount(app[CONFIG])
    app[CONNECTIONS] = set()
    app.router.add_get("/v1/realtime", realtime)
    app.on_shutdown.append(close_all)
