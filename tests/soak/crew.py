"""The processes of a server and of the worker brought to it from elsewhere: who is there, who is ready, and whether all are as wanted."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil

from tests.soak.far_worker import FarWorker
from tests.soak.subjects import REPLICAS
from tests.support.running_server import Server

APIS = 2
BACK_S = 240.0  # for all to be back after a round of faults
ASK_S = 2.0  # for a status; the API process that took the question may be stopped
IN_USE = ("running", "waiting", "segments_used", "held", "slots_used", "kv_blocks_used")


class Crew:
    def __init__(self, server: Server, far: FarWorker, stages: tuple[str, ...]) -> None:
        self.server = server
        self.far = far
        self.stages = stages
        self.seen: set[int] = set()  # pids of all that ever were there

    def processes(self) -> dict[str, psutil.Process]:
        """By the name under which they are struck: "broker", "api.0", "talker.1", "far worker"; the kind is what stands before the dot."""
        found = {**self.server.processes(), **self.far.processes()}
        self.seen.update(process.pid for process in found.values())
        return found

    def of_kind(self, kind: str) -> list[str]:
        return sorted(name for name in self.processes() if kind_of(name) == kind)

    def status(self) -> dict[str, Any]:
        """OSError or HTTPException while nobody answers."""
        with urllib.request.urlopen(f"{self.server.url}/v1/status", timeout=ASK_S) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def ready(self) -> dict[str, int]:
        """Who serves now, with its pid, by the names of `processes`."""
        status = self.status()
        processes = self.processes()
        found = {name: process.pid for name, process in processes.items() if kind_of(name) in ("supervisor", "broker", "api")}
        if (command := processes.get("far command")) is not None:
            found["far command"] = command.pid
        for stage in status["stages"]:
            for replica in stage["replicas"]:
                if replica["state"] == "ready":
                    found["far worker" if "@" in replica["worker"] else replica["worker"]] = replica["pid"]
        return found

    def settled(self) -> bool:
        """Every process that there is serves, whichever number of replicas the stages have."""
        status, processes = self.status(), self.processes()
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        if not status["ready"] or any(replica["state"] != "ready" for replica in replicas):
            return False
        serving = {"far worker" if "@" in replica["worker"] else replica["worker"]: replica["pid"] for replica in replicas}
        others = {"supervisor", "broker", "far command", *(f"api.{number}" for number in range(APIS))}
        if set(serving) | others != set(processes) or "far worker" not in serving:
            return False
        return all(processes[name].pid == pid for name, pid in serving.items())

    def whole(self) -> bool:
        """The same, with as many replicas as there were at first."""
        return not self.not_as_wanted() and self.settled()

    def not_as_wanted(self) -> list[str]:
        """Stages that have more or fewer replicas here than at first."""
        return [stage for stage in self.stages if len(self.of_kind(stage)) != REPLICAS]

    def idle(self) -> bool:
        """Nothing is held for any request."""
        status = self.status()
        loads = [replica["load"] or {} for stage in status["stages"] for replica in stage["replicas"]]
        return not any(status["requests"].values()) and not any(load.get(key, 1) for load in loads for key in IN_USE)


def kind_of(name: str) -> str:
    return name.partition(".")[0]


async def until(check: Callable[[], bool], what: str) -> None:
    """Wait for what `check` says, which asks the server over HTTP; nothing tells us of it."""
    end = time.monotonic() + BACK_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException, psutil.NoSuchProcess):
            if await asyncio.to_thread(check):
                return
        assert time.monotonic() < end, f"not within {BACK_S:g} s: {what}"
        await asyncio.sleep(0.2)
