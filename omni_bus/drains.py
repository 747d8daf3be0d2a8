"""Workers that are given nothing new, and leave when what is bound to them has ended or its time is over. No I/O, no clock."""

from __future__ import annotations

from omni_bus.registry import Worker


class Drains:
    def __init__(self) -> None:
        self._until: dict[bytes, tuple[Worker, float]] = {}

    def __bool__(self) -> bool:
        """Whether any worker is drained: asked at every event."""
        return bool(self._until)

    def begin(self, worker: Worker, until: float) -> None:
        """A second drain of the same process can only make it sooner."""
        known = self._until.get(worker.peer)
        if known is not None and known[0] is worker:
            until = min(until, known[1])
        self._until[worker.peer] = worker, until

    def next(self) -> float | None:
        """When the first of them has had its time."""
        return min((until for _, until in self._until.values()), default=None)

    def take_over(self, now: float) -> tuple[list[Worker], list[Worker]]:
        """Those that hold nothing any more, and those whose time is over though they do; both are none of ours from here on."""
        idle, late = [], []
        for worker, until in list(self._until.values()):
            if not worker.requests:
                idle.append(worker)
            elif now >= until:
                late.append(worker)
            else:
                continue
            del self._until[worker.peer]
        return idle, late
