"""Which processes of a server live and do not go on: the supervisor kills those, and so starts them again."""

from __future__ import annotations

import asyncio
import math
import operator
import pathlib
import signal
from collections.abc import Awaitable, Callable, Iterable

from omni_bus.child import Child
from omni_bus.deployment import BusConfig
from omni_bus.events import Status

BEATS = 8  # looks at a broker that does not answer, until it counts as lost
HELD = 3  # of them at which it was stopped, in a row: then it cannot answer, and is not waited for
LOOK_S = 1.0  # from one answer of the broker to the next question, at most
REATTACH_S = 2.0  # for a worker whose connection was cut to come back, before it counts as one that never will


class Liveness:
    """`say` tells the user of each kill, with the child as `name` has it. Silence is counted in heartbeats missed, so that a
    pause of our own counts as one.
    """

    def __init__(
        self, bus: BusConfig, say: Callable[[str], None], name: Callable[[Child], str] = operator.attrgetter("name")
    ) -> None:
        self._bus = bus
        self._say = say
        self._name = name
        self._misses = max(1, math.ceil(bus.lost_after_s / bus.heartbeat_s))
        self._absent: dict[str, asyncio.TimerHandle] = {}  # worker → its kill

    async def broker(self, broker: Child, ask: Callable[[], Awaitable[object]], again: Callable[[], None]) -> None:
        """Until it has not answered `ask` for `broker_lost_after_s`, or was seen to be stopped. Its first answer waits for its start, for
        `load_s` at most. `again`: to ask anew, since a question may be lost with its connection.
        """
        beat = self._bus.broker_lost_after_s / BEATS
        missed = held = 0
        first, question = True, asyncio.ensure_future(ask())
        try:
            while missed < BEATS and held < HELD:
                await asyncio.wait({question}, timeout=(self._bus.load_s or None) if first else beat)
                if question.done():
                    question.result()
                    first, missed, held = False, 0, 0
                    await asyncio.sleep(min(self._bus.heartbeat_s, LOOK_S))
                    question = asyncio.ensure_future(ask())
                    continue
                missed = BEATS if first else missed + 1
                held = held + 1 if _stopped(broker.pid) else 0
                if missed == BEATS // 2:
                    question.cancel()
                    again()
                    question = asyncio.ensure_future(ask())
        finally:
            question.cancel()
        self._kill(broker)

    async def standing_still(self, children: Callable[[], Iterable[Child]], beating: Iterable[Child]) -> None:
        """For ever: whoever is stopped, even while it starts, and of `beating` who is ready and sends no beat, or does not become ready."""
        beaters = {child.name for child in beating}
        seen: dict[str, tuple[int, int]] = {}  # beats, and how often in a row it stood still
        while True:
            await asyncio.sleep(self._bus.heartbeat_s)
            for child in children():
                beats, missed = seen.get(child.name, (0, 0))
                silent = child.name in beaters and child.ready and child.beats == beats
                missed = missed + 1 if child.alive and (silent or _stopped(child.pid)) else 0
                begins = child.name in beaters and child.alive and not child.ready
                if missed > self._misses or (begins and 0 < self._bus.load_s < child.age_s):
                    self._kill(child)
                    missed = 0
                seen[child.name] = (child.beats, missed)

    def workers(self, status: Status, workers: Iterable[Child]) -> None:
        """The broker's word on workers. One that lives, was ready, and is not with the broker for too long is killed."""
        for child in workers:
            states = states_of(status, child)
            # Of several workers in a process that is drained each leaves when what it holds has ended.
            there = any(states) if child.leaving else all(states)
            lost = any("lost" in found for found in states)
            if not (child.alive and child.ready) or (there and not lost):
                self._cancel(child.name)
            elif child.name not in self._absent:
                # To a new broker it comes when the step in hand is over; of one that was lost to this one we know less good.
                seconds = REATTACH_S if lost else self._bus.loop_silence_s
                self._absent[child.name] = asyncio.get_running_loop().call_later(seconds, self._give_up, child, child.pid)

    def close(self) -> None:
        for name in list(self._absent):
            self._cancel(name)

    def _cancel(self, name: str) -> None:
        timer = self._absent.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, child: Child, pid: int) -> None:
        del self._absent[child.name]
        if child.alive and child.pid == pid:
            self._kill(child)

    def _kill(self, child: Child) -> None:
        self._say(f"{self._name(child)} does not answer; ending it by force")
        child.send_signal(signal.SIGKILL)


def states_of(status: Status, child: Child) -> list[list[str]]:
    """For each worker of the process that runs now: the states of its replicas at the broker, none where it is not there."""
    return [
        [replica.state for replica in status.replicas if replica.worker == worker and replica.pid == child.pid]
        for worker in child.workers
    ]


def _stopped(pid: int) -> bool:
    """Whether the process is held by a signal or a tracer. False where the system does not tell."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False
