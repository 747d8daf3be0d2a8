"""What a stock client saw, as JSON lines on standard output, and waiting for what it is to see."""

from __future__ import annotations

import array
import asyncio
import json
import pathlib
import time
import wave
from collections.abc import Callable
from typing import Any

LIMIT_S = 120.0  # for any one thing waited for: a machine that runs everything else as well is slow

Line = dict[str, Any]


class Seen:
    """Every line is printed at once, so that a test sees how far a client came that did not come to its end.

    A line has `at` (seconds since the start) and `type`. Audio (PCM16, 24 kHz) is kept for each item, and told of by `report_audio`.
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
        """The first line of this type from line number `since` on. Raises TimeoutError that says what was waited for."""
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

    def report_audio(self, out: pathlib.Path) -> None:
        """A line for each item that was heard, in order, and its WAV file in directory `out`."""
        for number, (item, pcm) in enumerate(self.audio.items()):
            samples = array.array("h", bytes(pcm))
            path = out / f"heard-{number}.wav"
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, 24_000, 0, "NONE", ""))
                file.writeframes(bytes(pcm))
            peak = max(map(abs, samples), default=0)
            self.add("client.audio", item_id=item, seconds=len(samples) / 24_000, peak=peak, file=path.name)


def short(event: Line) -> Line:
    """A server event without its type, its id and what is long: audio becomes its number of characters."""
    line = {key: value for key, value in event.items() if key not in ("type", "event_id")}
    if event["type"] == "response.output_audio.delta":
        line["delta"] = len(event["delta"])
    return line
