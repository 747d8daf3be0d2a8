"""A duplex client for tests: everything that it is sent, in order, held to what the protocol's page says of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

HELLO, AUDIO, TEXT, CONTROL, EVENT = range(5)
LIMIT_S = 60.0
# Event → its fields, beside its type.
FIELDS: dict[str, set[str]] = {
    "speech_started": {"ms"},
    "speech_stopped": {"ms"},
    "transcript": {"text"},
    "answer_started": {"id"},
    "answer_done": {"id", "status", "reason", "usage"},
    "interrupted": {"id", "played_ms"},
    "error": {"code", "message"},
    "pong": set(),
}


@dataclasses.dataclass(frozen=True)
class Message:
    kind: int
    body: bytes
    at: float  # time.monotonic, when it had been read

    @property
    def fields(self) -> dict[str, Any]:
        """Of a hello or an event."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def name(self) -> str:
        """The type of an event; of others, "hello", "audio" or "text"."""
        return str(self.fields["type"]) if self.kind == EVENT else ("hello", "audio", "text")[self.kind]


class SocketClosed(Exception):
    pass


class DuplexSocket:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.messages: list[Message] = []
        self._changed = asyncio.Event()
        self._wrong: BaseException | None = None
        self._audio_bytes = 0

    async def send(self, kind: int, body: bytes = b"") -> None:
        await self.socket.send_bytes(bytes([kind]) + body)

    async def hello(self, **fields: Any) -> dict[str, Any]:
        """The server's answer."""
        since = self.count
        await self.send(HELLO, json.dumps({"version": 1, **fields}).encode())
        return (await self.until("hello", since=since)).fields

    async def control(self, kind: str, **fields: Any) -> None:
        await self.send(CONTROL, json.dumps({"type": kind, **fields}).encode())

    async def say(self, text: str) -> None:
        await self.send(TEXT, text.encode())

    async def audio(self, pcm: bytes, size: int = 4_800, *, pace_s: float = 0.0) -> None:
        for start in range(0, len(pcm), size):
            await self.send(AUDIO, pcm[start : start + size])
            if pace_s:
                await asyncio.sleep(pace_s)

    async def sync(self, number: int = 0) -> None:
        """Until everything sent before has been read."""
        since = self.count
        await self.control("ping", id=number)
        await self.until("pong", since=since, where=lambda message: message.fields.get("id") == number, limit=120)

    async def until(
        self, name: str, *, since: int = 0, where: Callable[[Message], bool] = lambda message: True, limit: float = LIMIT_S
    ) -> Message:
        """The first such message from number `since` on."""
        try:
            async with asyncio.timeout(limit):
                while True:
                    for message in self.messages[since:]:
                        if message.name == name and where(message):
                            return message
                    self.raise_wrong()
                    if self.socket.closed:
                        raise SocketClosed(f"waiting for {name}: closed with {self.socket.close_code}; came {self.tail(since)}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"no {name} within {limit:.0f} s; came {self.tail(since)}") from None

    @property
    def count(self) -> int:
        return len(self.messages)

    def names(self, since: int = 0) -> list[str]:
        """What came, runs of audio and text each as one."""
        shown: list[str] = []
        for message in self.messages[since:]:
            if not shown or message.name != shown[-1] or message.kind == EVENT:
                shown.append(message.name)
        return shown

    def tail(self, since: int = 0) -> list[str]:
        return [str(m.fields) if m.name == "error" else m.name for m in self.messages[since:]][-12:]

    def pcm(self, since: int = 0) -> bytes:
        return b"".join(message.body for message in self.messages[since:] if message.kind == AUDIO)

    def text(self, since: int = 0) -> str:
        return b"".join(message.body for message in self.messages[since:] if message.kind == TEXT).decode()

    def index(self, message: Message) -> int:
        return next(index for index, found in enumerate(self.messages) if found is message)

    def raise_wrong(self) -> None:
        if self._wrong is not None:
            raise self._wrong

    async def read(self) -> None:
        try:
            async for message in self.socket:
                assert message.type is aiohttp.WSMsgType.BINARY, message
                found = Message(message.data[0], message.data[1:], time.monotonic())
                self._check(found)
                self.messages.append(found)
                self._changed.set()
        except Exception as wrong:
            self._wrong = wrong
        finally:
            self._changed.set()

    def _check(self, message: Message) -> None:
        match message.kind:
            case 0:
                self._audio_bytes = message.fields["audio_bytes"]
            case 1:
                assert 0 < len(message.body) <= self._audio_bytes and not len(message.body) % 2
            case 2:
                assert message.body.decode()
            case 4:
                assert set(message.fields) - {"type"} == FIELDS[message.name] | (set(message.fields) & {"id"}), message.fields
            case other:
                raise AssertionError(f"a message of kind {other}")


@contextlib.asynccontextmanager
async def connected(address: str, **headers: str) -> AsyncIterator[DuplexSocket]:
    """A socket at http://host:port, before its hello; closed behind the block."""
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{address}/v1/duplex", headers=headers) as socket:
        duplex = DuplexSocket(socket)
        reader = asyncio.create_task(duplex.read())
        try:
            yield duplex
            duplex.raise_wrong()
        finally:
            await socket.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
