"""One Realtime session as a client that measures or tests holds it: events sent, and received with the moment they came."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

RATE = 24_000  # of PCM16 in and out
LIMIT_S = 60.0  # for any one event that is waited for


@dataclasses.dataclass(slots=True, frozen=True)
class Event:
    """A server event. at: seconds on the monotonic clock, when its message had been read."""

    at: float
    type: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def pcm(self) -> bytes:
        """Of a response.output_audio.delta."""
        return base64.b64decode(self.fields["delta"])


class SocketClosed(Exception):
    """The server closed the socket while an event was waited for."""


class RealtimeSocket:
    """Use `connected`. Events are kept in the order in which they came, and read by position: none is taken away by waiting."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, check: Callable[[dict[str, Any]], None] | None) -> None:
        self.socket = socket
        self.events: list[Event] = []
        self._check = check
        self._changed = asyncio.Event()
        self._closed = False
        self._wrong: BaseException | None = None

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_str(json.dumps({"type": kind, **fields}))

    async def append(self, pcm: bytes) -> None:
        """PCM16, 24 kHz, mono, to the input buffer."""
        await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    async def speak(self, pcm: bytes, piece_ms: int = 100) -> float:
        """Append it in real time; the moment at which the last piece was sent."""
        size = RATE * piece_ms // 1000 * 2
        began = time.monotonic()
        for number, at in enumerate(range(0, len(pcm), size), start=1):
            await asyncio.sleep(began + number * piece_ms / 1000 - time.monotonic())
            await self.append(pcm[at : at + size])
        return time.monotonic()

    async def until(
        self, *kinds: str, since: int = 0, where: Callable[[Event], bool] = lambda event: True, limit: float = LIMIT_S
    ) -> Event:
        """The first event of these types from number `since` on. TimeoutError and SocketClosed say what came instead."""
        try:
            async with asyncio.timeout(limit):
                while True:
                    for event in self.events[since:]:
                        if event.type in kinds and where(event):
                            return event
                    self.raise_wrong()
                    if self._closed:
                        raise SocketClosed(f"waiting for {kinds}; closed with {self.socket.close_code}; {self._tail(since)}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"none of {kinds} within {limit:.0f} s; {self._tail(since)}") from None

    @property
    def count(self) -> int:
        """Events so far: where to look for the next ones from."""
        return len(self.events)

    def types(self, since: int = 0) -> list[str]:
        return [event.type for event in self.events[since:]]

    def _tail(self, since: int) -> str:
        shown = [event.type if event.type != "error" else json.dumps(event["error"]) for event in self.events[since:]]
        return f"came: {shown[-12:]}"

    def raise_wrong(self) -> None:
        """What `check` raised, if it did."""
        if self._wrong is not None:
            raise self._wrong

    async def read(self) -> None:
        """Until the socket closes."""
        try:
            async for message in self.socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    raise AssertionError(f"the server sent a message of type {message.type!r}")
                fields = json.loads(message.data)
                if self._check is not None:
                    self._check(fields)
                self.events.append(Event(time.monotonic(), fields["type"], fields))
                self._changed.set()
        except Exception as wrong:
            self._wrong = wrong
        finally:
            self._closed = True
            self._changed.set()


@contextlib.asynccontextmanager
async def connected(
    address: str, model: str, *, check: Callable[[dict[str, Any]], None] | None = None, **headers: str
) -> AsyncIterator[RealtimeSocket]:
    """A session at http://host:port, past its session.created; closed behind the block. check: sees each event, and raises."""
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{address}/v1/realtime", params={"model": model}, headers=headers, max_msg_size=0) as socket,
    ):
        realtime = RealtimeSocket(socket, check)
        reader = asyncio.create_task(realtime.read())
        try:
            await realtime.until("session.created")
            yield realtime
            realtime.raise_wrong()
        finally:
            await socket.close()
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
