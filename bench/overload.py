"""A server under half, once and twice what it can carry, with admission and without: throughput, continuity, who was refused.

    python -m bench.overload [--of probe,tiny] [--seconds 20] [--out bench/results]

The probe's sink is the one stage with a cost: a step waits 40 ms, as for a GPU, and makes 80 ms of audio for each of up to four rows. So
it makes 8 seconds of audio in a second at most, and eight streams in real time. The tiny Qwen3-Omni computes on this machine's cores, on
which the load's own process runs, too: what it can carry is measured first, by 16 streams in a closed loop without admission. Requests
arrive at random (Poisson, the same times in every pass) for answers of 3.2 s. At twice the capacity half of them cannot be served: what
matters is what becomes of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from bench.demo import ROOT, free_port
from bench.measured_server import MeasuredServer
from omni_bus.bench_load import Load, Measured, closed_loop, open_loop
from omni_bus.bench_report import percentile
from omni_bus.http_client import first_model
from omni_bus.speech_stream import underrun_s

STEP_S, FRAME_S, ROWS = 0.04, 0.08, 4
FRAMES = 40  # of an answer: words of the probe, codec frames of the model
WAITING = 8  # requests that may wait
CROWD, CROWD_REQUESTS = 16, 32  # the closed loop that finds what the tiny model can carry
LIMITS = {"admission": 0.9, "without": 0.0}  # bus.admit_rtf
LOADS = (0.5, 1.0, 2.0)
READY_S = 120.0
GAP_S = 0.05  # of silence in an answer, from which it counts as broken
_RETRY = re.compile(r"try again in (\d+) s")


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What is measured: a server's configuration, what a request of it asks for, and its peak in seconds of audio a second."""

    about: str
    config: pathlib.Path
    sets: tuple[str, ...]
    fields: dict[str, Any]
    peak: float | None  # None: to be measured


def probe() -> Machine:
    peak = ROWS * FRAME_S / STEP_S
    sets = (f"stages.sink.step_ms={round(1000 * STEP_S)}", f"stages.sink.max_batch={ROWS}")
    fields = {"prompt_words": FRAMES, "text_tokens": None, "frames": None, "speech_stage": "sink"}
    about = f"a probe whose sink makes {peak:g} s of audio in a second at most"
    return Machine(about, ROOT / "configs" / "probe.toml", sets, fields, peak)


def tiny(checkpoint: pathlib.Path) -> Machine:
    """Writes the checkpoint."""
    write = ["fixture", "qwen3-omni", str(checkpoint), "--size", "tiny", "--seed", "2"]
    subprocess.run([sys.executable, "-m", "omni_bus", *write], check=True, capture_output=True)
    fields = {"prompt_words": 20, "text_tokens": 24, "frames": FRAMES + 1, "speech_stage": "talker"}
    about = "the tiny Qwen3-Omni, all stages on this machine's cores"
    return Machine(
        about, ROOT / "configs" / "qwen3_omni_tiny.toml", (f"model.path={checkpoint}", "model.name=tiny"), fields, None
    )


@contextlib.contextmanager
def served(machine: Machine, admit_rtf: float) -> Iterator[Load]:
    """A server, and a request of it."""
    sets = [*machine.sets, f"bus.admit_rtf={admit_rtf}", f"bus.max_waiting={WAITING}"]
    with tempfile.TemporaryDirectory(prefix="ob-") as scratch:
        server = MeasuredServer(machine.config, free_port(0), sets, pathlib.Path(scratch))
        try:
            if server.wait_ready(READY_S) is None:
                raise SystemExit(f"the server did not start:\n{server.tails()}")
            yield Load(
                url=server.address, model=asyncio.run(first_model(server.address)), ours=True, prompt=None, audio=None, speech=True,
                seed=7, **machine.fields,
            )  # fmt: skip
        finally:
            server.stop()


def peak_of(load: Load) -> float:
    """Seconds of audio a second that a crowd gets, whatever its listeners hear; behind a pass that is not counted."""
    asyncio.run(closed_loop(load, CROWD, CROWD, first=1_000_000))
    measured, seconds = asyncio.run(closed_loop(load, CROWD, CROWD_REQUESTS))
    return sum(one.audio_s for one in measured) / seconds


