"""docs/failures.md on the tiny Qwen3-Omni: a stage's process or the broker is killed, is stopped or hangs under 16 streams."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest

from omni_bus.speech_stream import SpeechStream
from tests.support.running_server import Server, eventually, running

TOKENS, FRAMES = 30, 40
STAGES = ("processor", "thinker", "talker", "code2wav")
# Of harbours 16 to 31. Where two experts of a layer weigh the same to the last bit, as for number 5, it is the batch that decides.
FIRST = 16
BACK_S = 120.0
LOST_AFTER_S, STEP_S = 5.0, 10.0
HANG = pathlib.Path(__file__).parents[1] / "support" / "hang"


@dataclasses.dataclass(slots=True)
class Heard:
    text: str = ""
    pcm: bytes = b""
    end: str = ""  # "done" or an error's code


@pytest.fixture(scope="module")
def server(omni_checkpoint: pathlib.Path) -> Iterator[Server]:
    """Code2Wav in float64, so that PCM16 does not depend on who shares a batch."""
    sets = [f"model.path={omni_checkpoint}", "model.name=tiny", "bus.restart_backoff_s=0.1", "stages.code2wav.dtype=float64"]
    sets += ["bus.heartbeat_s=0.5", f"bus.lost_after_s={LOST_AFTER_S}", f"bus.step_s={STEP_S}"]
    sets += [f"stages.{stage}.threads=1" for stage in STAGES]
    with running("qwen3_omni_tiny.toml", sets=sets, env={"PYTHONPATH": str(HANG)}) as server:
        yield server


@pytest.fixture(scope="module")
def whole(server: Server) -> list[Heard]:
    """What the 16 hear where nothing fails."""
    heard = asyncio.run(sixteen(server))
    assert [each.end for each in heard] == ["done"] * 16
    assert all(len(each.pcm) > 2 * 12000 for index, each in enumerate(heard) if index % 4)
    return heard


def body(index: int) -> dict[str, Any]:
    speech = index % 4 != 0
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Tell me of harbour number {FIRST + index}."}],
        "modalities": ["text", "audio"] if speech else ["text"],
        "stream": True,
        "temperature": 0.0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        **({"audio": {"voice": "ethan", "format": "pcm16"}} if speech else {}),
        **({"sampling": {"talker": {"temperature": 0.0, "max_tokens": FRAMES, "ignore_eos": True}}} if speech else {}),
    }


async def listen(http: aiohttp.ClientSession, server: Server, index: int, begun: asyncio.Semaphore, into: Heard) -> None:
    """`begun` is released with the first text."""
    speech = SpeechStream()
    async with http.post(f"{server.url}/v1/chat/completions", json=body(index)) as response:
        if response.status != 200:
            into.end = (await response.json())["error"]["code"]
            return
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            said = line.removeprefix(b"data:").strip()
            if said == b"[DONE]":
                into.end = into.end or "done"
                continue
            event = json.loads(said)
            assert not into.end, "something came after the end"
            if "error" in event:
                into.end = event["error"]["code"]
                continue
            text, pcm = speech.read(event)
            if text and not into.text:
                begun.release()
            into.text += text
            into.pcm += pcm


async def sixteen(server: Server, strike: str = "", way: signal.Signals = signal.SIGKILL) -> list[Heard]:
    """What 16 streams hear; once all that speak have begun, the process of that name gets that signal."""
    heard, begun = [Heard() for _ in range(16)], asyncio.Semaphore(0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as http:
        listening = [asyncio.ensure_future(listen(http, server, index, begun, each)) for index, each in enumerate(heard)]
        async with asyncio.timeout(200):
            for _ in range(12):
                await begun.acquire()
            if strike:
                server.processes()[strike].send_signal(way)
            await asyncio.gather(*listening)
    return heard


def idle(server: Server) -> bool:
    """Every KV block, slot and segment is free; blocks that are only kept for their contents do not count as used."""
    status = server.get("/v1/status")
    loads = [replica["load"] or {} for stage in status["stages"] for replica in stage["replicas"]]
    keys = ("running", "waiting", "kv_blocks_used", "slots_used", "segments_used", "held")
    return not any(status["requests"].values()) and not any(load.get(key, 1) for load in loads for key in keys)


async def settled(server: Server) -> None:
    await asyncio.to_thread(eventually, lambda: server.ready() and idle(server), BACK_S, "all is ready, and nothing is held")


@pytest.mark.parametrize(
    ("victim", "way", "code"),
    [
        ("code2wav.0", signal.SIGKILL, "replica_lost"),
        ("talker.0", signal.SIGSTOP, "replica_lost"),
        ("code2wav.0", signal.SIGUSR2, "replica_lost"),  # it hangs
        ("broker", signal.SIGKILL, "broker_lost"),
    ],
)
async def test_what_was_not_lost_is_heard_to_the_last_sample(
    server: Server, whole: list[Heard], victim: str, way: signal.Signals, code: str
) -> None:
    await settled(server)
    before = {name: process.pid for name, process in server.processes().items()}

    heard = await sixteen(server, victim, way)
    assert {each.end for each in heard} <= {"done", code}
    assert code in {each.end for each in heard}, "there were streams on it"
    for index, (each, expected) in enumerate(zip(heard, whole, strict=True)):
        if each.end == "done":
            assert (each.text, each.pcm) == (expected.text, expected.pcm), index
        elif victim != "broker":
            assert index % 4, "a text needs neither Talker nor Code2Wav"
        assert expected.text.startswith(each.text) and expected.pcm.startswith(each.pcm), index

    await settled(server)
    assert [each.end for each in await sixteen(server)] == ["done"] * 16
    after = {name: process.pid for name, process in server.processes().items()}
    assert {name for name in before if before[name] != after[name]} == {victim}
    assert psutil.pid_exists(server.process.pid)
    if way == signal.SIGSTOP:
        assert f"{victim} does not answer; ending it by force" in server.stderr
    if way == signal.SIGUSR2:
        assert "in hang" in (server.run_dir / f"{victim}.log").read_text().rpartition("Timeout (")[2], "where it stood"
