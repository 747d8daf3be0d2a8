"""Which processes of a server live and do not go on: the supervisor kills those, and so starts them again."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Awaitable, Callable, Iterable

from omni_bus.child import Child
from omni_bus.deployment import BusConfig
from omni_bus.events import Status

REATTACH_S = 2.0  # for a worker whose connection was cut to come back, before it counts as one that never will


class Liveness:
    """`say` tells the user of each kill. Silence is counted in heartbeats missed, so that a pause of our own counts as one."""

    def __init__(self, bus: BusConfig, say: Callable[[str], None]) -> None:
        self._bus = bus
        self._say = say
        self._misses = max(1, math.ceil(bus.lost_after_s / bus.heartbeat_s))
        self._absent: dict[str, asyncio.TimerHandle] = {}  # worker → its kill

    async def broker(self, broker: Child, ask: Callable[[], Awaitable[object]], again: Callable[[], None]) -> None:
        """Until it has not answered `ask` for `lost_after_s`. Its first answer waits for its start. `again`: after a miss, to ask anew."""
        await ask()
        missed = 0
        while missed < self._misses:
            try:
                async with asyncio.timeout(self._bus.heartbeat_s):
                    await ask()
            except TimeoutError:
                missed += 1
                again()
            else:
                missed = 0
                await asyncio.sleep(self._bus.heartbeat_s)
        self._kill(broker)

    async def apis(self, apis: Iterable[Child]) -> None:
        """For ever. Each of them beats while its loop goes round; one that has not begun to still starts."""
        seen = {api.name: (0, 0) for api in apis}  # beats, and how often they were as many
        while True:
            await asyncio.sleep(self._bus.heartbeat_s)
            for api in apis:
                beats, missed = seen[api.name]
                missed = missed + 1 if api.alive and api.ready and api.beats == beats else 0
                seen[api.name] = (api.beats, missed)
                if missed > self._misses:
                    self._kill(api)

    def workers(self, status: Status, workers: Iterable[Child]) -> None:
        """The broker's word on workers. One that lives, was ready, and is not with the broker for too long is killed."""
        for child in workers:
            states = [replica.state for replica in status.replicas if replica.worker == child.name and replica.pid == child.pid]
            if not (child.alive and child.ready) or (states and "lost" not in states):
                self._cancel(child.name)
            elif child.name not in self._absent:
                # To a new broker it comes when the step in hand is over; of one that was lost to this one we know less good.
                seconds = REATTACH_S if states else self._bus.loop_silence_s
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
        self._say(f"{child.name} does not answer; ending it by force")
        child.send_signal(signal.SIGKILL)
