"""One duplex client: its messages, in order, to the voice session's methods; the session's events as the protocol's, to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiohttp import WSMsgType, web

from omni_bus.api.chat_body import decode_json
from omni_bus.api.duplex import client_messages, server_messages
from omni_bus.api.duplex.client_messages import HelloBody, InvalidMessage, Kind, parse_control, parse_text
from omni_bus.api.duplex.server_messages import ServerMessages, Told
from omni_bus.api.duplex.settings import DuplexSettings, first_settings, hello_to_json, updated_settings
from omni_bus.api.voice.events import SessionEvent
from omni_bus.api.voice.items import InputText, Item
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice_connection import VoiceConnection
from omni_bus.errors import InvalidRequest, OmniBusError

SAMPLE_BYTES = 2


class DuplexConnection(VoiceConnection):
    frame_type = WSMsgType.BINARY

    def __init__(self, socket: web.WebSocketResponse, abort: Callable[[], None], services: VoiceServices, label: str) -> None:
        super().__init__(socket, abort, services, label)
        self._messages = ServerMessages()
        self._settings: DuplexSettings | None = None  # until the hello

    @staticmethod
    def error_message(error: OmniBusError) -> bytes:
        return server_messages.error_message(error)

    def render(self, event: SessionEvent) -> Iterable[bytes]:
        return self._messages.render(event)

    async def carry_out(self, data: bytes, *, text: bool) -> None:
        if text:
            raise InvalidMessage("messages are binary and begin with the byte of their kind; this was a text message")
        if not data:
            raise InvalidMessage("a message must at least have the byte of its kind; this one was empty")
        kind, body = data[0], data[1:]
        if kind == Kind.HELLO:
            await self._hello(body)
        elif kind == Kind.EVENT:
            raise InvalidMessage("messages of kind 4 are the server's; clients send kinds 0 to 3")
        elif kind > Kind.EVENT:
            return
        elif self._settings is None:
            raise InvalidMessage("send a hello (kind 0) first", code="hello_required")
        elif kind == Kind.AUDIO:
            await self._audio(body)
        elif kind == Kind.TEXT:
            self.session.answer_item(Item.message("user", [InputText(parse_text(body))]))
        else:
            await self._control(body, self._settings)

    async def _hello(self, body: bytes) -> None:
        if self._settings is not None:
            raise InvalidMessage("there has been a hello; send an update to change settings", code="hello_twice")
        hello = await self.off_loop(len(body), decode_json, body, HelloBody)
        await self._take(first_settings(hello, self.session.settings, self.services.model))

    async def _take(self, settings: DuplexSettings) -> None:
        await self.session.configure(settings.session)
        self._settings = settings
        self._messages.captions = settings.captions
        self._messages.audio_bytes = settings.audio_bytes
        hello = hello_to_json(settings, self.session.id, self.services.model, self.services.config)
        self.session.tell(Told(Kind.HELLO, hello))

    async def _audio(self, body: bytes) -> None:
        if len(body) % SAMPLE_BYTES:
            raise InvalidRequest(
                f"audio is whole samples of {SAMPLE_BYTES} bytes; this message had {len(body)} bytes and was dropped",
                code="invalid_audio",
            )
        await self.session.append_audio(body)

    async def _control(self, body: bytes, settings: DuplexSettings) -> None:
        control = await self.off_loop(len(body), parse_control, body)
        match control:
            case client_messages.Commit():
                self.session.end_turn()
            case client_messages.Clear():
                self.session.clear_audio()
            case client_messages.Cancel():
                self.session.interrupt("client_cancelled")
            case client_messages.Played(ms, answer_id):
                self._played(ms, answer_id)
            case client_messages.Update():
                spoken = self.session.spoken
                await self._take(updated_settings(control, settings, self.services.model, spoken=spoken))
            case client_messages.Ping(id=number):
                self.session.tell(Told(Kind.EVENT, {"type": "pong"} if number is None else {"type": "pong", "id": number}))

    def _played(self, ms: float, answer_id: str | None) -> None:
        item_id = self._messages.sounding if answer_id is None else self._messages.item_of(answer_id)
        if item_id is None:
            raise InvalidRequest("id: this is none of the last answers that were spoken", param="id", code="unknown_answer")
        self.session.report_played(item_id, ms)
