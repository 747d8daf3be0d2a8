"""One stage's `omni-bus worker`, attached over TCP on loopback, and brought again whenever the command has ended."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from types import TracebackType
from typing import Self

import psutil

from tests.support.remote_worker import RemoteWorker, bringing


class FarWorker:
    """`async with FarWorker(base, broker, stage):`; its keys lie in `base`/keys."""

    def __init__(self, base: pathlib.Path, broker: str, stage: str) -> None:
        self.stage = stage
        self.brought = 0  # how often
        self._base = base
        self._broker = broker
        self._now = contextlib.ExitStack()
        self._over = False

    async def __aenter__(self) -> Self:
        self._command = self._bring()
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        command = self._command.process
        command.terminate()  # told, it lets go of all that it has
        try:
            await asyncio.to_thread(command.wait, 60)
        finally:
            command.kill()
            await self._keeping

    def processes(self) -> dict[str, psutil.Process]:
        """The command, and its worker while it has one."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            found["far command"] = psutil.Process(self._command.process.pid)
            for worker in self._command.workers():
                found["far worker"] = worker
        return found

    def wrongs(self) -> list[str]:
        """What no command may say."""
        said = [line for log in self._base.glob("worker-*.log") for line in log.read_text().splitlines()]
        return [line for line in said if "internal error" in line or "Traceback" in line]

    def _bring(self) -> RemoteWorker:
        self.brought += 1
        return self._now.enter_context(bringing(self._base, self._broker, stage=self.stage))

    async def _keep(self) -> None:
        """A command that finds no broker ends with code 2, so that one is brought until there is a broker."""
        while True:
            await asyncio.to_thread(self._command.process.wait)
            self._now.close()
            if self._over:
                return
            self._command = self._bring()
