"""docs/failures.md on the tiny Qwen3-Omni, row by row: one process goes in one way under 16 streams, and the others lose nothing.

What "nothing" is, is measured: every text and every sample is that of a run without failures, and no silence is added. The last holds
by construction, as a stream waits for nobody but the replicas that it is bound to; see `allowed_s`.
"""

from __future__ import annotations

import asyncio
import base64
import pathlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator

import numpy as np
import pytest

from tests.soak.strikes import INSIDE
from tests.support.chat_http import wav
from tests.support.one_struck import (
    ENDS_IN,
    ENDS_ITS_PROCESS,
    FAILED,
    NO_MEMORY,
    died_by,
    held,
    no_shared_memory,
    open_requests,
    pids,
    run_again,
    segments_of,
    settled,
    strike,
    until_open,
)
from tests.support.qwen3_omni import png
from tests.support.running_server import Server, running
from tests.support.sixteen_streams import PLACES, SPEAKERS, TEXT_ONLY, Heard, Sixteen, Undisturbed
from tests.support.steady_load import BROKEN

REPLICAS = {"processor": 1, "thinker": 2, "talker": 2, "code2wav": 2}
WORKERS = [f"{stage}.{number}" for stage, count in REPLICAS.items() for number in range(count)]
NAMES = frozenset({"supervisor", "broker", "api.0", "api.1", *WORKERS})
LOST_AFTER_S, STEP_S = 5.0, 6.0
PAUSE_S = LOST_AFTER_S / 2
# A worker that is gone comes back when those whom it leaves alone have ended on an idle machine: its start takes a core of them.
RESTART_S = 2.0
IN_PLACE = ("raise", "no memory", "cut")


@pytest.fixture(scope="module")
def module_server(omni_checkpoint: pathlib.Path) -> Iterator[Server]:
    """Code2Wav in float64, so that PCM16 does not depend on who shares a batch."""
    sets = [f"model.path={omni_checkpoint}", "model.name=tiny", "stages.code2wav.dtype=float64", "api.processes=2"]
    sets += ["bus.heartbeat_s=0.5", f"bus.lost_after_s={LOST_AFTER_S}", f"bus.step_s={STEP_S}"]
    sets += [f"bus.restart_backoff_s={RESTART_S}"]
    sets += [f"stages.{stage}.{key}" for stage, count in REPLICAS.items() for key in ("threads=1", f"replicas={count}")]
    with running("qwen3_omni_tiny.toml", sets=sets, env={"PYTHONPATH": str(INSIDE)}) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(module_server: Server) -> Undisturbed:
    """Of two runs: in the first, each process does everything for its first time."""
    found = Undisturbed()
    for _ in range(2):
        asyncio.run(found.run(module_server))
    assert all(len(each.pcm) > 2 * 12000 for each in found.heard if each.place in SPEAKERS)
    return found


@pytest.fixture
async def server(module_server: Server) -> AsyncIterator[Server]:
    """Every test begins with all there, and must leave nothing of its requests behind."""
    await settled(module_server, NAMES)
    yield module_server
    await settled(module_server, NAMES)


def allowed_s(undisturbed: Undisturbed, outage_s: float = 0.0) -> float:
    """Silence in a stream that the victim does not serve. On a slow machine there is more of it, with a failure or without, so it is
    measured against what this machine does: the worst without one, and the time for which the victim was away in this run. Who waits
    for a victim waits for all of that time, less what was left to play; a machine on which all is slower is slower to start it again.
    """
    return max(2 * undisturbed.underrun_s, outage_s / 2)


def stage_of(worker: str) -> str:
    return worker.partition(".")[0]


def ends(heard: Iterable[Heard]) -> set[str]:
    return {each.end for each in heard}


async def struck(server: Server, undisturbed: Undisturbed, victim: str, way: str) -> None:
    """The victim is one of two replicas, and each has begun with what it has: the requests on it end by name, and no others."""
    stage = stage_of(victim)
    [other] = [worker for worker in WORKERS if stage_of(worker) == stage and worker != victim]
    users = PLACES if stage == "thinker" else SPEAKERS
    before = pids(server)
    async with Sixteen(server) as streams:
        streams.begin()
        await streams.until(Heard.has_begun if stage == "thinker" else Heard.is_heard)
        there = await open_requests(server)
        at = time.monotonic()
        strike(server.processes()[victim], way)
    await settled(server, NAMES)
    outage_s = time.monotonic() - at if way in ENDS_ITS_PROCESS else 0.0

    undisturbed.check(streams.heard)
    lost = [each for each in streams.heard if each.end != "done"]
    assert ends(lost) == {ENDS_IN[way]}, "there were streams on it, and each was told by name"
    assert {each.place for each in lost} <= set(users), "a text needs neither Talker nor Code2Wav"
    assert there[other] >= 1 and len(lost) <= len(users) - there[other], "those on the other replica lose nothing"
    spared = [each.underrun_s for each in streams.heard if each.end == "done"]
    assert max(spared) <= allowed_s(undisturbed, outage_s)
    after = pids(server)
    assert {name for name in NAMES if before[name] != after[name]} == ({victim} if way in ENDS_ITS_PROCESS else set())
    assert died_by(server, victim, way)


