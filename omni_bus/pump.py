"""Brings a ZeroMQ socket's messages to a callback on an asyncio loop: no task, no poll, no sleep.

A ZeroMQ socket signals its FD once when messages appear, and any call on the socket may take that signal away. So whoever was
woken reads until nothing is left, and whoever sent looks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import zmq

# As plain integers: arithmetic on zmq's enums costs more than the calls it is for.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)

BATCH = 128  # messages read before timers and other descriptors get their turn

Frame = bytes | memoryview | zmq.Frame


class Pump:
    """Owns the reading side of one socket. `on_message` gets the frames of each message, in order, on the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, socket: zmq.Socket[bytes], on_message: Callable[[list[zmq.Frame]], None]
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._on_message = on_message
        self._fd = socket.fileno()
        self._again: asyncio.Handle | None = None
        self._draining = False
        loop.add_reader(self._fd, self._drain)
        self._look_again()

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue one message. Raises zmq.ZMQError, with EHOSTUNREACH where a ROUTER knows no such peer (any more)."""
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            self._socket.send(frame, _NOBLOCK_MORE if index < last else _NOBLOCK, copy=isinstance(frame, bytes))
        if not self._draining and self._again is None:
            self._look_again()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._again is not None:
            self._again.cancel()

    def _look_again(self) -> None:
        self._again = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._again = None
        self._draining = True
        more = True  # a full batch, or an exception out of the callback: the rest still waits, and no signal will say so
        try:
            for _ in range(BATCH):
                try:
                    frames = [self._socket.recv(_NOBLOCK, copy=False)]
                except zmq.Again:
                    more = False
                    return
                while frames[-1].more:  # a message arrives whole or not at all
                    frames.append(self._socket.recv(_NOBLOCK, copy=False))
                self._on_message(frames)
                # Asking is cheaper than a recv that fails, and it too arms the signal for what comes next.
                if self._socket.closed or not cast(int, self._socket.get(zmq.EVENTS)) & _POLLIN:
                    more = False
                    return
        finally:
            self._draining = False
            if more:
                self._look_again()
