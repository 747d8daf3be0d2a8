"""What status and top show of a server: columns, shares of time, frames of a terminal's size, and a feed that outlives its server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console

from omni_bus import status_feed, status_view
from omni_bus.commands import status as status_command
from omni_bus.errors import OmniBusError
from omni_bus.http_client import Refused, Unreachable
from omni_bus.top_screen import frame

LIMIT_S = 30.0  # a hang


def replica(
    stage: str, number: int = 0, *, state: str = "ready", load: dict[str, Any] | None = None, **said: Any
) -> dict[str, Any]:
    return {
        "stage": stage,
        "worker": f"{stage}.{number}",
        "pid": 100 + number,
        "host": "gpu-1",
        "device": "cuda:0",
        "state": state,
        "progress": 0.45,
        "requests": 2,
        "restarts": 0,
        "streams": 2,
        "predicted_rtf": 0.84,
        "load": load,
        **said,
    }


def server(*stages: tuple[str, list[dict[str, Any]]], **said: Any) -> dict[str, Any]:
    return {
        "model": "omni",
        "pipeline": "qwen3_omni",
        "ready": True,
        "missing": [],
        "stopping": False,
        "uptime_s": 3725.0,
        "requests": {"running": 3, "queued": 0},
        "ended": {"done": 7, "failed:stage_failed": 1},
        "recent": {"window_s": 300.0, "ttfp_s": None, "rtf": None, "underrun": {"count": 0, "seconds": 0.0}},
        "stages": [{"name": name, "ready": True, "replicas": found} for name, found in stages],
        **said,
    }


LOAD = {
    "waiting": 4,
    "queued": 96,
    "per_step": 16,
    "running": 3,
    "batch": 2,
    "busy_s": 5.0,
    "kv_blocks_used": 95,
    "kv_blocks_total": 100,
    "lead_s": 1.234,
}
SPOKEN = {
    "window_s": 300.0,
    "ttfp_s": {"count": 40, "p50": 0.2124, "p95": 0.289},
    "rtf": {"count": 39, "p50": 0.31, "p95": 0.452},
    "underrun": {"count": 2, "seconds": 0.35},
}


def drawn(status: dict[str, Any] | None, width: int = 160, height: int = 40, note: str = "") -> str:
    console = Console(width=width, height=height, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(frame(status, width, height, note))
    return capture.get()


def cells(text: str) -> dict[str, str]:
    """Column → cell, of the first replica in the lines of `omni-bus status`, whose columns are aligned to the left."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("stage"))
    names = re.split(r"  +", lines[at].strip())
    starts = [lines[at].index(name) for name in names]
    ends = [*starts[1:], None]
    return {name: lines[at + 1][start:end].strip() for name, start, end in zip(names, starts, ends, strict=True)}


def test_every_figure_of_a_replica_has_its_column() -> None:
    lines = status_command.render(server(("thinker", [replica("thinker", load=LOAD, restarts=1)])))
    assert cells("\n".join(lines)) == {
        "stage": "thinker",
        "worker": "thinker.0",
        "host": "gpu-1",
        "pid": "100",
        "device": "cuda:0",
        "state": "ready",
        "requests": "2",
        "waiting": "4",
        "queued": "96",
        "running": "3",
        "batch": "2",
        "streams": "2",
        "lead": "1.2 s",
        "next rtf": "0.84",
        "busy": "5.0 s",
        "kv": "95/100",
        "slots": "-",
        "restarts": "1",
    }


def test_one_that_loads_says_how_far_it_is() -> None:
    lines = status_command.render(server(("thinker", [replica("thinker", state="loading")])))
    assert cells("\n".join(lines))["state"] == "loading 45%"


def test_the_server_as_a_whole() -> None:
    seen = server(("thinker", [replica("thinker")]), recent=SPOKEN)
    assert status_view.headline(seen) == "omni (pipeline qwen3_omni): ready, up 1:02:05"
    assert dict(status_view.summary(seen)) == {
        "requests": "now: 3 running;  ended: 7 done, 1 failed:stage_failed",
        "speech": "TTFP p50 212 ms, p95 289 ms; RTF p50 0.31, p95 0.45; 2 underruns of 0.35 s in all  (40 answers of the last 5 minutes)",
    }
    queue = {**seen, "waiting": {"interactive": 3, "batch": 0}, "retry_after_s": 4.2}
    assert dict(status_view.summary(queue))["waiting"] == "for their start: 3 interactive; one more is told to come back in 4 s"
    assert "not ready: talker" in status_view.headline({**seen, "ready": False, "missing": ["talker"]})
    assert "draining" in status_view.headline({**seen, "ready": False, "stopping": True})


