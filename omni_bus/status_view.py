"""What /v1/status says, in the words and columns in which people read it: `omni-bus status` and `omni-bus top` show the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    name: str
    cell: Callable[[Json, Json], str]  # (replica, its load) → what stands there
    rank: int = 0  # where a terminal is too narrow for all, those of the highest rank go first; 0: stays
    number: bool = True


def _state(replica: Json, load: Json) -> str:
    state = str(replica["state"])
    return f"{state} {replica.get('progress', 0.0):.0%}" if state == "loading" else state


def _of(what: str) -> Callable[[Json, Json], str]:
    def cell(replica: Json, load: Json) -> str:
        total = load.get(f"{what}_total", 0)
        return f"{load.get(f'{what}_used', 0)}/{total}" if total else "-"

    return cell


def _figure(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


def _busy(replica: Json, load: Json) -> str:
    share = load.get("busy")  # of the time since the last look: `shares`
    return f"{load.get('busy_s', 0.0):.1f} s" if share is None else f"{share:.0%}"


COLUMNS = (
    Column("stage", lambda replica, load: str(replica["stage"]), rank=1, number=False),
    Column("worker", lambda replica, load: str(replica["worker"]), number=False),
    Column("host", lambda replica, load: str(replica["host"]), rank=13, number=False),
    Column("pid", lambda replica, load: str(replica["pid"]), rank=16),
    Column("device", lambda replica, load: str(replica["device"]), rank=7, number=False),
    Column("state", _state, number=False),
    Column("requests", lambda replica, load: str(replica.get("requests", 0)), rank=9),
    Column("waiting", lambda replica, load: str(load.get("waiting", 0)), rank=3),
    Column("queued", lambda replica, load: str(load.get("queued", 0)) if load.get("per_step") else "-", rank=12),
    Column("running", lambda replica, load: str(load.get("running", 0))),
    Column("batch", lambda replica, load: str(load.get("batch", 0)), rank=8),
    Column("streams", lambda replica, load: str(replica.get("streams", 0)), rank=14),
    Column("lead", lambda replica, load: _figure("{:.1f} s", load.get("lead_s")), rank=5),
    Column("next rtf", lambda replica, load: _figure("{:.2f}", replica.get("predicted_rtf")), rank=10),
    Column("busy", _busy, rank=6),
    Column("kv", _of("kv_blocks"), rank=4),
    Column("slots", _of("slots"), rank=15),
    Column("restarts", lambda replica, load: str(replica.get("restarts", 0)), rank=2),
)


def replicas(status: Json) -> list[Json]:
    """In the order of the pipeline's stages."""
    return [replica for stage in status["stages"] for replica in stage["replicas"]]


def cells(replica: Json, columns: Sequence[Column] = COLUMNS) -> list[str]:
    load = replica.get("load") or {}
    return [column.cell(replica, load) for column in columns]


def shares(status: Json, before: Json) -> Json:
    """`status` with `busy` in each load: the share of the time since `before` that its process spent in steps, from 0 to 1."""
    seconds = status["uptime_s"] - before["uptime_s"]
    known = {(one["worker"], one["stage"], one["pid"]): one.get("load") for one in replicas(before)}

    def with_share(replica: Json) -> Json:
        load, was = replica.get("load"), known.get((replica["worker"], replica["stage"], replica["pid"]))
        if not load or not was or seconds <= 0:
            return replica
        share = (load.get("busy_s", 0.0) - was.get("busy_s", 0.0)) / seconds
        return {**replica, "load": {**load, "busy": min(1.0, max(0.0, share))}}

    return {**status, "stages": [{**stage, "replicas": [*map(with_share, stage["replicas"])]} for stage in status["stages"]]}


def headline(status: Json) -> str:
    state = "ready" if status["ready"] else f"not ready: {', '.join(status['missing'])}"
    if status.get("stopping"):
        state = "draining: nothing new is taken"
    return f"{status['model']} (pipeline {status['pipeline']}): {state}, up {_duration(status['uptime_s'])}"


def summary(status: Json) -> Iterator[tuple[str, str]]:
    """(what, its figures), for the server as a whole."""
    yield "requests", f"now: {_counts(status['requests'])};  ended: {_counts(status['ended'])}"
    waiting = status.get("waiting") or {}
    if any(waiting.values()):
        told = f"; one more is told to come back in {status['retry_after_s']:.0f} s" if status.get("retry_after_s") else ""
        yield "waiting", f"for their start: {_counts(waiting)}{told}"
    recent = status["recent"]
    ttfp, rtf, underrun = recent["ttfp_s"], recent["rtf"], recent["underrun"]
    if ttfp is None:
        return
    parts = [f"TTFP p50 {ttfp['p50'] * 1e3:.0f} ms, p95 {ttfp['p95'] * 1e3:.0f} ms"]
    if rtf is not None:
        parts.append(f"RTF p50 {rtf['p50']:.2f}, p95 {rtf['p95']:.2f}")
    silence = f" of {underrun['seconds']:.2f} s in all" if underrun["count"] else ""
    parts.append(f"{underrun['count']} underruns{silence}")
    yield "speech", f"{'; '.join(parts)}  ({ttfp['count']} answers of the last {recent['window_s'] / 60:.0f} minutes)"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "none"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
