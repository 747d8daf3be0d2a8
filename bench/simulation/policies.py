"""Ways to choose a replica, to be compared: the broker's own (`routing.choose`), and three simple ones put in its place for a run."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from omni_bus import routing
from omni_bus.registry import Registry, Replica, ReplicaState

OURS = "ours"
NAMES = (OURS, "least", "turns", "random")

Pick = Callable[[str, list[Replica]], Replica]


@contextlib.contextmanager
def in_place(name: str, seed: int) -> Iterator[None]:
    """Within the block the broker chooses by that policy."""
    if name == OURS:
        yield
        return
    pick = _pick(name, random.Random(f"{seed} {name}"))

    def choose(registry: Registry, affinity: Any, stages: tuple[str, ...], key: str, fits: Any, *_: Any, **__: Any) -> Any:
        chosen: dict[str, Replica] = {}
        for stage in stages:
            replicas = (worker.replicas.get(stage) for worker in registry)
            ready = [one for one in replicas if one is not None and one.state is ReplicaState.READY and fits(one, chosen)]
            if not ready:
                return stage
            chosen[stage] = pick(stage, ready)
        return chosen

    real = routing.choose
    routing.choose = choose
    try:
        yield
    finally:
        routing.choose = real


def _pick(name: str, draw: random.Random) -> Pick:
    if name == "random":
        return lambda stage, ready: draw.choice(ready)
    if name == "turns":
        turns: dict[str, Iterator[int]] = {}
        return lambda stage, ready: ready[next(turns.setdefault(stage, itertools.count())) % len(ready)]
    if name == "least":
        return lambda stage, ready: min(ready, key=lambda replica: replica.outstanding)
    raise ValueError(f"no policy {name!r}; there are {', '.join(NAMES)}")
