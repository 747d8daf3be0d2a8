"""End of input → first audio of the quickstart pipeline, through a running server on this machine.

python -m bench.quickstart [--runs 20] [--out bench/results/quickstart.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import sys

from bench.demo import free_port, serving
from bench.spoken import QUESTION, ask, spoken

MAX_TOKENS = 48  # of an answer: what comes after its first clause does not change the figures
SPOKEN = (QUESTION, "Please tell me a short story about a cat.", "Who are you?", "What is the weather like in winter?")


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all are at or below."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share * 100) // 100) - 1)]


def machine() -> dict[str, object]:
    cpu = platform.processor()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="turns for each question")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `omni-bus up`")
    parser.add_argument("--out", type=pathlib.Path, help="where the result goes, as JSON")
    arguments = parser.parse_args()
    questions = {text: spoken(text) for text in SPOKEN}
    load = round(os.getloadavg()[0], 2)
    rows = []
    with serving(free_port(0), *arguments.set) as server:
        ask(server.address, questions[QUESTION])
        for text, wav in questions.items():
            turns = [ask(server.address, wav, max_tokens=MAX_TOKENS) for _ in range(arguments.runs)]
            audio = [turn.first_audio_s for turn in turns if turn.first_audio_s is not None]
            if len(audio) != len(turns):
                print(f"{text!r}: {len(turns) - len(audio)} of {len(turns)} turns brought no audio", file=sys.stderr)
                return 1
            first_text = [turn.first_text_s for turn in turns if turn.first_text_s is not None]
            rows.append(
                {
                    "question": text,
                    "heard": turns[-1].heard,
                    "answer": turns[-1].text,
                    "answer_audio_s": round(len(turns[-1].pcm) / 48_000, 2),
                    "first_audio_s": {"p50": round(percentile(audio, 0.5), 3), "p95": round(percentile(audio, 0.95), 3)},
                    "first_text_s": {
                        "p50": round(percentile(first_text, 0.5), 3),
                        "p95": round(percentile(first_text, 0.95), 3),
                    },
                    "end_to_end_s": {"p50": round(percentile([turn.total_s for turn in turns], 0.5), 3)},
                }
            )
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    result = {
        "benchmark": "quickstart: end of input to first audio, over HTTP on the same machine",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine() | {"load_average": {"before": load, "after": round(os.getloadavg()[0], 2)}},
        "settings": arguments.set,
        "runs": arguments.runs,
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
