"""Which replicas served a session last: they hold its KV blocks and what else they keep by content. No I/O, no clock."""

from __future__ import annotations

import collections

from omni_bus.registry import Replica

MAX_KEYS = 4096  # sessions remembered; the one that was used least recently goes first

Process = tuple[str, int]  # a worker's name and pid: one that was started again holds nothing


class Affinity:
    """Bounded: what is forgotten costs time, never an answer."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._by_key: collections.OrderedDict[str, dict[str, Process]] = collections.OrderedDict()
        self._held: collections.Counter[tuple[str, Process]] = collections.Counter()  # (stage, process) → sessions

    def __len__(self) -> int:
        return len(self._by_key)

    def holds(self, key: str, replica: Replica) -> bool:
        """Whether the replica served that session last."""
        return bool(key) and self._by_key.get(key, {}).get(replica.stage) == _process(replica)

    def held(self, replica: Replica) -> int:
        """Sessions that the replica served last."""
        return self._held[replica.stage, _process(replica)]

    def note(self, key: str, bindings: dict[str, Replica]) -> None:
        """A request of that session was bound so."""
        if not key:
            return
        stages = self._by_key.pop(key, {})
        for stage, replica in bindings.items():
            self._forget(stage, stages.get(stage))
            stages[stage] = _process(replica)
            self._held[stage, stages[stage]] += 1
        self._by_key[key] = stages
        while len(self._by_key) > self._max_keys:
            _, oldest = self._by_key.popitem(last=False)
            for stage, process in oldest.items():
                self._forget(stage, process)

    def _forget(self, stage: str, process: Process | None) -> None:
        if process is not None:
            self._held[stage, process] -= 1
            if not self._held[stage, process]:
                del self._held[stage, process]


def _process(replica: Replica) -> Process:
    return replica.worker.name, replica.worker.pid
