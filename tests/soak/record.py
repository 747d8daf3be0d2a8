"""What a soak found: a table for who watches, and a record for bench/results, one run a seed."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.soak.held import Held
from tests.soak.operators import Done
from tests.soak.strikes import Fault

TITLE = "The soak"
VERSIONS = ("omni-bus", "torch", "transformers", "pyzmq", "aiohttp")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One soak."""

    pipeline: str
    seed: int
    minutes: float
    far_stage: str
    rounds: int
    faults: Sequence[Fault]
    commands: Sequence[Done]
    brought: int
    ends: Mapping[str, int]
    round_s: Sequence[float]  # until all 16 were served again, once all processes were back
    gaps_before: Sequence[float]  # ms
    gaps: Sequence[float]
    before: Held
    after: Held
    wrong: Sequence[str]

    def fields(self) -> dict[str, Any]:
        return {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "pipeline": self.pipeline,
            "seed": self.seed,
            "minutes": self.minutes,
            "far_stage": self.far_stage,
            "rounds": self.rounds,
            "faults": faults_by_kind(self.faults),
            "commands": [dataclasses.asdict(command) for command in self.commands],
            "far_worker_brought": self.brought,
            "requests": dict(self.ends),
            "all_served_after_round_s": _spread(self.round_s),
            "underrun_ms": {"without_faults": _spread(self.gaps_before), "not_hit_by_a_fault": _spread(self.gaps)},
            "before": {"segments_mib": self.before.shared >> 20, **self.before.rows()},
            "after": {"segments_mib": self.after.shared >> 20, **self.after.rows()},
            "wrong": list(self.wrong),
        }


def machine() -> dict[str, str]:
    return {
        "cores": str(os.cpu_count()),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in VERSIONS},
        "load_average": f"{os.getloadavg()[0]:.1f}",
    }


def faults_by_kind(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    by_kind: dict[tuple[str, str], list[Fault]] = collections.defaultdict(list)
    for fault in faults:
        by_kind[fault.way, fault.kind].append(fault)
    return [
        {
            "way": way,
            "victim": kind,
            "count": len(some),
            "back_s": _spread([fault.back_s for fault in some if fault.back_s is not None]),
            "all_served_s": _spread([fault.served_s for fault in some if fault.served_s is not None]),
        }
        for (way, kind), some in sorted(by_kind.items())
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    """count, p50, p95, max; empty where there is nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    figures = {"p50": statistics.median(ordered), "p95": p95, "max": ordered[-1]}
    return {"count": len(values), **{name: round(value, 2) for name, value in figures.items()}}


def table(run: dict[str, Any]) -> list[str]:
    """Markdown."""
    lines = [
        f"### Seed {run['seed']}: {run['minutes']:g} minutes on {run['pipeline']}, {run['far_stage']} brought from elsewhere",
        "",
        f"{sum(row['count'] for row in run['faults'])} faults in {run['rounds']} rounds; `omni-bus worker` was brought "
        f"{run['far_worker_brought']} times.",
        "",
        "| fault | victim | times | another in its place s p50 / max | all 16 answered again s p50 / max |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['way']} | {row['victim']} | {row['count']} | {_pair(row['back_s'])} | {_pair(row['all_served_s'])} |"
        for row in run["faults"]
    ]
    done = collections.Counter((command["command"].split()[0], command["code"]) for command in run["commands"])
    ends = sorted(run["requests"].items(), key=lambda item: -item[1])
    gaps = run["underrun_ms"]
    quiet, hit = gaps["without_faults"], gaps["not_hit_by_a_fault"]
    lines += [
        "",
        "| end of a request | |",
        "| --- | --- |",
        *(f"| {end} | {count} |" for end, count in ends),
        "",
        "Commands beside them (exit code): "
        + (", ".join(f"{count} {name} ({code})" for (name, code), count in sorted(done.items())) or "none")
        + ". After a round, once all processes were back, all 16 had a new answer within "
        + f"{_pair(run['all_served_after_round_s'])} s.",
    ]
    if quiet and hit:
        lines.append(
            f"Silence within an answer, p50 / p95 / max ms: {quiet['p50']:.0f} / {quiet['p95']:.0f} / {quiet['max']:.0f} before the "
            f"first fault ({quiet['count']} answers), {hit['p50']:.0f} / {hit['p95']:.0f} / {hit['max']:.0f} of those that no fault "
            f"hit ({hit['count']})."
        )
    lines += ["", "| idle: before → after | processes | MiB of memory | descriptors | sockets | threads |", "| --- " * 6 + "|"]
    for kind in sorted(run["before"].keys() | run["after"].keys()):
        then, now = run["before"].get(kind, {}), run["after"].get(kind, {})
        if kind != "segments_mib":
            keys = ("processes", "memory_mib", "descriptors", "sockets", "threads")
            lines.append(f"| {kind} | " + " | ".join(f"{then.get(key, 0)} → {now.get(key, 0)}" for key in keys) + " |")
    lines += [
        "",
        f"Shared memory: {run['before']['segments_mib']} → {run['after']['segments_mib']} MiB, all of it of processes that live. "
        "No request, row, KV block, slot or segment in use, before as after.",
        *(f"WRONG: {line}" for line in run["wrong"]),
    ]
    return lines


def _pair(spread: Mapping[str, float]) -> str:
    return f"{spread['p50']:.1f} / {spread['max']:.1f}" if spread else "-"


def write(directory: pathlib.Path, run: dict[str, Any]) -> None:
    """Add the run to the day's record, in place of an earlier one of the same seed."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / f"{run['date']}-soak"
    file = stem.with_suffix(".json")
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    runs = [one for one in runs if (one["pipeline"], one["seed"]) != (run["pipeline"], run["seed"])] + [run]
    file.write_text(json.dumps({"runs": sorted(runs, key=lambda one: (one["pipeline"], one["seed"]))}, indent=1) + "\n")
    told = ", ".join(f"{name} {value}" for name, value in run["machine"].items() if name != "load_average")
    lines = [
        f"# {TITLE}, {run['date']}",
        "",
        "`make soak MINUTES=8 SEED=n OUT=bench/results`: random processes of a server are killed, stopped, paused, cut off and made to fail "
        "in a step under 16 streams, with one stage's third replica brought by `omni-bus worker` over TCP, and operators' commands beside.",
        "",
        f"{told}. The load's own process runs on the same cores.",
    ]
    for one in json.loads(file.read_text())["runs"]:
        lines += ["", *table(one)]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