def test_a_share_of_time_is_that_between_two_looks() -> None:
    before = server(("thinker", [replica("thinker", load=LOAD), replica("thinker", 1)]))
    other = replica("thinker", 2, load=LOAD)  # was not there before
    again = replica("thinker", 1, load={**LOAD, "busy_s": 0.1}, pid=999)  # was started again
    now = server(("thinker", [replica("thinker", load={**LOAD, "busy_s": 5.5}), again, other]), uptime_s=3727.0)
    busy = [one["load"].get("busy") for one in status_view.replicas(status_view.shares(now, before))]
    assert busy == [0.25, None, None]
    assert "25%" in drawn(status_view.shares(now, before))
    assert status_view.shares(before, before) == before, "no time has passed"


@pytest.mark.parametrize("width", [160, 110, 90, 80, 60, 40])
def test_a_frame_fits_the_terminal(width: int) -> None:
    stages = [(name, [replica(name, number, load=LOAD) for number in range(3)]) for name in ("thinker", "talker", "code2wav")]
    text = drawn(server(*stages, recent=SPOKEN), width)
    assert max(map(len, text.splitlines())) <= width
    head = re.split(r"  +", next(line for line in text.splitlines() if "worker" in line).strip())
    assert set(head) <= {column.name for column in status_view.COLUMNS}, "none of them cut"
    assert {"worker", "state", "running"} <= set(head)
    assert "thinker.2" in text and "ready" in text
    if width >= 80:
        assert {"stage", "waiting", "kv", "restarts"} <= set(head)


def test_more_replicas_than_lines_are_counted() -> None:
    text = drawn(server(("talker", [replica("talker", number) for number in range(50)])), height=30)
    assert len(text.splitlines()) <= 30
    assert text.count("talker.") == 21 and "and 29 more" in text


def test_a_stage_without_a_replica_and_what_is_wrong_are_told() -> None:
    text = drawn(server(("talker", []), ready=False, missing=["talker"]), note="no server at http://x")
    assert "no replica" in text and "not ready: talker" in text and "no server at http://x" in text
    assert "the broker is gone" in drawn(None, note="the broker is gone")


# ---- the feed


@contextlib.asynccontextmanager
async def scripted(*answers: bytes) -> AsyncIterator[str]:
    """An HTTP server that gives each connection the next answer, and none to those beyond."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0) if left else b"")
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening, asyncio.timeout(LIMIT_S):
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def stream(*events: object) -> bytes:
    lines = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + lines


REFUSED = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 35\r\n\r\n{"error": {"message": "not today."}}'


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_feed, "AGAIN_S", 0.0)


async def test_the_feed_goes_on_when_the_server_is_back() -> None:
    gone = {"error": {"message": "the broker is gone"}}
    async with scripted(stream({"n": 1}, {"n": 2}), REFUSED, stream(gone, {"n": 3})) as url:
        feed = status_feed.follow(url, 1.0)
        found = [await anext(feed) for _ in range(6)]
        await feed.aclose()
    assert [one for one in found if isinstance(one, dict)] == [{"n": 1}, {"n": 2}, {"n": 3}]
    errors = [(found.index(one), type(one)) for one in found if isinstance(one, OmniBusError)]
    assert errors == [(2, Unreachable), (3, Refused), (4, OmniBusError)]


async def test_a_server_that_was_never_there_is_no_feed() -> None:
    async with scripted(REFUSED) as url:
        with pytest.raises(Refused):
            await anext(status_feed.follow(url, 1.0))
    with pytest.raises(Unreachable):
        await anext(status_feed.follow(url, 1.0))


async def test_a_server_that_says_nothing_more_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_feed, "SILENT_S", 0.1)
    silent = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(stream({"n": 1}))
        await writer.drain()
        await silent.wait()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening, asyncio.timeout(LIMIT_S):
        feed = status_feed.follow(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", 0.2)
        assert await anext(feed) == {"n": 1}
        assert isinstance(await anext(feed), Unreachable)
        silent.set()
        await feed.aclose()
