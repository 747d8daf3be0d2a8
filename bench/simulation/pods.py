"""How many pods so many listeners need: one pod is one broker and the sets of stages that it can keep busy."""

from __future__ import annotations

import dataclasses
import math

SAFE = 0.7  # of what broker and sets carry at their limit, which is what a pod is given


@dataclasses.dataclass(frozen=True, slots=True)
class Pods:
    """listeners: of whom each hears an answer now."""

    listeners: int
    events_per_listener_s: float  # that the broker takes in for one who listens
    by_broker: int  # listeners that one broker carries
    by_set: int  # listeners that one set of stages carries
    sets: int  # in a pod: as many as its broker can keep busy
    a_pod: int  # listeners
    pods: int
    all_sets: int


def pods(listeners: int, *, events_per_audio_s: float, event_us: float, set_audio_s_per_s: float) -> Pods:
    """events_per_audio_s: broker events for a second of audio, from a simulated run; set_audio_s_per_s: what one set makes at most."""
    by_broker = int(SAFE * 1e6 / event_us / events_per_audio_s)
    by_set = int(SAFE * set_audio_s_per_s)
    if by_broker < 1 or by_set < 1:
        raise ValueError("a pod carries no listener at all with these figures")
    sets = max(1, by_broker // by_set)
    a_pod = min(by_broker, sets * by_set)
    count = math.ceil(listeners / a_pod)
    return Pods(listeners, events_per_audio_s, by_broker, by_set, sets, a_pod, count, count * sets)


def told(found: Pods) -> str:
    """The arithmetic, in one paragraph."""
    return (
        f"{found.listeners:,} who listen at the same time: a second of audio costs {found.events_per_listener_s:.1f} broker events, so one broker "
        f"at {SAFE:.0%} of its core carries {found.by_broker:,}; one set of stages at {SAFE:.0%} of its peak carries {found.by_set:,}; "
        f"a pod has {found.sets} set{'s' * (found.sets > 1)} and {found.a_pod:,} listeners; {found.pods:,} pods, {found.all_sets:,} sets."
    )
