"""One client of a voice protocol on one WebSocket: its messages, in order, to a session; the session's events, rendered, to it.

What a protocol says is its subclass's: how events are written, and what a message asks. Here are the limits, and every way to end.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

from aiohttp import WSMsgType, web

from omni_bus.api.errors_render import internal_error
from omni_bus.api.media import THREAD_ABOVE
from omni_bus.api.voice.events import ErrorRaised, SessionEvent
from omni_bus.api.voice.limits import EventRate, SessionTimer
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.session import VoiceSession
from omni_bus.api.voice.settings import SessionSettings
from omni_bus.errors import InvalidRequest, OmniBusError, TooLarge

log = logging.getLogger("omni_bus.api")

CLOSE_S = 2.0  # for the client to take what closes the connection
POLICY, INTERNAL = 1008, 1011  # close codes
Decoded = TypeVar("Decoded")


class VoiceConnection(abc.ABC):
    frame_type: ClassVar[WSMsgType]  # of the messages that it sends

    def __init__(self, socket: web.WebSocketResponse, abort: Callable[[], None], services: VoiceServices, label: str) -> None:
        """abort: ends the connection of a client that does not even take its close."""
        self._socket = socket
        self._abort = abort
        self.services = services
        config = services.config
        self.max_message = config.session_event_mb * 2**20
        self.session = VoiceSession(services, SessionSettings.default(services.model), self._send, label=label)
        self.cause: str | None = None  # the client's own name for the message that is being carried out
        self._rate = EventRate(config.session_events_per_s, time.monotonic())
        self._timer = SessionTimer(config, self.session.busy_until, self._over)
        self._closing: asyncio.Task[None] | None = None

    # ---- what a protocol says

    @staticmethod
    @abc.abstractmethod
    def error_message(error: OmniBusError) -> bytes:
        """A message that tells of an error outside of any session."""

    @abc.abstractmethod
    def render(self, event: SessionEvent) -> Iterable[bytes]:
        """The messages that tell of an event, none where the protocol has no word for it."""

    @abc.abstractmethod
    async def carry_out(self, data: bytes, *, text: bool) -> None:
        """What one message of the client asks; text: it came as a text message. Raises OmniBusError, and changes nothing then."""

    # ---- the socket's life

    async def serve(self) -> None:
        """Until the client goes, or is sent away."""
        writing = asyncio.create_task(self.session.run())
        writing.add_done_callback(self._written)
        try:
            while True:
                message = await self._socket.receive()
                if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    break
                if not await self._receive(message.data, text=message.type is WSMsgType.TEXT):
                    break
        finally:
            await self._ended(writing)

    async def leave(self, code: int, reason: str) -> None:
        """Close, whether or not the client still takes what it is sent."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=code, message=reason.encode()[:120])
        except (TimeoutError, ConnectionError):
            self._abort()

    async def _ended(self, writing: asyncio.Task[None]) -> None:
        """Everything of the session is over. That the connection is lost meanwhile, for which aiohttp cancels us, is what we wait for."""
        ending = asyncio.create_task(self._end(writing))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)

    async def _end(self, writing: asyncio.Task[None]) -> None:
        self._timer.stop()
        await self.session.close()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        if self._closing is not None:
            await asyncio.gather(self._closing, return_exceptions=True)

    # ---- out

    async def _send(self, event: SessionEvent) -> None:
        for message in self.render(event):
            await self._socket.send_frame(message, self.frame_type)

    def _written(self, writing: asyncio.Task[None]) -> None:
        """The writer ended: with the connection, or by a fault of ours, and then the client is told by the close code."""
        if writing.cancelled():
            return
        error = writing.exception()
        if error is not None and not isinstance(error, ConnectionError):
            log.error("a session's events could not be rendered", exc_info=error)
            self._closing = asyncio.create_task(self.leave(INTERNAL, "the server met an internal error"))

    def _refuse(self, error: OmniBusError, cause: str | None) -> None:
        self.services.metrics.failed(error.code)
        self.session.tell(ErrorRaised(error, cause))

    def _over(self, code: str, message: str) -> None:
        self._closing = asyncio.create_task(self._send_away(InvalidRequest(message, code=code)))

    async def _send_away(self, error: OmniBusError) -> None:
        self._refuse(error, None)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.session.drained()
        except TimeoutError:
            log.info("a client that is sent away takes nothing more")
        await self.leave(POLICY, error.code)

    # ---- in

    async def _receive(self, data: bytes, *, text: bool) -> bool:
        """False where the client has been sent away."""
        self._timer.heard()
        try:
            self._rate.count(time.monotonic())
        except OmniBusError as error:
            await self._send_away(error)
            return False
        self.cause = None
        try:
            if len(data) > self.max_message:
                raise TooLarge(f"a message may have up to {self.max_message // 2**20} MiB; this one has {len(data)} bytes")
            await self.carry_out(data, text=text)
        except OmniBusError as error:
            self._refuse(error, self.cause)
        except Exception:
            log.exception("a client's message failed inside the server")
            self._refuse(internal_error(), self.cause)
        await self.session.drained()
        return True

    async def off_loop(self, size: int, decode: Callable[..., Decoded], *arguments: object) -> Decoded:
        """In a thread, where it is so much that it would hold up others."""
        if size <= THREAD_ABOVE:
            return decode(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self.services.threads, decode, *arguments)
