"""Operators beside the faults: a stage is scaled, drained and restarted by the commands that they have, and brought back to its replicas."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import sys
import time

from tests.soak.crew import BACK_S, Crew
from tests.soak.subjects import REPLICAS

ENDS = {0, 1, 2}  # exit codes: done; not done, because something died; refused, because of what there was at that moment


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    command: str
    code: int
    seconds: float
    said: str  # its last line


class Operators:
    def __init__(self, crew: Crew, draw: random.Random) -> None:
        self.commands: list[Done] = []
        self._crew = crew
        self._draw = draw

    async def beside(self) -> None:
        """One command, while faults go on."""
        stage = self._draw.choice(self._crew.stages)
        what = self._draw.choice(("more", "fewer", "drain", "restart"))
        which = self._draw.random()
        names = self._crew.of_kind(stage)
        if what == "drain" and names:
            await self._command("drain", names[int(which * len(names))].replace(".", "/"))
        elif what == "restart":
            await self._command("restart", "--rolling", stage)
        else:
            await self._command("scale", stage, str(REPLICAS + 1 if what == "more" else REPLICAS - 1))

    def some_stage(self) -> str:
        return self._draw.choice(self._crew.stages)

    async def restart(self, stage: str) -> None:
        """Every worker of a stage, "" of all, is replaced, under load and without a fault: nobody may notice."""
        limit = BACK_S if stage else BACK_S * len(self._crew.stages)  # one worker after the other, each with its drain
        assert await self._command("restart", "--rolling", *filter(None, [stage]), limit=limit) == 0, self.commands[-1]

    async def as_wanted(self) -> None:
        """Every stage has its replicas again."""
        for stage in self._crew.stages:
            if stage in self._crew.not_as_wanted():
                assert await self._command("scale", stage, str(REPLICAS)) == 0, self.commands[-1]

    async def _command(self, *arguments: str, limit: float = BACK_S) -> int:
        base = str(self._crew.server.run_base)
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "omni_bus", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "XDG_RUNTIME_DIR": base, "TMPDIR": base, "OMNI_BUS_URL": ""},
        )
        try:
            async with asyncio.timeout(limit):
                out, wrong = (each.decode().strip() for each in await process.communicate())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        said = ((wrong or out).splitlines() or [""])[-1]
        code = process.returncode or 0
        self.commands.append(Done(" ".join(arguments), code, round(time.monotonic() - began, 1), said))
        print(f"omni-bus {' '.join(arguments)}: {code}, {said}", flush=True)
        assert code in ENDS and "Traceback" not in wrong and "internal error" not in wrong, wrong
        return code
