"""The profile of a first packet: every nanosecond has one owner, and a real server's records can be followed."""

from __future__ import annotations

import itertools
import json
import pathlib
import subprocess
import sys

import pytest

from bench.trace_table import Asked, Call, Passage, Traces, chrome, follow_back, table
from omni_bus.events import Chunk
from omni_bus.workers.link import BrokerLink
from omni_bus.workers.trace import Trace, TracedLink
from tests.support.running_server import ROOT, running

ASKED = Asked(0, 500, 1000, 2000)


def call(stage: str, start: int, end: int, what: str = "step", worker: str = "") -> Call:
    return Call(worker or f"{stage}.0", stage, what, start, end, 1, 1)


def hop(edge: str, sent: int, came: int, seq: int = 0, worker: str = "") -> list[Passage]:
    """A chunk from stage to stage; the client's ends are seen by no worker."""
    source, _, target = edge.partition("->")
    ends = [("out", sent, source), ("in", came, target)]
    return [Passage(worker or f"{s}.0", way, at, "Chunk", 7, edge, seq, 10) for way, at, s in ends if s != "client"]


def opened(stage: str, at: int, request: int = 7) -> Passage:
    return Passage(f"{stage}.0", "in", at, "Open", request, stage, -1, 0)


PASSAGES = [
    opened("a", 90),
    opened("b", 91),
    *hop("client->a", 0, 100),
    *hop("a->b", 310, 360),
    *hop("a->b", 420, 430, seq=1),
    *hop("b->client", 900, 1000),
]
CALLS = [
    call("a", 100, 120, "feed"),
    call("a", 130, 200),
    call("a", 210, 300),
    call("a", 310, 410),  # of the second chunk: not on the way
    call("b", 320, 350),  # was busy when the first chunk came
    call("b", 400, 600),
    call("b", 610, 890),
    call("b", 1500, 1600),
]


def told(calls: list[Call], passages: list[Passage]) -> list[tuple[str, int, int]]:
    pieces = follow_back(Traces(calls, passages), ASKED, "b->client")
    assert pieces[0].start == ASKED.sent and pieces[-1].end == ASKED.first_audio
    assert all(before.end == after.start for before, after in itertools.pairwise(pieces))
    return [(piece.what, piece.start, piece.end) for piece in pieces]


def test_the_way_back_has_no_gap() -> None:
    assert told(CALLS, PASSAGES) == [
        ("the request on its way in", 0, 100),
        ("a: feed", 100, 120),
        ("a: until its step starts", 120, 130),
        ("a: step", 130, 200),
        ("a: hands on", 200, 210),
        ("a: step", 210, 300),
        ("a: hands on", 300, 310),
        ("hop a->b", 310, 320),
        ("b was busy: step", 320, 350),
        ("hop a->b", 350, 360),
        ("b: until its step starts", 360, 400),
        ("b: step", 400, 600),
        ("b: hands on", 600, 610),
        ("b: step", 610, 890),
        ("b: hands on", 890, 900),
        ("first audio to the client", 900, 1000),
    ]


def test_stages_of_one_process_wait_for_each_other() -> None:
    calls = [call(one.stage, one.start, one.end, one.what, "gpu.0") for one in CALLS]
    passages = [Passage("gpu.0", *list(vars(one).values())[1:]) for one in PASSAGES]
    calls.append(call("b", 203, 208, "step", "gpu.0"))
    assert ("a waits for b: step", 203, 208) in told(calls, passages)


def test_the_table_adds_up() -> None:
    traces = Traces(CALLS, PASSAGES)
    lines = table(follow_back(traces, ASKED, "b->client"), ASKED)
    assert "Time to first packet: 0.00 ms; accounted for: 0.00 ms." in lines
    assert "| 0.00 | 0.00 | a.0 | a: step x 2, with what lies between them |" in lines
    kinds = [float(line.split("|")[3]) for line in lines[lines.index("| kind | ms | % |") + 2 :]]
    assert sum(kinds) == pytest.approx(100, abs=len(kinds))
    timeline = chrome(traces, ASKED, follow_back(traces, ASKED, "b->client"))["traceEvents"]
    arrows = {kind: sorted(event["id"] for event in timeline if event["ph"] == kind) for kind in "sf"}
    assert arrows["s"] == ["7 a->b 0", "7 a->b 1", "7 b->client 0"] and arrows["f"] == ["7 a->b 0", "7 a->b 1", "7 client->a 0"]


def test_another_request_under_way_is_noticed() -> None:
    with pytest.raises(ValueError, match="2 requests"):
        follow_back(Traces(CALLS, [*PASSAGES, opened("a", 95, request=8)]), ASKED, "b->client")


def test_a_running_server_is_profiled(tmp_path: pathlib.Path) -> None:
    directory, out = tmp_path / "trace", tmp_path / "timeline.json"
    with running(
        "probe.toml", sets=[f"bus.trace={directory}", "bus.heartbeat_s=0.2", "stages.source.tensor_bytes=100000"]
    ) as server:
        command = [sys.executable, "-m", "bench.trace", str(directory), "--url", server.url, "--audio-edge", "sink->client"]
        command += ["--requests", "3", "--prompt-words", "4", "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in directory.iterdir()) == ["relay.0.0.jsonl", "sink.0.0.jsonl", "source.0.0.jsonl"]
    for what in (
        "source: step",
        "hop source->relay",
        "relay: step",
        "hop relay->sink",
        "sink: step",
        "first audio to the client",
    ):
        assert f": {what} |" in done.stdout, done.stdout
    names = {event["name"] for event in json.loads(out.read_text())["traceEvents"]}
    assert {"step", "feed", "open", "in Chunk", "out Chunk", "to the first packet"} <= names


def test_a_chunk_is_noted_before_its_reader_can_have_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the reader's note, if it runs first, is earlier than the sender's, and the way back ends there."""
    noted: list[int] = []
    link = TracedLink.__new__(TracedLink)
    link._trace = Trace(str(tmp_path), "a.0")
    monkeypatch.setattr(BrokerLink, "send", lambda *_: noted.append(len(link._trace._lines)))
    link.send(Chunk(1, "a->b", 0, False), [b"payload"])
    link._trace.close()
    assert noted == [1]
