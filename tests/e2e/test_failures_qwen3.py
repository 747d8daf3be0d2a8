"""docs/failures.md on the tiny Qwen3-Omni, row by row: one process goes in one way under 16 streams, and the others lose nothing.

"Nothing" is measured: every text and every sample is that of a run in which nothing fails, and nobody waits for longer (`allowed_s`).
"""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from tests.soak.strikes import INSIDE
from tests.support.one_struck import (
    ENDS_IN,
    ENDS_ITS_PROCESS,
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
from tests.support.running_server import Server, running
from tests.support.sixteen_streams import (
    HALVES,
    PLACES,
    SPEAKERS,
    Heard,
    Sixteen,
    Undisturbed,
    ends,
    longest_silence_s,
    lost,
    picture,
    sound,
)
from tests.support.steady_load import BROKEN

REPLICAS = {"processor": 1, "thinker": 2, "talker": 2, "code2wav": 2}
WORKERS = [f"{stage}.{number}" for stage, count in REPLICAS.items() for number in range(count)]
APIS = ("api.0", "api.1")
NAMES = frozenset({"supervisor", "broker", *APIS, *WORKERS})
LOST_AFTER_S, STEP_S = 5.0, 5.0
PAUSE_S = 3.0
ABOUT_MEDIA = range(4, 8)  # places


@pytest.fixture(scope="module")
def module_server(omni_checkpoint: pathlib.Path) -> Iterator[Server]:
    """Code2Wav in float64, so that PCM16 does not depend on who shares a batch."""
    sets = [f"model.path={omni_checkpoint}", "model.name=tiny", "stages.code2wav.dtype=float64", f"api.processes={len(APIS)}"]
    sets += ["bus.heartbeat_s=0.5", f"bus.lost_after_s={LOST_AFTER_S}", f"bus.step_s={STEP_S}", "bus.restart_backoff_s=0.5"]
    sets += [f"stages.{stage}.{key}" for stage, count in REPLICAS.items() for key in ("threads=1", f"replicas={count}")]
    with running("qwen3_omni_tiny.toml", sets=sets, env={"PYTHONPATH": str(INSIDE)}) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(module_server: Server) -> Undisturbed:
    found = Undisturbed()
    for halves in (False, True):
        asyncio.run(found.run(module_server, halves=halves))
    return found


@pytest.fixture
async def server(module_server: Server) -> AsyncIterator[Server]:
    """Every test begins with all there, and must leave nothing of its requests behind."""
    await settled(module_server, NAMES)
    yield module_server
    await settled(module_server, NAMES)


def allowed_s(undisturbed: Undisturbed, outage_s: float = LOST_AFTER_S) -> float:
    """The longest underrun that a stream may have which the victim does not serve.

    Such a stream waits for nobody but the replicas that it is bound to. Who does wait for a victim has nothing to play for all the time
    that it is away (`outage_s`, as it was in this run), less what was left to play: `test_who_is_bound_…` shows both. Without an outage
    it is the shortest time for which this server waits for anybody. A slow machine has underruns of its own, so twice the worst of them
    is allowed, too; and where all is slower, so is the victim's new start, with which it comes back.
    """
    return max(2 * undisturbed.silence_s, outage_s / 2)


def stage_of(worker: str) -> str:
    return worker.partition(".")[0]


def other_than(victim: str) -> str:
    [other] = [worker for worker in WORKERS if stage_of(worker) == stage_of(victim) and worker != victim]
    return other


def users_of(worker: str) -> Sequence[int]:
    """Places: a text needs neither Talker nor Code2Wav."""
    return PLACES if stage_of(worker) in ("processor", "thinker") else SPEAKERS


def changed(server: Server, before: dict[str, int]) -> set[str]:
    after = pids(server)
    return {name for name in NAMES if before[name] != after[name]}


async def struck(server: Server, undisturbed: Undisturbed, victim: str, way: str, also: tuple[str, ...] = ()) -> None:
    """One of two replicas goes when all have begun with what it has: the requests on it end by name, and no others. `also` goes at the
    same time, and costs nobody anything."""
    before = pids(server)
    async with Sixteen(server) as streams:
        streams.begin()
        await streams.until(Heard.has_begun if stage_of(victim) == "thinker" else Heard.is_heard)
        there = await asyncio.to_thread(open_requests, server)
        at = time.monotonic()
        for name in (victim, *also):
            strike(server.processes()[name], way)
    await settled(server, NAMES)
    outage_s = time.monotonic() - at if way in ENDS_ITS_PROCESS else LOST_AFTER_S

    undisturbed.check(streams.heard)
    assert ends(lost(streams.heard)) == {ENDS_IN[way]}, "there were streams on it, and each was told by name"
    assert {each.place for each in lost(streams.heard)} <= {*users_of(victim)}
    on_the_other = there[other_than(victim)]
    assert 1 <= on_the_other <= len(users_of(victim)) - len(lost(streams.heard)), "those on the other replica lose nothing"
    assert longest_silence_s(streams.heard) <= allowed_s(undisturbed, outage_s)
    assert changed(server, before) == ({victim, *also} if way in ENDS_ITS_PROCESS else set())
    assert all(died_by(server, name, way) for name in (victim, *also))


async def test_without_shared_memory_who_needs_it_is_refused_by_name(server: Server, undisturbed: Undisturbed) -> None:
    before, processor = pids(server), server.processes()["processor.0"]
    assert segments_of(server, processor) == []
    media = {place: sound(place) for place in ABOUT_MEDIA}
    with no_shared_memory(processor):
        async with Sixteen(server, media) as streams:
            streams.begin()
    assert segments_of(server, processor) == [], "what could not be made whole is not left behind"
    assert [each.place for each in lost(streams.heard)] == [*ABOUT_MEDIA] and ends(lost(streams.heard)) == {"overloaded"}
    undisturbed.check(each for each in streams.heard if each.place not in ABOUT_MEDIA)
    assert longest_silence_s(streams.heard) <= allowed_s(undisturbed)

    async with Sixteen(server, media) as streams:
        streams.begin()
    assert ends(streams.heard) == {"done"}, "it tries again"
    undisturbed.check(each for each in streams.heard if each.place not in ABOUT_MEDIA)
    assert changed(server, before) == set()


async def test_without_further_shared_memory_chunks_wait_and_nothing_is_lost(server: Server, undisturbed: Undisturbed) -> None:
    before, processor = pids(server), server.processes()["processor.0"]
    media = {place: picture(place) for place in ABOUT_MEDIA}
    async with Sixteen(server, {0: sound(0)}) as streams:
        streams.begin([0])
    assert len(segments_of(server, processor)) == 1
    with no_shared_memory(processor):
        async with Sixteen(server, media) as waited:
            waited.begin()
    assert len(segments_of(server, processor)) == 1
    async with Sixteen(server, media) as free:
        free.begin()
    assert len(segments_of(server, processor)) > 1, "they would have had more, had there been any"
    assert ends(waited.heard) == ends(free.heard) == {"done"}
    assert [(each.text, each.pcm) for each in waited.heard] == [(each.text, each.pcm) for each in free.heard]
    undisturbed.check(each for each in waited.heard if each.place not in ABOUT_MEDIA)
    assert changed(server, before) == set()


@pytest.mark.parametrize("way", ["kill", "raise", "no memory", "cut"])
async def test_who_has_passed_the_processor_loses_nothing_with_it(server: Server, undisturbed: Undisturbed, way: str) -> None:
    """Half of the streams have. The others have sent nothing yet: they run again once it is back, unless they are what failed."""
    passed, others = HALVES
    before, again = pids(server), run_again(server)
    async with Sixteen(server) as streams:
        streams.begin(passed)
        await streams.until(Heard.is_heard, passed)
        with held(server, ["processor.0"]):
            streams.begin(others)
            await until_open(server, ["processor.0"], len(others))
            at = time.monotonic()
            strike(server.processes()["processor.0"], way)
    await settled(server, NAMES)
    outage_s = time.monotonic() - at if way in ENDS_ITS_PROCESS else LOST_AFTER_S

    undisturbed.check(streams.heard)
    those_before = [streams.heard[place] for place in passed]
    assert not lost(those_before)
    assert longest_silence_s(those_before) <= allowed_s(undisturbed, outage_s)
    if way in ("raise", "no memory"):
        assert ends(lost(streams.heard)) == {ENDS_IN[way]} and not any(each.text for each in lost(streams.heard))
    else:
        assert not lost(streams.heard) and run_again(server) - again == len(others)
    assert changed(server, before) == ({"processor.0"} if way in ENDS_ITS_PROCESS else set())


@pytest.mark.parametrize("victim", ["thinker.0", "talker.0", "code2wav.0"])
async def test_what_fails_in_place_costs_its_own_requests_and_no_process(
    server: Server, undisturbed: Undisturbed, victim: str
) -> None:
    for way in ("raise", "no memory", "cut"):
        await struck(server, undisturbed, victim, way)


@pytest.mark.parametrize(
    ("victim", "way", "also"),
    [
        ("talker.0", "kill", ()),
        ("code2wav.0", "hang", ()),
        ("thinker.0", "kill", ()),
        ("talker.1", "stop", ("processor.0",)),
        ("code2wav.1", "kill", ()),
        ("thinker.1", "hang", ()),
    ],
)
async def test_a_worker_that_ends_costs_its_own_requests(
    server: Server, undisturbed: Undisturbed, victim: str, way: str, also: tuple[str, ...]
) -> None:
    await struck(server, undisturbed, victim, way, also)


async def test_who_is_bound_to_a_worker_that_pauses_waits_and_nobody_else(server: Server, undisturbed: Undisturbed) -> None:
    async with Sixteen(server) as streams:
        streams.begin()
        await streams.until(Heard.is_heard)
        there = await asyncio.to_thread(open_requests, server)
        with held(server, ["talker.1"]):
            await asyncio.sleep(PAUSE_S)
    assert not lost(streams.heard)
    undisturbed.check(streams.heard)
    silences = sorted(streams.heard[place].silence_s for place in SPEAKERS)
    assert min(there["talker.0"], there["talker.1"]) >= 1
    assert silences[there["talker.0"] - 1] <= allowed_s(undisturbed, PAUSE_S)
    assert silences[len(silences) - there["talker.1"]] > PAUSE_S / 2


@pytest.mark.parametrize(("victim", "way"), [("thinker.0", "cut"), ("talker.0", "cut"), ("code2wav.0", "kill")])
async def test_what_has_sent_nothing_runs_again_on_another_replica(
    server: Server, undisturbed: Undisturbed, victim: str, way: str
) -> None:
    again, other, users = run_again(server), other_than(victim), len(users_of(victim))
    async with Sixteen(server) as streams:
        # So that nothing can leave.
        with held(server, ["processor.0"] if stage_of(victim) == "thinker" else ["thinker.0", "thinker.1"]):
            streams.begin()
            there = await until_open(server, [victim, other], users)
            strike(server.processes()[victim], way)
            await until_open(server, [other], users)
    assert not lost(streams.heard)
    undisturbed.check(streams.heard)
    await settled(server, NAMES)
    assert there[victim] >= 1 and run_again(server) - again == there[victim]


@pytest.mark.parametrize("way", ["kill", "stop"])
async def test_a_broker_takes_every_request_along_and_no_process(server: Server, undisturbed: Undisturbed, way: str) -> None:
    before = pids(server)
    async with Sixteen(server) as streams:
        streams.begin()
        await streams.until(Heard.is_heard)
        strike(server.processes()["broker"], way)
    undisturbed.check(streams.heard)
    assert ends(lost(streams.heard)) == {"broker_lost"}
    await settled(server, NAMES)
    assert changed(server, before) == {"broker"} and died_by(server, "broker", way)
    await undisturbed.run(server)


@pytest.mark.parametrize(("way", "end"), [("kill", BROKEN), ("stop", BROKEN), ("cut", "broker_lost")])
async def test_an_api_process_takes_its_own_requests_along(
    server: Server, undisturbed: Undisturbed, way: str, end: str
) -> None:
    before, processes = pids(server), server.processes()
    async with Sixteen(server) as streams:
        streams.begin()
        await streams.until(Heard.is_heard)
        ports = {name: {one.raddr.port for one in processes[name].net_connections("tcp") if one.raddr} for name in APIS}
        victim = max(APIS, key=lambda name: len(ports[name]))  # the kernel has drawn who gets which
        at = time.monotonic()
        strike(processes[victim], way)
    await settled(server, NAMES)
    outage_s = time.monotonic() - at if way in ENDS_ITS_PROCESS else LOST_AFTER_S
    undisturbed.check(streams.heard)
    assert ends(lost(streams.heard)) == {end}
    assert {each.port for each in lost(streams.heard)} <= ports[victim]
    assert longest_silence_s(streams.heard) <= allowed_s(undisturbed, outage_s)
    assert changed(server, before) == ({victim} if way in ENDS_ITS_PROCESS else set())
    assert died_by(server, victim, way)
