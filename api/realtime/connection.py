"""One Realtime client: its events, in order, to the voice session's methods; the session's events as the protocol's, to it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable

import msgspec
from aiohttp import WSMsgType, web

from omni_bus.api.media import base64_content
from omni_bus.api.realtime import client_events
from omni_bus.api.realtime.client_events import ClientEvent, Unreadable, parse_event
from omni_bus.api.realtime.remote_images import fetching
from omni_bus.api.realtime.response_wish import read_wish
from omni_bus.api.realtime.server_events import SessionShown, render
from omni_bus.api.realtime.session_object import merge_session, session_to_json
from omni_bus.api.voice.events import AnswerInterrupted, ErrorRaised, SessionEvent
from omni_bus.api.voice.item_json import RemoteImage, item_from_json
from omni_bus.api.voice.items import Item
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice_connection import VoiceConnection
from omni_bus.errors import InvalidRequest, OmniBusError


class RealtimeConnection(VoiceConnection):
    frame_type = WSMsgType.TEXT

    def __init__(self, socket: web.WebSocketResponse, abort: Callable[[], None], services: VoiceServices, label: str) -> None:
        super().__init__(socket, abort, services, label)
        self._expires_at = int(time.time() + services.config.session_s)
        self.session.tell(self._shown("created"))

    def _shown(self, what: str) -> SessionShown:
        session = self.session
        return SessionShown(what, session_to_json(session.settings, session.id, self.services.model.name, self._expires_at))

    @staticmethod
    def error_message(error: OmniBusError) -> bytes:
        return render(ErrorRaised(error))

    def render(self, event: SessionEvent) -> Iterable[bytes]:
        if isinstance(event, AnswerInterrupted):
            return ()  # clients of this protocol conclude it from speech_started
        return (render(event),)

    async def carry_out(self, data: bytes, *, text: bool) -> None:
        if not text:
            raise InvalidRequest("events are JSON in text messages; this message was binary", code="invalid_event")
        try:
            event = await self.off_loop(len(data), parse_event, data)
        except Unreadable as unreadable:
            self.cause = unreadable.cause
            raise unreadable.error from None
        self.cause = event.event_id
        await self._handle(event)

    async def _handle(self, event: ClientEvent) -> None:
        session = self.session
        match event:
            case client_events.AudioAppend(audio=audio):
                await session.append_audio(await self.off_loop(len(audio), base64_content, audio, "audio"))
            case client_events.SessionUpdate(session=raw):
                await session.configure(merge_session(raw, session.settings, self.services.model))
                session.tell(self._shown("updated"))
            case client_events.AudioCommit():
                session.commit_audio()
            case client_events.AudioClear():
                session.clear_audio()
            case client_events.OutputClear():
                session.clear_output()
            case client_events.ItemCreate(item=raw, previous_item_id=previous):
                remote: list[RemoteImage] = []
                item = await self.off_loop(len(raw), self._item, raw, remote)
                fetch = fetching(remote, self.services.fetcher)
                if fetch is None:
                    session.add_item(item, previous)
                else:
                    session.add_unfetched(item, previous, fetch, self.cause)
            case client_events.ItemRetrieve(item_id=item_id):
                await session.retrieve_item(item_id)
            case client_events.ItemTruncate(item_id=item_id, content_index=index, audio_end_ms=end_ms):
                session.truncate_item(item_id, index, end_ms)
            case client_events.ItemDelete(item_id=item_id):
                session.delete_item(item_id)
            case client_events.ResponseCreate(response=body):
                remote = []
                size = sum(len(raw) for raw in (body.input if body is not None else None) or ())
                wish = await self.off_loop(size, read_wish, body, session, self.services.model, remote)
                fetch = fetching(remote, self.services.fetcher)
                session.create_response(wish if fetch is None else dataclasses.replace(wish, fetch=fetch))
            case client_events.ResponseCancel(response_id=response_id):
                session.cancel_response(response_id)

    def _item(self, raw: msgspec.Raw, remote: list[RemoteImage]) -> Item:
        accepts = self.services.model.pipeline.input_kinds
        return item_from_json(raw, input_format=self.session.settings.input_format, accepts=accepts, remote=remote)
