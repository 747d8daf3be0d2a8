"""A microphone for stock clients: PCM16 at 24 kHz in pieces of 20 ms, in real time, silence where nothing is said."""

from __future__ import annotations

import asyncio
import collections
import wave
from collections.abc import Awaitable, Callable

RATE = 24_000
PIECE_MS = 20
PIECE_BYTES = RATE * PIECE_MS // 1000 * 2


def speech(path: str) -> list[bytes]:
    """A WAV file (PCM16, mono, 24 kHz) in pieces of 20 ms, the last one filled with silence."""
    with wave.open(path) as file:
        shape = (file.getframerate(), file.getnchannels(), file.getsampwidth())
        if shape != (RATE, 1, 2):
            raise SystemExit(f"{path}: must be PCM16, mono, 24 kHz; is {shape}")
        pcm = file.readframes(file.getnframes())
    pcm += bytes(-len(pcm) % PIECE_BYTES)
    return [pcm[at : at + PIECE_BYTES] for at in range(0, len(pcm), PIECE_BYTES)]


class Microphone:
    """Sends one piece every 20 ms, as `send` takes them; where the sender was held up, the late pieces follow at once."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: collections.deque[bytes] = collections.deque()
        self._quiet = asyncio.Event()

    async def say(self, path: str) -> None:
        """Returns when the file's last piece has been sent."""
        self._waiting += speech(path)
        self._quiet.clear()
        await self._quiet.wait()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        began, sent = loop.time(), 0
        while True:
            await self._send(self._waiting.popleft() if self._waiting else bytes(PIECE_BYTES))
            if not self._waiting:
                self._quiet.set()
            sent += 1
            await asyncio.sleep(began + sent * PIECE_MS / 1000 - loop.time())
