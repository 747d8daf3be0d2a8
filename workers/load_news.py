"""When a worker's load is news: it has changed so much since it was last told that the next request might better go elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from omni_bus.events import StageLoad

LOOK_S = 0.05  # after something happened, until the load is looked at: many events are one piece of news
STEPS = 0.5  # of queued work, more or less
KV = 1 / 16  # of the KV blocks, more or less
BUSY_S = 0.25  # of work for listeners: the broker learns from it how many more of them the stage can carry


class LoadNews:
    def __init__(self) -> None:
        self._told: Sequence[StageLoad] = ()

    def told(self, loads: Sequence[StageLoad]) -> None:
        """The broker has been sent these."""
        self._told = loads

    def is_news(self, loads: Sequence[StageLoad]) -> bool:
        """Whether they are worth an event of their own."""
        if len(loads) != len(self._told):
            return True
        return any(_differs(now, before) for now, before in zip(loads, self._told, strict=True))


def _differs(now: StageLoad, before: StageLoad) -> bool:
    if bool(now.waiting) != bool(before.waiting) or bool(now.queued) != bool(before.queued):
        return True
    if now.per_step and abs(now.queued - before.queued) >= STEPS * now.per_step:
        return True
    if (now.lead_s is None) != (before.lead_s is None) or (now.lead_s or 0.0) < 0.0 <= (before.lead_s or 0.0):
        return True
    if now.streams and now.busy_s - before.busy_s >= BUSY_S:
        return True
    changed = abs(now.kv_blocks_used - before.kv_blocks_used)
    return bool(changed) and changed >= KV * now.kv_blocks_total
