"""The tiny Qwen3-Omni under load: what listeners notice at 1, 4 and 16 streams, through a running server on this machine.

    python -m bench.qwen3_omni_tiny [--concurrency 1,4,16] [--out bench/results]

Every answer is held to 48 tokens of text and 96 of speech (95 frames, 7.6 s). The weights are random and small; the chain of stages,
their batching and the way of each chunk are those of the real model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from bench.demo import ROOT, free_port, serving
from bench.quickstart import machine

FIGURES = ("ttft", "ttfp", "tpot", "e2el", "rtf", "underrun")
HEADINGS = ("TTFT ms", "TTFP ms", "TPOT ms", "E2EL ms", "RTF", "underrun ms")


def table(passes: list[dict[str, Any]]) -> str:
    lines = ["| streams | " + " | ".join(f"{name} p50 / p95" for name in HEADINGS) + " | audio s/s |"]
    lines.append("| --- " * (len(HEADINGS) + 2) + "|")
    for one in passes:
        cells = []
        for name in FIGURES:
            digits = 2 if name == "rtf" else 0
            figure = one["figures"][name]
            cells.append(f"{figure['p50']:.{digits}f} / {figure['p95']:.{digits}f}")
        lines.append(f"| {one['concurrency']} | " + " | ".join(cells) + f" | {one['audio_s_per_s']:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.qwen3_omni_tiny", description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--requests", type=int, help="in each pass (default: 3 x concurrency, at least 6)")
    parser.add_argument("--out", type=pathlib.Path, help="a directory for the result, as JSON and Markdown")
    arguments = parser.parse_args()
    omni_bus = [sys.executable, "-m", "omni_bus"]
    load_before = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, figures = pathlib.Path(scratch) / "tiny", pathlib.Path(scratch) / "figures.json"
        subprocess.run([*omni_bus, "fixture", "qwen3-omni", str(checkpoint), "--size", "tiny", "--seed", "2"], check=True)
        config = ROOT / "configs" / "qwen3_omni_tiny.toml"
        with serving(free_port(0), f"model.path={checkpoint}", config=config) as server:
            command = [*omni_bus, "bench", server.address, "--concurrency", arguments.concurrency, "--json", str(figures)]
            command += ["--text-tokens", "48", "--frames", "96"]
            if arguments.requests:
                command += ["--requests", str(arguments.requests)]
            subprocess.run(command, check=True)
        measured = json.loads(figures.read_text())
    for one in measured["passes"]:
        del one["each"]
    load = {"before": load_before, "after": round(os.getloadavg()[0], 2)}
    result = {**measured, "machine": machine() | {"load_average": load}}
    text = table(measured["passes"])
    print(text)
    if arguments.out:
        name = f"{datetime.date.today().isoformat()}-qwen3-omni-tiny"
        (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        about = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
        (arguments.out / f"{name}.md").write_text(
            f"# Tiny Qwen3-Omni under load, {datetime.date.today().isoformat()}\n\n"
            f"`python -m bench.qwen3_omni_tiny --concurrency {arguments.concurrency}`\n\n{about}\n\n{text}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
