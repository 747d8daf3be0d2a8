"""The supervisor's end of the control socket: commands read, done one at a time, and told of line by line."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import Callable

import msgspec

from omni_bus.control import LINE, Answer, Command, Drain, Ended, Restart, Said, Scale
from omni_bus.errors import ConfigError, OmniBusError
from omni_bus.operations import Operations

READ_S = 5.0  # for a command to be said


class ControlServer:
    """`ready`: whether the server serves, and may be changed. `note` gets each line of what is done."""

    def __init__(self, operations: Operations, ready: Callable[[], bool], note: Callable[[str], None]) -> None:
        self._operations = operations
        self._ready = ready
        self._note = note
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(
        cls, path: pathlib.Path, operations: Operations, ready: Callable[[], bool], note: Callable[[str], None]
    ) -> ControlServer:
        control = cls(operations, ready, note)
        control._server = await asyncio.start_unix_server(control._connected, str(path), limit=LINE)
        return control

    async def close(self) -> None:
        """Nothing more is taken; what is under way is left as it is, and its command hears of the end by the closed connection."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A change that was begun is brought to its end, whether or not its command still listens."""

        def answer(what: Answer) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(what) + b"\n")

        def say(line: str) -> None:
            self._note(line)
            answer(Said(line))

        try:
            async with asyncio.timeout(READ_S):
                command = msgspec.json.decode(await reader.readline(), type=Command)
            answer(await self._outcome(command, say))
            await writer.drain()
        except (TimeoutError, ConnectionError, ValueError, msgspec.MsgspecError):
            answer(Ended("the server could not read the command; is it another version's?", refused=True))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _outcome(self, command: Command, say: Callable[[str], None]) -> Ended:
        if not self._ready():
            return Ended("the server is not ready yet; try again once `omni-bus status` says so", refused=True)
        try:
            match command:
                case Scale(stage, replicas):
                    await self._operations.scale(stage, replicas, say)
                case Drain(replica):
                    await self._operations.drain(replica, say)
                case Restart(stage, rolling):
                    await self._operations.restart(stage, rolling, say)
        except OmniBusError as error:
            self._note(f"a command failed: {error.message}")
            return Ended(error.message, refused=isinstance(error, ConfigError))
        except Exception as error:
            self._note(f"a command failed inside the server: {error!r}")
            return Ended("the command failed inside the server; its own output says why")
        return Ended()
