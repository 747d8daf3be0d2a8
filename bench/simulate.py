"""Scale by simulation: the broker's own routing, affinity, admission and lifecycle, between stages that take measured times.

    python -m bench.simulate [--only beside,set,broker,replicas,policies,affinity,overload,slow,pods] [--seed 0] [--scale 1] [--out DIR]
    python -m bench.simulate --only beside --scale-results bench/results/DATE-scale.json
    python -m bench.simulate --measure bench/results/DATE-scale.json       # what a broker event and a request cost, on this machine

Nothing is started: a run of a minute of simulated time takes seconds to minutes, and is the same for the same seed. What is real and what
is not: bench/simulation/server.py; where the step times come from: bench/simulation/profiles.toml. Not simulated: the API processes, failures of
processes, and jitter of steps, so that the tails (p95, p99) are those of waiting and batching alone.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from bench.simulation import beside, broker_cost, experiments, report, step_times
from bench.simulation.experiments import Bench, Row
from bench.simulation.pods import pods, told

MILLION = 1_000_000
EXPERIMENTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "set": experiments.one_set,
    "broker": experiments.broker_limit,
    "replicas": experiments.replicas,
    "policies": experiments.by_policy,
    "affinity": experiments.affinity,
    "overload": experiments.overload,
    "slow": experiments.slow_overload,
}
PARTS = ("beside", *EXPERIMENTS, "pods")


def _parts(said: str) -> list[str]:
    names = said.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f'no part "{unknown[0]}"; there are {", ".join(PARTS)}')
    return [name for name in PARTS if name in names]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,…", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--profile", default="h200", choices=sorted(step_times.profiles()), help="the machine (profiles.toml)")
    parser.add_argument(
        "--steps", type=pathlib.Path, metavar="FILE", help="a result of bench/h200.py, in place of the profile's"
    )
    parser.add_argument("--event-us", type=float, help="of the broker's core for an event; default: as measured (broker.json)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the simulated time: below 1 is quicker and noisier")
    parser.add_argument(
        "--scale-results", type=pathlib.Path, metavar="FILE", help="of bench.scale, to print the prediction beside"
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder for DATE-simulation.md and DATE-simulation.json")
    parser.add_argument(
        "--measure", type=pathlib.Path, metavar="FILE", help="write broker.json anew, from this result of bench.scale"
    )
    return parser.parse_args()


def run(arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every part's rows by name, saved after each; what a part is about stands in its function's docstring."""
    profile = step_times.profiles()[arguments.profile]
    if arguments.steps:
        profile = msgspec.structs.replace(profile, results=str(arguments.steps.resolve().relative_to(step_times.ROOT)))
    cost = broker_cost.read()
    if arguments.event_us:
        cost = broker_cost.with_event_us(cost, arguments.event_us)
    times = step_times.read(profile)
    bench = Bench(times, cost, arguments.seed, arguments.scale, lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    found: dict[str, Any] = {}
    for name in arguments.only:
        started = time.perf_counter()
        if name == "beside":
            found[name] = {f"one card, {arguments.profile}": beside.card(times, cost)}
            if arguments.scale_results:
                probe = step_times.read(step_times.profiles()["probe"])
                found[name]["replicas of the probe"] = beside.scaled(probe, cost, arguments.scale_results)
                tiny = step_times.read(step_times.profiles()["tiny"])
                if pairs := beside.shared(tiny, cost, arguments.scale_results):
                    found[name]["replicas of the tiny Qwen3-Omni"] = pairs
        elif name == "slow":
            tiny = step_times.read(step_times.profiles()["tiny"])
            found[name] = list(EXPERIMENTS[name](Bench(tiny, cost, arguments.seed, arguments.scale, bench.told)))
        elif name == "pods":
            found[name] = _pods(bench)
        else:
            found[name] = list(EXPERIMENTS[name](bench))
        save(found)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return found


def _pods(bench: Bench) -> list[str]:
    """A million listeners: events of a second of audio from a run of one set, the set's peak from what was measured."""
    _, figures = bench.row("one set", experiments.pod_run(), experiments.FREE)
    a_second = figures.broker_events_per_s / figures.audio_s_per_s
    peak = max((row["audio_s_per_s"] for row in bench.times.measured), default=figures.audio_s_per_s)
    return [
        told(pods(MILLION, events_per_audio_s=a_second / less, event_us=bench.cost.event_us, set_audio_s_per_s=peak))
        + (f" ({less:g} times fewer events for the same audio.)" if less > 1 else "")
        for less in (1.0, 2.0, 4.0)
    ]


def text(found: dict[str, Any], about: dict[str, str]) -> str:
    lines = [
        f"# Scale by simulation, {about['date']}",
        "",
        f"`{about['command']}`, commit {about['commit']}",
        "",
        about["profile"],
        "",
        about["costs"],
        "",
    ]
    for name, rows in found.items():
        said = EXPERIMENTS[name].__doc__ if name in EXPERIMENTS else ""
        lines += [f"## {name}", "", *([str(said).splitlines()[0], ""] if said else [])]
        if name == "beside":
            for what, of in rows.items():
                lines += [f"{what}:", "", *report.pairs(of), ""]
        elif name == "pods":
            lines += [f"- {line}" for line in rows] + [""]
        else:
            lines += [*report.table(rows), ""]
    return "\n".join(lines)


def main() -> int:
    arguments = _arguments()
    if arguments.measure:
        cost = broker_cost.measured(arguments.measure)
        (step_times.HERE / "broker.json").write_bytes(msgspec.json.format(msgspec.json.encode(cost), indent=1) + b"\n")
        print(cost.about)
        return 0
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    about = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": f"python -m bench.simulate {' '.join(sys.argv[1:])}".strip(),
        "commit": commit or "unknown",
        "profile": f"Step times: {step_times.profiles()[arguments.profile].about}.",
        "costs": f"Broker: {broker_cost.read().about}.",
    }

    def save(found: dict[str, Any]) -> None:
        if not arguments.out:
            return
        stem = arguments.out / f"{about['date']}-simulation"
        stem.with_suffix(".md").write_text(text(found, about))
        stem.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode({**about, **found}), indent=1) + b"\n")

    print(text(run(arguments, save), about))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
