"""Start-up progress: a line per stage, redrawn in place on a terminal, written out at each step elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TextIO

from omni_bus.events import ReplicaStatus, Status

BAR = 20
STEP = 0.25  # between two lines of a stage that are written out


class Progress:
    """Draws what Status says of each stage until `close`."""

    def __init__(self, stages: Sequence[str], stream: TextIO) -> None:
        self._stages = tuple(stages)
        self._stream = stream
        self._redraws = stream.isatty()
        self._drawn = 0
        self._last: dict[str, tuple[str, str, int]] = {}
        self._lines: list[str] = []
        self._open = True

    def show(self, status: Status) -> None:
        if not self._open:
            return
        slowest = {stage: _slowest([r for r in status.replicas if r.stage == stage]) for stage in self._stages}
        if self._redraws:
            self._lines = [_line(stage, replica, bar=True) for stage, replica in slowest.items()]
            self._redraw()
            return
        for stage, replica in slowest.items():
            if replica is not None and self._last.get(stage) != (
                now := (replica.state, replica.detail, int(replica.progress / STEP))
            ):
                self._last[stage] = now
                self._write(f"omni-bus: {_line(stage, replica, bar=False)}\n")

    def say(self, line: str) -> None:
        """A line of its own, above the bars."""
        self._erase()
        self._write(f"{line}\n")
        self._redraw()

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._open = False
        self._drawn = 0
        self._lines = []

    def _redraw(self) -> None:
        if self._redraws and self._open:
            self._erase()
            width = shutil.get_terminal_size().columns
            self._write("".join(f"{line[: width - 1]}\n" for line in self._lines))
            self._drawn = len(self._lines)

    def _erase(self) -> None:
        if self._drawn:
            self._write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _slowest(replicas: Sequence[ReplicaStatus]) -> ReplicaStatus | None:
    return min(replicas, key=lambda replica: (replica.state == "ready", replica.progress), default=None)


def _line(stage: str, replica: ReplicaStatus | None, *, bar: bool) -> str:
    if replica is None:
        return f"{stage:<12} starting"
    done = 1.0 if replica.state == "ready" else replica.progress
    filled = int(done * BAR)
    drawn = f" [{'#' * filled}{'.' * (BAR - filled)}]" if bar else ""
    percent = f" {done:4.0%}" if replica.state in ("loading", "ready") else ""
    return f"{stage:<12} {replica.state:<8}{drawn}{percent}  {replica.detail}".rstrip()
