"""Replicas, the broker's capacity, workers that attach, processes that are killed: the figures of scale, on this machine.

    python -m bench.scale [--only broker,replicas,tiny,attach,kill] [--runs 3] [--budget 500] [--out bench/results]

The load runs on the machine that it measures; the load average stands with the figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.hop import machine
from bench.scale import attach, broker_load, kill, replicas
from bench.scale.report import report
from omni_bus.errors import OmniBusError

PARTS: dict[str, tuple[float, Callable[[int, float], dict[str, Any]]]] = {  # name → share of the time, what measures it
    "broker": (0.2, broker_load.measure),
    "replicas": (0.25, lambda runs, end: replicas.probe(end)),
    "tiny": (0.25, lambda runs, end: replicas.tiny(end)),
    "attach": (0.1, attach.measure),
    "kill": (0.2, kill.measure),
}

WHERE = {"replicas": "replicas.probe", "tiny": "replicas.tiny"}  # in the result, where not under its own name


def _parts(said: str) -> list[str]:
    names = said.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f'no part "{unknown[0]}"; there are {", ".join(PARTS)}')
    return [name for name in PARTS if name in names]


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,…", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--runs", type=int, default=3, help="of what is repeated: ladders, workers, rounds of kills (default: 3)"
    )
    parser.add_argument("--budget", type=float, default=500.0, metavar="S", help="seconds; what comes too late is left out")
    parser.add_argument("--out", type=pathlib.Path, help="folder for DATE-scale.md and DATE-scale.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "command": f"python -m bench.scale --only {','.join(arguments.only)} --runs {arguments.runs} --budget {arguments.budget:g}",
        "machine": machine(),
    }
    end = time.monotonic()
    shares = sum(PARTS[name][0] for name in arguments.only)
    failed = False
    for name in arguments.only:
        share, measure = PARTS[name]
        end += arguments.budget * share / shares  # what one part leaves over is the next one's
        print(f"{name} …", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            found = measure(arguments.runs, end)
        except (RuntimeError, OmniBusError, OSError, subprocess.SubprocessError) as error:
            print(f"{name} failed, and is left out: {error!r}", file=sys.stderr, flush=True)
            failed = True
        else:
            found["took_s"] = round(time.monotonic() - began, 1)
            group, _, part = WHERE.get(name, name).partition(".")
            result.update({group: {**result.get(group, {}), part: found}} if part else {group: found})
    result["load_1min_after"] = round(os.getloadavg()[0], 2)
    text = report(result)
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        stem = arguments.out / f"{result['date']}-scale"
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
