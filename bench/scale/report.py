"""The figures of `python -m bench.scale` as Markdown: one table for each part that was measured, medians where it was repeated."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any


def report(result: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    lines = [
        f"# Scale, {result['date']}",
        "",
        f"`{result['command']}`, commit {result['commit']}",
        "",
        f"{facts}; load_1min behind it {result['load_1min_after']}. The load runs on the same cores.",
        "",
    ]
    scaled = result.get("replicas", {})
    parts = (
        (broker, result.get("broker")),
        (replicas, scaled.get("probe")),
        (tiny, scaled.get("tiny")),
        (attach, result.get("attach")),
        (kill, result.get("kill")),
    )
    for part, found in parts:
        if found is not None:
            lines += [*part(found), ""]
    return "\n".join(lines)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "| --- " * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def middle(values: Sequence[float], digits: int = 2) -> float:
    """Their median."""
    return round(statistics.median(values), digits)


def broker(found: dict[str, Any]) -> Iterator[str]:
    """A ladder without a knee counts as 0: at its first rate the limit was passed."""
    runs = found["runs"]
    knees = [run["knee"]["events_in"] if run["knee"] else 0 for run in runs]
    yield "## One broker on one core"
    yield ""
    yield (
        f"**{middle(knees, 0):.0f} events/s at p99 ≤ {found['limit_ms']:g} ms** (median of {len(runs)}: "
        f"{', '.join(str(knee) for knee in knees)}), {found['streams']} streams, each rate held for {found['rung_s']:g} s. Flooded, it takes in "
        f"{middle([run['flood']['events_per_s'] for run in runs], 0):.0f} events/s at "
        f"{middle([run['flood']['broker_us_per_event'] for run in runs], 1)} µs of its CPU each, ZeroMQ's thread included. "
        "Events are chunks and acknowledgements that come in; each is answered by one that goes out. A chunk is timed from the moment at which "
        "it was due. The rates of the first ladder:"
    )
    yield ""
    rows = [
        (rung["offered"], rung["events_in"], rung["p50_ms"], rung["p99_ms"], rung["late_p99_ms"], rung["broker_us"])
        for rung in runs[0]["rungs"]
    ]
    heads = ("chunks/s offered", "events/s in", "p50 ms", "p99 ms", "load late, p99 ms", "broker CPU µs/event")
    yield from table(heads, rows)


def _replica_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    heads = ("stage", "replicas", "audio s/s", "times one", "of so many", "TTFP p50 ms", "TTFP p95 ms")
    names = ("stage", "replicas", "audio_s_per_s", "ratio", "efficiency", "ttfp_p50_ms", "ttfp_p95_ms")
    yield from table(heads, [[row[name] for name in names] for row in rows])


def replicas(found: dict[str, Any]) -> Iterator[str]:
    yield "## Replicas of a stage that does not need this machine's cores"
    yield ""
    yield (
        f"The probe pipeline; the stage named takes {found['step_ms']} ms for each step without the CPU, for up to {found['max_batch']} words: "
        f"{found['ideal_audio_s_per_s']} s of audio a second for each replica at most. {found['streams']} streams in a closed loop, "
        f"{found['requests']} answers of {found['words']} words. Replicas were added while it ran (`omni-bus scale`). More streams are asked for "
        "than one replica can carry: TTFP holds the time for which a request waits to be admitted."
    )
    yield ""
    yield from _replica_rows(found["rows"])


def tiny(found: dict[str, Any]) -> Iterator[str]:
    yield "## Replicas of the tiny Qwen3-Omni's stages"
    yield ""
    yield (
        f"{found['streams']} streams in a closed loop, {found['requests']} answers of {found['text_tokens']} tokens and {found['frames']} frames. Every "
        "stage computes on the same cores as all others and as the load, so a replica more brings what cores were idle and "
        "takes from the others what they were not: this says what replicas cost where little is to be gained."
    )
    yield ""
    yield from _replica_rows(found["rows"])


def attach(found: dict[str, Any]) -> Iterator[str]:
    names = ("attached_s", "ready_s", "first_chunk_s")
    columns = {name: [run[name] for run in found["runs"]] for name in names}
    yield "## A worker of another host"
    yield ""
    yield (
        f"`omni-bus worker` for stage {found['stage']} of the probe, by the loopback with CURVE; seconds from the start of the command. "
        "The worker process that it starts loads Python and torch, and no model."
    )
    yield ""
    heads = ("", "let in by the broker", "ready", "first chunk of a request")
    yield from table(
        heads,
        [
            (f"median of {len(found['runs'])}", *(middle(values) for values in columns.values())),
            ("least", *(min(values) for values in columns.values())),
            ("most", *(max(values) for values in columns.values())),
        ],
    )


def kill(found: dict[str, Any]) -> Iterator[str]:
    yield "## From `kill -9` to service"
    yield ""
    yield (
        "Seconds, medians (least to most). One replica a stage, but for sink.1, which was one of two. Restored: the first packet of an "
        "answer that was asked for after the kill, by a client that asks again at once when it is refused. Whole: every replica "
        "ready again. `bus.restart_backoff_s`, 0.5 s, is in it, and Python's and torch's start; the probe has no model, and the stages "
        "of the tiny Qwen3-Omni a small one."
    )
    yield ""
    lines = []
    for target in dict.fromkeys(row["target"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["target"] == target]
        cells = []
        for name in ("restored_s", "whole_s"):
            values = [row[name] for row in own]
            cells.append(f"{middle(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        lines.append((target, len(own), *cells, f"{middle([row['failed'] for row in own]):.0f}"))
    yield from table(("killed", "times", "restored", "whole", "refused meanwhile"), lines)
