"""The 16 streams of a soak on the tiny Qwen3-Omni: chats, some of them about a sound, some that may wait, and voice sessions."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import time
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np

from bench.realtime_socket import RealtimeSocket, SocketClosed, connected
from tests.support.chat_http import wav
from tests.support.steady_load import BROKEN, Stream
from tests.support.steady_voice import FRAMES, TOKENS, Answer, SteadyVoice

PLACES = 16
TEXT_ONLY = range(3)
ABOUT_A_SOUND = range(3, 7)  # their features are larger than what travels inline
MAY_WAIT = range(2, 5)  # priority batch
SESSIONS = range(14, PLACES)
SOUND_S = 8.0
TURNS = 3  # of a session, then there is another one
RATE = 24_000
GREEDY = {"talker": {"temperature": 0.0, "max_tokens": FRAMES, "ignore_eos": True}}
THINKER = {"thinker": {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}}
CLOSED = {1012: "closed_restart", 1011: "closed_fault"}  # a socket that the server ends by a code has had a named end


@dataclasses.dataclass(slots=True)
class Expected:
    """What was heard first, and is to be heard again."""

    chats: dict[int, Answer] = dataclasses.field(default_factory=dict)  # by place
    turns: dict[tuple[int, int], Answer] = dataclasses.field(default_factory=dict)  # by place and turn of a session


@dataclasses.dataclass(slots=True)
class Session:
    socket: RealtimeSocket
    context: contextlib.AsyncExitStack
    turns: int = 0


class Speakers(SteadyVoice):
    def __init__(self, url: str, expected: Expected) -> None:
        super().__init__(url, expected.chats, text_only=len(TEXT_ONLY))
        self._turns = expected.turns
        self._sessions: dict[int, Session] = {}
        self._packets: dict[int, list[tuple[float, float]]] = {}  # place → (arrival, seconds of sound)
        self.heard: list[tuple[Stream, list[tuple[float, float]]]] = []  # of chats that were answered whole

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            for place in list(self._sessions):
                await self._leave(place)

    def body(self, stream: Stream) -> dict[str, Any]:
        said = super().body(stream)
        self._packets[stream.place] = []
        if stream.place in ABOUT_A_SOUND:
            sound = {"type": "input_audio", "input_audio": {"data": _sound(stream.place), "format": "wav"}}
            said["messages"][0]["content"] = [sound, {"type": "text", "text": f"What is number {stream.place}?"}]
        if stream.place in MAY_WAIT:
            said["priority"] = "batch"
        return said

    def hear(self, stream: Stream, text: str, pcm: bytes) -> None:
        super().hear(stream, text, pcm)
        if pcm:
            self._packets[stream.place].append((time.monotonic(), len(pcm) / 2 / RATE))

    def check_whole(self, stream: Stream) -> None:
        super().check_whole(stream)
        if packets := self._packets[stream.place]:
            self.heard.append((stream, packets))

    async def _ask(self, stream: Stream) -> None:
        if stream.place in SESSIONS:
            await self._turn(stream)
        else:
            await super()._ask(stream)

    # ---- voice sessions

    async def _turn(self, stream: Stream) -> None:
        """One answer in the session of that place. A session whose answer failed is left: it no longer says what others said."""
        try:
            session = self._sessions.get(stream.place) or await self._join(stream.place)
            stream.finish(await self._answer(session, stream))
        except aiohttp.WSServerHandshakeError as refused:
            stream.finish("no_ready_replica" if refused.status == 503 else f"refused_{refused.status}")
        except SocketClosed:
            code = self._sessions[stream.place].socket.socket.close_code if stream.place in self._sessions else None
            stream.finish(CLOSED.get(code or 0, BROKEN))
        except (aiohttp.ClientError, ConnectionError):
            stream.finish(BROKEN)
        session = self._sessions.get(stream.place)
        if session is not None and (stream.end != "done" or session.turns == TURNS):
            await self._leave(stream.place)

    async def _join(self, place: int) -> Session:
        context = contextlib.AsyncExitStack()
        socket = await context.enter_async_context(connected(self._url, "tiny"))
        session = self._sessions[place] = Session(socket, context)
        audio = {"input": {"turn_detection": None}, "output": {"voice": "ethan"}}
        await socket.send("session.update", session={"type": "realtime", "audio": audio, "sampling": {**GREEDY, **THINKER}})
        await socket.until("session.updated", "error")
        return session

    async def _leave(self, place: int) -> None:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            await self._sessions.pop(place).context.aclose()

    async def _answer(self, session: Session, stream: Stream) -> str:
        """How it ends: "done" or a code."""
        socket, since = session.socket, session.socket.count
        content = [{"type": "input_text", "text": f"Turn {session.turns} of {stream.place}."}]
        await socket.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await socket.send("response.create")
        last = await socket.until("response.done", since=since)
        said, key = Answer(), (stream.place, session.turns)
        for event in socket.events[since:]:
            assert event.type != "error", f"{event.fields}"
            if event.type == "response.output_audio.delta":
                said.pcm += event.pcm
                stream.events += 1
            elif event.type == "response.output_audio_transcript.delta":
                said.text += event["delta"]
        stream.text, stream.heard = said.text, len(said.pcm) // 2
        response = last["response"]
        if response["status"] == "incomplete":
            assert response["status_details"]["reason"] == "max_output_tokens", response  # which is how each of them ends
            assert said.pcm and said == self._turns.setdefault(key, said), f"session {key}: an answer that is not whole"
            session.turns += 1
            return "done"
        if (known := self._turns.get(key)) is not None:
            assert known.text.startswith(said.text) and known.pcm.startswith(said.pcm), f"session {key}: another answer"
        assert response["status"] == "failed", response
        return str(response["status_details"]["error"]["code"])


def _sound(place: int) -> str:
    """A hum of its own for each place, as base64 of a WAV at 16 kHz."""
    time_s = np.arange(int(SOUND_S * 16_000)) / 16_000
    return base64.b64encode(wav((0.3 * np.sin(2 * np.pi * (120 + 40 * place) * time_s)).astype(np.float32))).decode()