@pytest.mark.parametrize("victim", ["thinker.0", "talker.0", "code2wav.0"])
async def test_what_fails_in_place_costs_its_own_requests_and_no_process(
    server: Server, undisturbed: Undisturbed, victim: str
) -> None:
    for way in IN_PLACE:
        await struck(server, undisturbed, victim, way)
    await undisturbed.run(server)


@pytest.mark.parametrize(
    ("victim", "way"),
    [
        ("talker.0", "kill"),
        ("code2wav.0", "hang"),
        ("thinker.0", "kill"),
        ("talker.1", "stop"),
        ("code2wav.1", "kill"),
        ("thinker.1", "hang"),
    ],
)
async def test_a_worker_that_ends_costs_its_own_requests(
    server: Server, undisturbed: Undisturbed, victim: str, way: str
) -> None:
    await struck(server, undisturbed, victim, way)
    await undisturbed.run(server)


async def test_who_is_bound_to_it_waits_for_a_worker_that_pauses_and_nobody_else(
    server: Server, undisturbed: Undisturbed
) -> None:
    """What the other tests rely on: a stream that did wait for another's replica would be told by its silence."""
    async with Sixteen(server) as streams:
        streams.begin()
        await streams.until(Heard.is_heard)
        there = await open_requests(server)
        with held(server, ["talker.1"]):
            await asyncio.sleep(PAUSE_S)
    undisturbed.check(streams.heard)
    assert ends(streams.heard) == {"done"}
    silences = sorted(streams.heard[place].underrun_s for place in SPEAKERS)
    assert min(there["talker.0"], there["talker.1"]) >= 1
    assert silences[there["talker.0"] - 1] <= allowed_s(undisturbed, PAUSE_S)
    assert all(silence > PAUSE_S / 2 for silence in silences[len(SPEAKERS) - there["talker.1"] :])


@pytest.mark.parametrize(("victim", "way"), [("thinker.0", "kill"), ("talker.0", "cut"), ("code2wav.0", "kill")])
async def test_what_has_sent_nothing_runs_again_on_another_replica(
    server: Server, undisturbed: Undisturbed, victim: str, way: str
) -> None:
    stage, again = stage_of(victim), run_again(server)
    [other] = [worker for worker in WORKERS if stage_of(worker) == stage and worker != victim]
    users = PLACES if stage == "thinker" else SPEAKERS
    before = ["processor.0"] if stage == "thinker" else ["thinker.0", "thinker.1"]
    async with Sixteen(server) as streams:
        with held(server, before):  # so that nothing can leave
            streams.begin()
            there = await until_open(server, [victim, other], len(users))
            strike(server.processes()[victim], way)
            await until_open(server, [other], len(users))
    assert ends(streams.heard) == {"done"}
    undisturbed.check(streams.heard)
    await settled(server, NAMES)
    assert there[victim] >= 1 and run_again(server) - again == there[victim]


@pytest.mark.parametrize("way", ["kill", "stop", "hang", *IN_PLACE])
async def test_who_has_passed_the_processor_loses_nothing_with_it(server: Server, undisturbed: Undisturbed, way: str) -> None:
    """Half of the streams have; the others have sent nothing yet, and run again once it is back, unless they are what failed."""
    passed, others = PLACES[:8], PLACES[8:]
    before, again = pids(server), run_again(server)
    async with Sixteen(server) as streams:
        streams.begin(passed)
        await streams.until(Heard.is_heard, passed)
        with held(server, ["processor.0"] if way != "stop" else []):
            if way == "stop":
                strike(server.processes()["processor.0"], way)
            streams.begin(others)
            await until_open(server, ["processor.0"], len(others))
            at = time.monotonic()
            if way != "stop":
                strike(server.processes()["processor.0"], way)
    await settled(server, NAMES)
    outage_s = time.monotonic() - at if way in ENDS_ITS_PROCESS else 0.0

    undisturbed.check(streams.heard)
    assert ends(streams.heard[place] for place in passed) == {"done"}
    assert max(streams.heard[place].underrun_s for place in passed) <= allowed_s(undisturbed, outage_s)
    if way in ("raise", "no memory"):
        lost = [each for each in streams.heard if each.end != "done"]
        assert ends(lost) == {ENDS_IN[way]} and not any(each.text for each in lost)
    else:
        assert ends(streams.heard) == {"done"} and run_again(server) - again == len(others)
    after = pids(server)
    assert {name for name in NAMES if before[name] != after[name]} == ({"processor.0"} if way in ENDS_ITS_PROCESS else set())
    assert died_by(server, "processor.0", way)
