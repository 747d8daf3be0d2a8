"""Which of a stage's ready replicas gets a request: the one where it costs least. No I/O, no clock.

The cost of a replica is a sum, in full batches of work ahead of the request:

    (open requests + steps of queued work) / capacity    the requests are counted here, the queue is what the worker last pushed
    + 1     where less than a sixteenth of its KV blocks is free: the request would wait for room
    + 1     where a listener has no audio left to play, and less the more there is, to none at 0.2 s of smallest playback lead
    + 0.25  where it runs on another host than the stage before it: its tensors would cross the network
    - 0.5   where it served the session's last request: it holds the KV blocks of what was said so far

So a session returns to its replica unless that one is busier than another by half a batch. Of equal costs: the process that is
chosen already (tensors need no copy), fewer unread chunks, fewer sessions held, the lower number.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_bus.affinity import Affinity
from omni_bus.registry import Registry, Replica

FULL = 1.0
OTHER_HOST = 0.25
HOLDS_SESSION = 0.5
FREE_KV = 1 / 16
SAFE_LEAD_S = 0.2  # of playback; less, and one more stream may bring an underrun


def pressure(replica: Replica) -> float:
    """Work ahead of a new request, in full batches."""
    load = replica.load
    steps = load.queued / load.per_step if load is not None and load.per_step else 0.0
    full = load is not None and load.kv_blocks_used > (1 - FREE_KV) * load.kv_blocks_total
    return (replica.outstanding + steps) / max(1, replica.capacity) + FULL * full


def strain(replica: Replica) -> float:
    """How near its listeners are to an underrun, from 0 to 1."""
    lead = replica.load.lead_s if replica.load is not None else None
    return 0.0 if lead is None else min(max(1.0 - lead / SAFE_LEAD_S, 0.0), 1.0)


def choose(
    registry: Registry,
    affinity: Affinity,
    stages: tuple[str, ...],
    key: str,
    fits: Callable[[Replica, dict[str, Replica]], bool],
) -> dict[str, Replica] | str:
    """A ready replica of each stage that `fits` those chosen before it, or the stage that has none. key: the session's, or ""."""
    chosen: dict[str, Replica] = {}
    before: Replica | None = None
    for stage in stages:
        candidates = [replica for replica in registry.ready_replicas(stage) if fits(replica, chosen)]
        if not candidates:
            return stage
        before = chosen[stage] = min(candidates, key=lambda replica: _order(replica, before, chosen, affinity, key))
    return chosen


def _order(
    replica: Replica, before: Replica | None, chosen: dict[str, Replica], affinity: Affinity, key: str
) -> tuple[float, bool, int, int, int, str]:
    worker = replica.worker
    elsewhere = before is not None and before.worker.machine != worker.machine
    cost = pressure(replica) + strain(replica) + OTHER_HOST * elsewhere - HOLDS_SESSION * affinity.holds(key, replica)
    apart = all(other.worker is not worker for other in chosen.values())
    return cost, apart, replica.unread, affinity.held(replica) if key else 0, worker.number, worker.name
