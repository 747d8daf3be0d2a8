"""One client on one WebSocket: its events, in order, to the voice session's methods; the session's events, rendered, to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import WSMsgType, web

from omni_bus.api.errors_render import internal_error
from omni_bus.api.media import THREAD_ABOVE, base64_content
from omni_bus.api.realtime import client_events
from omni_bus.api.realtime.client_events import ClientEvent, Unreadable, parse_event
from omni_bus.api.realtime.response_wish import read_wish
from omni_bus.api.realtime.server_events import SessionShown, render
from omni_bus.api.realtime.session_object import merge_session, session_to_json
from omni_bus.api.voice.events import ErrorRaised, SessionEvent
from omni_bus.api.voice.item_json import item_from_json
from omni_bus.api.voice.items import Item
from omni_bus.api.voice.limits import EventRate, SessionTimer
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.session import VoiceSession
from omni_bus.api.voice.settings import SessionSettings
from omni_bus.errors import InvalidRequest, OmniBusError, TooLarge

log = logging.getLogger("omni_bus.api")

CLOSE_S = 2.0  # for the client to take what closes the connection
POLICY, INTERNAL = 1008, 1011  # close codes
Decoded = TypeVar("Decoded")


class RealtimeConnection:
    def __init__(self, socket: web.WebSocketResponse, abort: Callable[[], None], services: VoiceServices, label: str) -> None:
        """abort: ends the connection of a client that does not even take its close."""
        self._socket = socket
        self._abort = abort
        self._services = services
        config = services.config
        self._max_event = config.session_event_mb * 2**20
        self._session = VoiceSession(services, SessionSettings.default(services.model), self._send, label=label)
        self._expires_at = int(time.time() + config.session_s)
        self._rate = EventRate(config.session_events_per_s, time.monotonic())
        self._timer = SessionTimer(config, self._over)
        self._closing: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Until the client goes, or is sent away."""
        self._session.tell(self._shown("created"))
        writing = asyncio.create_task(self._session.run())
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

    async def _ended(self, writing: asyncio.Task[None]) -> None:
        """Everything of the session is over. That the connection is lost meanwhile, for which aiohttp cancels us, is what we wait for."""
        ending = asyncio.create_task(self._end(writing))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)

    async def _end(self, writing: asyncio.Task[None]) -> None:
        self._timer.stop()
        await self._session.close()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        if self._closing is not None:
            await asyncio.gather(self._closing, return_exceptions=True)

    async def leave(self, code: int, reason: str) -> None:
        """Close, whether or not the client still takes what it is sent."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=code, message=reason.encode()[:120])
        except (TimeoutError, ConnectionError):
            self._abort()

    # ---- out

    async def _send(self, event: SessionEvent) -> None:
        await self._socket.send_frame(render(event), WSMsgType.TEXT)

    def _written(self, writing: asyncio.Task[None]) -> None:
        """The writer ended: with the connection, or by a fault of ours, and then the client is told by the close code."""
        if writing.cancelled():
            return
        error = writing.exception()
        if error is not None and not isinstance(error, ConnectionError):
            log.error("a session's events could not be rendered", exc_info=error)
            self._closing = asyncio.create_task(self.leave(INTERNAL, "the server met an internal error"))

    def _shown(self, what: str) -> SessionShown:
        session = self._session
        return SessionShown(what, session_to_json(session.settings, session.id, self._services.model.name, self._expires_at))

    def _refuse(self, error: OmniBusError, cause: str | None) -> None:
        self._services.metrics.failed(error.code)
        self._session.tell(ErrorRaised(error, cause))

    def _over(self, code: str, message: str) -> None:
        self._closing = asyncio.create_task(self._send_away(InvalidRequest(message, code=code)))

    async def _send_away(self, error: OmniBusError) -> None:
        self._refuse(error, None)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._session.drained()
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
        cause = None
        try:
            if not text:
                raise InvalidRequest("events are JSON in text messages; this message was binary", code="invalid_event")
            if len(data) > self._max_event:
                raise TooLarge(f"an event may have up to {self._max_event // 2**20} MiB; this one has {len(data)} bytes")
            event = await self._parse(data)
            cause = event.event_id
            await self._handle(event)
        except Unreadable as unreadable:
            self._refuse(unreadable.error, unreadable.cause)
        except OmniBusError as error:
            self._refuse(error, cause)
        except Exception:
            log.exception("a client's event failed inside the server")
            self._refuse(internal_error(), cause)
        await self._session.drained()
        return True

    async def _parse(self, data: bytes) -> ClientEvent:
        if len(data) <= THREAD_ABOVE:
            return parse_event(data)
        return await asyncio.get_running_loop().run_in_executor(self._services.threads, parse_event, data)

    async def _handle(self, event: ClientEvent) -> None:
        session = self._session
        match event:
            case client_events.AudioAppend(audio=audio):
                await session.append_audio(await self._off_loop(len(audio), base64_content, audio, "audio"))
            case client_events.SessionUpdate(session=raw):
                await session.configure(merge_session(raw, session.settings, self._services.model))
                session.tell(self._shown("updated"))
            case client_events.AudioCommit():
                session.commit_audio()
            case client_events.AudioClear():
                session.clear_audio()
            case client_events.OutputClear():
                session.clear_output()
            case client_events.ItemCreate(item=raw, previous_item_id=previous):
                item = await self._off_loop(len(raw), self._item, raw)
                session.add_item(item, previous)
            case client_events.ItemRetrieve(item_id=item_id):
                session.retrieve_item(item_id)
            case client_events.ItemTruncate(item_id=item_id, content_index=index, audio_end_ms=end_ms):
                session.truncate_item(item_id, index, end_ms)
            case client_events.ItemDelete(item_id=item_id):
                session.delete_item(item_id)
            case client_events.ResponseCreate(response=body):
                session.create_response(read_wish(body, session, self._services.model))
            case client_events.ResponseCancel(response_id=response_id):
                session.cancel_response(response_id)

    def _item(self, raw: msgspec.Raw) -> Item:
        accepts = self._services.model.pipeline.input_kinds
        return item_from_json(raw, input_format=self._session.settings.input_format, accepts=accepts)

    async def _off_loop(self, size: int, decode: Callable[..., Decoded], *arguments: object) -> Decoded:
        """In a thread, where it is so much that it would hold up others."""
        if size <= THREAD_ABOVE:
            return decode(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._services.threads, decode, *arguments)
