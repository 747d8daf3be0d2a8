"""Which ends of requests a soak does not explain, how soon each fault was healed, and what listeners heard who were not hit."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
from collections.abc import Sequence

import psutil

from omni_bus.speech_stream import underrun_s
from tests.soak.crew import Crew
from tests.soak.strikes import ENDS_ITS_PROCESS, REMEMBERED_S, Fault
from tests.support.steady_load import SteadyLoad, Stream

LOOK_S = 0.25  # between two looks at who serves


def unexplained(load: SteadyLoad, faults: Sequence[Fault]) -> list[str]:
    """In words: streams without an end, and ends that no fault before them explains."""
    found = [f"a stream of place {stream.place} never ended" for stream in load.streams if not stream.end]
    for stream in load.streams:
        if stream.end in ("", "done"):
            continue
        near = [fault for fault in faults if stream.began - REMEMBERED_S < fault.at < stream.ended]
        if not any(fault.explains(stream.end) for fault in near):
            found.append(f"a stream of place {stream.place} ended as {stream.end}, and no fault explains it")
    return found


class Watch:
    """`async with Watch(crew, faults):` notes when another process served in the place of one that a fault had ended."""

    def __init__(self, crew: Crew, faults: list[Fault]) -> None:
        self._crew = crew
        self._faults = faults

    async def __aenter__(self) -> Watch:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._looking

    async def _look(self) -> None:
        while True:
            asked = time.monotonic()
            with contextlib.suppress(OSError, http.client.HTTPException, psutil.NoSuchProcess):
                ready = await asyncio.to_thread(self._crew.ready)
                for fault in self._faults:
                    pid = ready.get(fault.victim) if fault.way in ENDS_ITS_PROCESS else None
                    if fault.back_s is None and fault.at < asked and pid not in (None, fault.pid):
                        fault.back_s = time.monotonic() - fault.at
            await asyncio.sleep(LOOK_S)


def note_service(faults: Sequence[Fault], streams: Sequence[Stream], places: int) -> None:
    """`served_s` of each fault, from what streams began behind it."""
    for fault in faults:
        first: dict[int, float] = {}
        for stream in streams:
            if stream.end == "done" and stream.began > fault.at:
                first[stream.place] = min(stream.ended, first.get(stream.place, stream.ended))
        if len(first) == places:
            fault.served_s = max(first.values()) - fault.at


def gaps_ms(heard: Sequence[tuple[Stream, list[tuple[float, float]]]]) -> list[float]:
    """Silence within each answer, as it was heard by who plays it from its first packet on."""
    return [1e3 * underrun_s(packets) for _, packets in heard]
