"""A server under half, once and twice what it can carry, with admission and without: throughput, continuity, who was refused.

    python -m bench.overload [--seconds 20] [--out bench/results]

The probe's sink is the one stage with a cost: a step waits 40 ms, as for a GPU, and makes 80 ms of audio for each of up to four rows. So
it makes 8 seconds of audio in a second at most, and eight streams in real time. Requests arrive at random (Poisson, the same times in
every pass) for answers of 3.2 s. At twice the capacity half of them cannot be served: what matters is what becomes of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from bench.measured_server import MeasuredServer
from omni_bus.bench_load import Load, Measured, open_loop
from omni_bus.bench_report import percentile
from omni_bus.speech_stream import underrun_s

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "probe.toml"
STEP_S, FRAME_S, ROWS, WORDS = 0.04, 0.08, 4, 40
PEAK = ROWS * FRAME_S / STEP_S  # seconds of audio in a second
WAITING = 8  # requests that may wait
LIMITS = {"admission": 0.9, "without": 0.0}  # bus.admit_rtf
LOADS = (0.5, 1.0, 2.0)
READY_S = 120.0
GAP_S = 0.05  # of silence in an answer, from which it counts as broken
_RETRY = re.compile(r"try again in (\d+) s")


def passes(name: str, seconds: float) -> Iterator[dict[str, Any]]:
    """One server with that admission, and each load on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    sets = [
        f"stages.sink.step_ms={round(1000 * STEP_S)}", f"stages.sink.max_batch={ROWS}",
        f"bus.admit_rtf={LIMITS[name]}", f"bus.max_waiting={WAITING}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ob-") as scratch:
        server = MeasuredServer(CONFIG, port, sets, pathlib.Path(scratch))
        try:
            if server.wait_ready(READY_S) is None:
                raise SystemExit(f"the server did not start:\n{server.tails()}")
            for load in LOADS:
                rate = load * PEAK / (WORDS * FRAME_S)
                asked = Load(
                    url=server.address, model="probe", ours=True, prompt=None, prompt_words=WORDS, audio=None, speech=True,
                    text_tokens=None, frames=None, speech_stage="sink", seed=7,
                )  # fmt: skip
                measured, took = asyncio.run(open_loop(asked, rate, max(1, round(rate * seconds))))
                yield {"admission": name, "load": load, "per_s": rate, **summary(measured, took)}
        finally:
            server.stop()


def summary(measured: Sequence[Measured], seconds: float) -> dict[str, Any]:
    """Of one pass. Throughput is of the answers that were given, over the whole pass with its end."""
    good = [one for one in measured if one.error is None and one.packets]
    refused = [one for one in measured if one.error is not None and _RETRY.search(one.error)]
    told = [int(found[1]) for one in refused if (found := _RETRY.search(one.error or "")) is not None]
    gaps = [underrun_s(one.packets) for one in good]
    first = [one.packets[0][0] for one in good]
    return {
        "requests": len(measured),
        "answered": len(good),
        "refused": len(refused),
        "failed": len(measured) - len(good) - len(refused),
        "retry_after_s": [min(told), max(told)] if told else None,
        "seconds": round(seconds, 2),
        "audio_s_per_s": round(sum(one.audio_s for one in good) / seconds, 2),
        "broken": sum(gap > GAP_S for gap in gaps),
        "gap_p95_s": round(percentile(gaps, 95), 3) if gaps else None,
        "ttfp_p50_s": round(percentile(first, 50), 3) if first else None,
        "ttfp_p99_s": round(percentile(first, 99), 3) if first else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown. Throughput is also given as a share of the highest of any pass."""
    lines = [
        "| admission | load | requests | answered | refused | Retry-After s | audio s/s | of the peak | with a gap | gap p95 s | TTFP p50 s | p99 s |",
        "| --- " * 12 + "|",
    ]
    peak = max(row["audio_s_per_s"] for row in rows)
    for row in rows:
        told = "–".join(map(str, row["retry_after_s"])) if row["retry_after_s"] else "-"
        cells = (
            row["admission"], f"{row['load']:g}×", row["requests"], row["answered"], row["refused"], told, row["audio_s_per_s"],
            f"{row['audio_s_per_s'] / peak:.0%}" if peak else "-", row["broken"], row["gap_p95_s"], row["ttfp_p50_s"], row["ttfp_p99_s"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each pass")
    parser.add_argument("--out", type=pathlib.Path, help="a directory for the figures as JSON and Markdown")
    said = parser.parse_args(arguments)
    before = round(os.getloadavg()[0], 1)
    rows = []
    for name in LIMITS:
        for row in passes(name, said.seconds):
            rows.append(row)
            print(
                f"{name}, {row['load']:g}x: {row['answered']} answered, {row['refused']} refused", file=sys.stderr, flush=True
            )
    result = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(("python", "-m", "bench.overload", *arguments)),
        "machine": {
            "cores": len(os.sched_getaffinity(0)), "system": platform.platform(), "python": platform.python_version(),
            "omni-bus": importlib.metadata.version("omni-bus"),
        },
        "load_1min": [before, round(os.getloadavg()[0], 1)],
        "peak_audio_s_per_s": PEAK,
        "waiting": WAITING,
        "passes": rows,
    }  # fmt: skip
    print(table(rows))
    if said.out is not None:
        said.out.mkdir(parents=True, exist_ok=True)
        path = said.out / f"{result['date']}-overload"
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(result))


def page(result: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    before, behind = result["load_1min"]
    return (
        f"# Overload, {result['date']}\n\n`{result['command']}`: {facts}; load average {before} before, {behind} behind. The load's own process "
        f"runs on the same cores.\n\nA probe whose sink makes {PEAK:g} s of audio in a second at most, {WAITING} requests may wait; "
        f"1× is {PEAK / (WORDS * FRAME_S):g} answers of {WORDS * FRAME_S:g} s a second. An answer has a gap where its listener waited for more than "
        f"{1000 * GAP_S:g} ms in all after the first packet.\n\n{table(result['passes'])}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