def passes(machine: Machine, seconds: float) -> Iterator[dict[str, Any]]:
    """Each load on a server of its own kind of admission."""
    peak = machine.peak
    for name in reversed(LIMITS):  # without admission first: that is where a peak is measured
        with served(machine, LIMITS[name]) as load:
            peak = peak or peak_of(load)
            for share in LOADS:
                rate = share * peak / (FRAMES * FRAME_S)
                measured, took = asyncio.run(open_loop(load, rate, max(1, round(rate * seconds))))
                yield {
                    "admission": name,
                    "load": share,
                    "per_s": round(rate, 3),
                    "peak_audio_s_per_s": round(peak, 2),
                    **summary(measured, took),
                }


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
    """Markdown. Throughput is also given as a share of the highest of any pass, and of any in which no answer had a gap."""
    lines = [
        "| admission | load | requests | answered | refused | Retry-After s | audio s/s | of the peak | of the peak without gaps | with a gap | gap p95 s | TTFP p50 s | p99 s |",
        "| --- " * 13 + "|",
    ]
    peak = max(row["audio_s_per_s"] for row in rows)
    whole = max((row["audio_s_per_s"] for row in rows if not row["broken"]), default=0.0)
    for row in rows:
        told = "–".join(map(str, row["retry_after_s"])) if row["retry_after_s"] else "-"
        cells = (
            row["admission"], f"{row['load']:g}×", row["requests"], row["answered"], row["refused"], told, row["audio_s_per_s"],
            f"{row['audio_s_per_s'] / peak:.0%}" if peak else "-", f"{row['audio_s_per_s'] / whole:.0%}" if whole else "-",
            row["broken"], row["gap_p95_s"], row["ttfp_p50_s"], row["ttfp_p99_s"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", default="probe,tiny", help="probe, tiny or both (default)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each pass")
    parser.add_argument("--out", type=pathlib.Path, help="a directory for the figures as JSON and Markdown")
    said = parser.parse_args(arguments)
    before = round(os.getloadavg()[0], 1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in said.of.split(","):
            machine = probe() if name == "probe" else tiny(pathlib.Path(scratch) / "tiny")
            rows = []
            for row in passes(machine, said.seconds):
                rows.append(row)
                told = f"{name}, {row['admission']}, {row['load']:g}x: {row['answered']} answered, {row['refused']} refused"
                print(told, file=sys.stderr, flush=True)
            found[name] = {"about": machine.about, "passes": rows}
            print(f"{machine.about}:\n\n{table(rows)}\n")
    result = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(("python", "-m", "bench.overload", *arguments)),
        "machine": {
            "cores": len(os.sched_getaffinity(0)), "system": platform.platform(), "python": platform.python_version(),
            "omni-bus": importlib.metadata.version("omni-bus"),
        },
        "load_1min": [before, round(os.getloadavg()[0], 1)],
        "waiting": WAITING,
        **found,
    }  # fmt: skip
    if said.out is not None:
        said.out.mkdir(parents=True, exist_ok=True)
        path = said.out / f"{result['date']}-overload"
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(result, found))


def page(result: dict[str, Any], found: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    before, behind = result["load_1min"]
    lines = [
        f"# Overload, {result['date']}",
        f"`{result['command']}`: {facts}; load average {before} before, {behind} behind. The load's own process runs on the same cores.",
        f"{WAITING} requests may wait. An answer is {FRAMES * FRAME_S:g} s of audio, and has a gap where its listener waited for more than "
        f"{1000 * GAP_S:g} ms in all after the first packet.",
    ]
    for one in found.values():
        peak = one["passes"][0]["peak_audio_s_per_s"]
        lines += [
            f"## {one['about'][0].upper()}{one['about'][1:]}",
            f"1× is {peak / (FRAMES * FRAME_S):.2g} answers a second, {peak:g} s of audio a second.",
            table(one["passes"]),
        ]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
