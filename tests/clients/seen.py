"""What a stock client saw, as JSON lines on standard output, and waiting for what it is to see."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 120.0  # for any one thing waited for: a machine that runs everything else as well is slow

Line = dict[str, Any]


class Seen:
    """Every line is printed at once, so that a test sees how far a client came that did not come to its end.

    A line has `at` (seconds since the start) and `type`. Audio goes to one list for each item, never into a line.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._changed = asyncio.Event()
        self.lines: list[Line] = []
        self.audio: dict[str, bytearray] = {}

    def add(self, kind: str, **fields: Any) -> None:
        line = {"at": round(time.monotonic() - self._began, 3), "type": kind, **fields}
        self.lines.append(line)
        print(json.dumps(line, ensure_ascii=False), flush=True)
        self._changed.set()

    def hear(self, item: str, pcm: bytes) -> None:
        self.audio.setdefault(item, bytearray()).extend(pcm)

    async def until(self, kind: str, since: int = 0, where: Callable[[Line], bool] = lambda line: True) -> Line:
        """The first line of this type after line number `since`. Raises TimeoutError that says what was waited for."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    for line in self.lines[since:]:
                        if line["type"] == kind and where(line):
                            return line
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"{kind} did not come within {LIMIT_S:.0f} s") from None

    @property
    def count(self) -> int:
        return len(self.lines)


def short(event: Line) -> Line:
    """A server event without what is long: audio becomes its number of characters."""
    line = {key: value for key, value in event.items() if key not in ("type", "event_id")}
    if event["type"] == "response.output_audio.delta":
        line["delta"] = len(event["delta"])
    return line
