"""Worker traces of one request: merged, followed back from the first packet to the request, and drawn as a Chrome trace.

The way back: the step whose output was the first audio, then what that step had waited for — its stage's step before it, or the
last chunk that reached the stage, and so the producer of that chunk — up to the request itself. The pieces join end to end, so their
sum is the time to first packet.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

CLIENT = "client"
DRAIN_NS = 200_000  # between two messages that a worker reads in one go


@dataclasses.dataclass(frozen=True)
class Call:
    """Of a stage, in nanoseconds of the wall clock."""

    worker: str
    stage: str
    what: str  # step, feed, open
    start: int
    end: int
    batch: int
    emissions: int


@dataclasses.dataclass(frozen=True)
class Passage:
    """An event in or out of a worker."""

    worker: str
    way: str
    at: int
    event: str
    request: int
    where: str  # edge or stage
    seq: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request as its client saw it."""

    sent: int
    first_text: int
    first_audio: int
    end: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the time to first packet, and who spent it."""

    who: str
    what: str
    start: int
    end: int

    @property
    def ms(self) -> float:
        return (self.end - self.start) / 1e6


class Traces:
    """All lines of a directory, by time."""

    def __init__(self, calls: Iterable[Call], passages: Iterable[Passage]) -> None:
        self.calls = sorted(calls, key=lambda call: call.start)
        self.passages = sorted(passages, key=lambda passage: passage.at)

    @classmethod
    def read(cls, directory: pathlib.Path) -> Traces:
        calls, passages = [], []
        for file in sorted(directory.glob("*.jsonl")):
            worker = file.name.removesuffix(".jsonl").rpartition(".")[0]
            for text in file.read_text().splitlines():
                kind, *line = json.loads(text)
                if kind == "call":
                    calls.append(Call(worker, *line))
                else:
                    passages.append(Passage(worker, kind, *line))
        return cls(calls, passages)

    def between(self, start: int, end: int) -> Traces:
        return Traces(
            [call for call in self.calls if call.end >= start and call.start <= end],
            [passage for passage in self.passages if start <= passage.at <= end],
        )

    def request_of(self, asked: Asked) -> int:
        """The request that was opened after `asked` was sent. Raises ValueError where there is none, or more than one by its first packet."""
        found = {p.request for p in self.passages if p.event == "Open" and asked.sent <= p.at <= asked.first_audio}
        if len(found) != 1:
            raise ValueError(
                f"{len(found)} requests were opened while one was traced; trace on a server that serves nobody else"
            )
        return found.pop()


def follow_back(traces: Traces, asked: Asked, audio_edge: str) -> list[Piece]:
    """The pieces of the time to first packet, in order. `audio_edge`: the edge that brings audio to the client."""
    return _Follower(traces.between(asked.sent, asked.first_audio), asked).pieces(audio_edge)


class _Follower:
    def __init__(self, traces: Traces, asked: Asked) -> None:
        self._asked = asked
        request = traces.request_of(asked)
        chunks = [p for p in traces.passages if p.event == "Chunk" and p.request == request]
        self._sent = {(p.where, p.seq): p for p in chunks if p.way == "out"}
        self._came = [p for p in chunks if p.way == "in"]
        self._calls = [call for call in traces.calls if call.end > call.start]
        self._steps: dict[str, list[Call]] = {}
        for call in self._calls:
            if call.what == "step":
                self._steps.setdefault(call.stage, []).append(call)

    def pieces(self, audio_edge: str) -> list[Piece]:
        first = self._sent.get((audio_edge, 0))
        if first is None:
            raise ValueError(f"no chunk was sent on {audio_edge}")
        found = [Piece("broker, API", "first audio to the client", first.at, self._asked.first_audio)]
        chunk: Passage | None = first
        while chunk is not None:
            chunk = self._through_stage(chunk, found)
        return [piece for piece in reversed(found) if piece.end > piece.start]

    def _through_stage(self, sent: Passage, found: list[Piece]) -> Passage | None:
        """Add the pieces between a chunk that a stage sent and the one that let it work; returns that one, as its producer sent it."""
        stage = sent.where.partition("->")[0]
        worker, at = sent.worker, sent.at
        came = [p for p in self._came if p.where.partition("->")[2] == stage]
        while True:
            step = _last(self._steps.get(stage, []), at)
            cause = _latest(came, at)
            if step is not None and (cause is None or step.end > cause.at):
                found += self._split(worker, stage, Piece(worker, f"{stage}: hands on", step.end, at))
                found.append(Piece(worker, f"{stage}: step", step.start, step.end))
                at = step.start
                continue
            if cause is None:
                found.append(Piece(worker, f"{stage}: before anything came", self._asked.sent, at))
                return None
            found += self._split(worker, stage, Piece(worker, f"{stage}: until its step starts", cause.at, at))
            producer = self._sent.get((cause.where, cause.seq))
            if producer is None:
                found.append(Piece("HTTP, API, broker", "the request on its way in", self._asked.sent, cause.at))
                return None
            # A chunk that comes while the worker is busy lies in its socket.
            found += self._split(worker, stage, Piece("broker", f"hop {cause.where}", producer.at, cause.at))
            return producer

    def _split(self, worker: str, stage: str, whole: Piece) -> list[Piece]:
        """`whole`, less what the worker did in that time, and that; latest first."""
        pieces, at = [], whole.end
        calls = [call for call in self._calls if call.worker == worker and whole.start < call.end and call.start < whole.end]
        for call in sorted(calls, key=lambda call: call.end, reverse=True):
            if call.start >= at:
                continue
            if call.stage != stage:
                title = f"{stage} waits for {call.stage}: {call.what}"
            else:
                title = f"{stage} was busy: step" if call.what == "step" else f"{stage}: {call.what}"
            begin, stop = max(call.start, whole.start), min(call.end, at)
            pieces += [dataclasses.replace(whole, start=stop, end=at), Piece(worker, title, begin, stop)]
            at = begin
        return [*pieces, dataclasses.replace(whole, end=at)]


def _last(steps: Sequence[Call], at: int) -> Call | None:
    """The step that ended last, no later than `at`."""
    index = bisect.bisect_right(steps, at, key=lambda step: step.end)
    return steps[index - 1] if index else None


def _latest(came: Sequence[Passage], at: int) -> Passage | None:
    """What had come last by `at`. Of chunks of one edge that were read from the socket in one go, the first let the stage work."""
    index = bisect.bisect_right(came, at, key=lambda passage: passage.at)
    while index > 1 and came[index - 1].where == came[index - 2].where and came[index - 1].at - came[index - 2].at < DRAIN_NS:
        index -= 1
    return came[index - 1] if index else None


def table(pieces: Sequence[Piece], asked: Asked) -> list[str]:
    """Markdown: every piece in order (a stage's steps in a row as one line), then the sum for each kind."""
    lines = ["| from ms | ms | where | what |", "| --- | --- | --- | --- |"]
    index = 0
    while index < len(pieces):
        run = index + 1
        kinds = {pieces[index].what, f"{pieces[index].what.partition(':')[0]}: hands on"}
        if pieces[index].what.endswith(": step"):
            while run < len(pieces) and pieces[run].what in kinds:
                run += 1
        group = pieces[index:run]
        steps = sum(piece.what.endswith(": step") for piece in group)
        what = group[0].what if steps < 2 else f"{group[0].what} x {steps}, with what lies between them"
        begin, took = (group[0].start - asked.sent) / 1e6, (group[-1].end - group[0].start) / 1e6
        lines.append(f"| {begin:.2f} | {took:.2f} | {group[0].who} | {what} |")
        index = run
    sums: dict[str, float] = {}
    for piece in pieces:
        sums[f"{piece.who}: {piece.what}"] = sums.get(f"{piece.who}: {piece.what}", 0.0) + piece.ms
    total = (asked.first_audio - asked.sent) / 1e6
    lines += ["", f"Time to first packet: {total:.2f} ms; accounted for: {sum(sums.values()):.2f} ms.", ""]
    lines += ["| kind | ms | % |", "| --- | --- | --- |"]
    lines += [f"| {name} | {ms:.2f} | {100 * ms / total:.0f} |" for name, ms in sorted(sums.items(), key=lambda item: -item[1])]
    return lines


def chrome(traces: Traces, asked: Asked, pieces: Sequence[Piece]) -> dict[str, Any]:
    """For chrome://tracing or Perfetto: processes are workers, threads stages, arrows chunks; microseconds from the request on."""
    shown = traces.between(asked.sent, asked.end)
    workers = sorted({call.worker for call in shown.calls} | {passage.worker for passage in shown.passages})
    numbers = {name: index for index, name in enumerate((CLIENT, *workers), start=1)}
    threads: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = [_meta("process_name", number, name) for name, number in numbers.items()]

    def thread(worker: str, name: str) -> int:
        if (worker, name) not in threads:
            threads[worker, name] = len(threads) + 1
            events.append({**_meta("thread_name", numbers[worker], name), "tid": threads[worker, name]})
        return threads[worker, name]

    def span(worker: str, name: str, title: str, start: int, end: int, **more: Any) -> None:
        place = {"pid": numbers[worker], "tid": thread(worker, name)}
        times = {"ts": (start - asked.sent) / 1e3, "dur": (end - start) / 1e3}
        events.append({"ph": "X", "name": title, **place, **times, "args": more})

    span(CLIENT, "request", "to the first text", asked.sent, asked.first_text)
    span(CLIENT, "request", "to the end", asked.first_text, asked.end)
    span(CLIENT, "first packet", "to the first packet", asked.sent, asked.first_audio)
    for piece in pieces:
        span(CLIENT, "way to the first packet", piece.what, piece.start, piece.end, where=piece.who)
    for call in shown.calls:
        span(call.worker, call.stage, call.what, call.start, call.end, batch=call.batch, emissions=call.emissions)
    for passage in shown.passages:
        source, _, target = passage.where.partition("->")
        name = (source if passage.way == "out" else target) if target else source
        place = {"pid": numbers[passage.worker], "tid": thread(passage.worker, name), "ts": (passage.at - asked.sent) / 1e3}
        detail = {"way": passage.way, "where": passage.where, "seq": passage.seq, "bytes": passage.nbytes}
        title = f"{passage.way} {passage.event}"
        events.append({"ph": "i", "s": "t", "name": title, **place, "args": {**detail, "request": str(passage.request)}})
        if passage.event == "Chunk":
            arrow = {"ph": "s" if passage.way == "out" else "f", "bp": "e", "cat": "chunk", "name": passage.where}
            events.append({**arrow, **place, "id": f"{passage.request} {passage.where} {passage.seq}"})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(kind: str, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": number, "args": {"name": name}}
