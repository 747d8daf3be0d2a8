"""Throughput and time to the first packet with 1, 2 and 4 replicas of one stage, the others as they are; replicas come by `omni-bus scale`.

Of the probe, one stage at a time takes a set time for each step without the CPU, as a stage on a GPU of its own does: what is lost
to the bus shows against so many times one replica's throughput. The stages of the tiny Qwen3-Omni compute on this machine's cores,
which replicas share: there, no more can be gained than cores are idle.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import time
from typing import Any

from bench.h200 import steps as counted
from bench.scale.server import PROBE, PROBE_STAGES, TINY_STAGES, Server, one_thread, serving, tiny_qwen
from omni_bus.bench_load import Load, closed_loop
from omni_bus.bench_report import summarise
from omni_bus.http_client import first_model

COUNTS = (1, 2, 4)
STEP_MS, BATCH = 40, 4
STREAMS, WORDS, REQUESTS = 24, 24, 48
HEARTBEAT_S = 2.2  # a little more than a worker's
PACKET_S = 0.08  # of sound in one word of the probe
TINY_STREAMS, TINY_REQUESTS, TINY_TOKENS, TINY_FRAMES = 8, 16, 24, 48
TINY_BATCH = 16  # configs/qwen3_omni_tiny.toml
TICKS = os.sysconf("SC_CLK_TCK")


def figures(load: Load, streams: int, requests: int) -> dict[str, Any]:
    """One pass in a closed loop, after a short one that is not counted. Raises RuntimeError where a request failed."""

    async def both() -> dict[str, Any]:
        await closed_loop(load, streams, streams // 2, first=1_000_000)
        measured, seconds = await closed_loop(load, streams, requests)
        return summarise(streams, measured, seconds)

    found = asyncio.run(both())
    if found["errors"]:
        raise RuntimeError(f"{len(found['errors'])} of {requests} requests failed: {found['errors'][0]}")
    return {
        "audio_s_per_s": round(found["audio_s_per_s"], 2),
        "ttfp_p50_ms": round(found["figures"]["ttfp"]["p50"], 1),
        "ttfp_p95_ms": round(found["figures"]["ttfp"]["p95"], 1),
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its throughput against that of the first, and that against the number of replicas."""
    first = rows[0]["audio_s_per_s"]
    return [
        {
            **row,
            "ratio": round(row["audio_s_per_s"] / first, 2),
            "efficiency": round(row["audio_s_per_s"] / first / row["replicas"], 2),
        }
        for row in rows
    ]


def scaled(server: Server, stage: str, load: Load, streams: int, requests: int, end: float) -> list[dict[str, Any]]:
    """Rows for COUNTS, as many as there is time for."""
    rows: list[dict[str, Any]] = []
    for count in COUNTS:
        if rows and time.monotonic() > end:
            break
        if count != 1:
            server.command("scale", stage, str(count))
        rows.append({"stage": stage, "replicas": count, **figures(load, streams, requests)})
    return with_ratios(rows)


def probe(end: float) -> dict[str, Any]:
    """Each stage of the probe in turn, on a server of its own."""
    rows: list[dict[str, Any]] = []
    for stage in PROBE_STAGES:
        if rows and time.monotonic() > end:
            break
        sets = [*one_thread(*PROBE_STAGES), f"stages.{stage}.step_ms={STEP_MS}", f"stages.{stage}.max_batch={BATCH}"]
        with serving(PROBE, sets) as server:
            load = server.load(model=asyncio.run(first_model(server.url)), words=WORDS)
            rows += scaled(server, stage, load, STREAMS, REQUESTS, end)
    ideal = round(BATCH / (STEP_MS / 1e3) * PACKET_S, 2)
    said = {"step_ms": STEP_MS, "max_batch": BATCH, "streams": STREAMS, "words": WORDS, "requests": REQUESTS}
    return {**said, "ideal_audio_s_per_s": ideal, "rows": rows}


def tiny(end: float) -> dict[str, Any]:
    """Each stage of the tiny Qwen3-Omni in turn, on one server; behind each, its stage has one replica again."""
    rows: list[dict[str, Any]] = []
    with tiny_qwen() as server:
        load = server.load(model=asyncio.run(first_model(server.url)), text_tokens=TINY_TOKENS, frames=TINY_FRAMES)
        spent = work(server, load)
        for stage in TINY_STAGES:
            if rows and time.monotonic() > end:
                break
            rows += scaled(server, stage, load, TINY_STREAMS, TINY_REQUESTS, end)
            if stage != TINY_STAGES[-1]:
                server.command("scale", stage, "1")
    said = {"streams": TINY_STREAMS, "text_tokens": TINY_TOKENS, "frames": TINY_FRAMES, "requests": TINY_REQUESTS}
    return {**said, "max_batch": TINY_BATCH, "cores": len(os.sched_getaffinity(0)), **spent, "rows": rows}


def work(server: Server, load: Load) -> dict[str, Any]:
    """What one replica of each stage costs a core, at one stream and at TINY_STREAMS: `work_ms`, stage → [rows of a step, milliseconds of
    it] twice; and `others`: the cores that broker, API and this process take at TINY_STREAMS."""
    points: dict[str, list[list[float]]] = {stage: [] for stage in TINY_STAGES}
    others = 0.0
    for streams in (1, TINY_STREAMS):
        asyncio.run(closed_loop(load, streams, streams, first=2_000_000))
        before, began, own = _spent(server), time.monotonic(), time.process_time()
        measured, _ = asyncio.run(closed_loop(load, streams, TINY_REQUESTS, first=3_000_000))
        took, own = time.monotonic() - began, time.process_time() - own
        behind = _spent(server)
        chunks = sum(len(one.packets) for one in measured)
        made = {
            "processor": TINY_REQUESTS,
            "thinker": TINY_REQUESTS * TINY_TOKENS,
            "talker": TINY_REQUESTS * TINY_FRAMES,
            "code2wav": chunks,
        }
        for stage in TINY_STAGES:
            steps, cpu_s = (behind[stage][index] - before[stage][index] for index in (0, 1))
            points[stage].append([round(max(1.0, made[stage] / steps), 2), round(1e3 * cpu_s / steps, 3)])
        others = (own + sum(behind[role][1] - before[role][1] for role in ("broker", "api.0"))) / took
    return {"work_ms": points, "others": round(others, 3)}


def _spent(server: Server) -> dict[str, tuple[int, float]]:
    """Stage or process → (steps run, as of the last heartbeat, which is waited for; seconds of CPU)."""
    time.sleep(HEARTBEAT_S)
    steps = asyncio.run(counted(server.url))
    found = {stage: (steps[stage][0], _cpu_s(server.pid(f"{stage}.0"))) for stage in TINY_STAGES}
    return found | {role: (0, _cpu_s(server.pid(role))) for role in ("broker", "api.0")}


def _cpu_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
