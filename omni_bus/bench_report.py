"""The figures of `omni-bus bench`: percentiles of each measure, one row a pass, and how both are printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from omni_bus.bench_load import Measured
from omni_bus.speech_stream import underrun_s

PERCENTILES = (50, 95, 99)
UNITS = {"ttft": "ms", "ttfp": "ms", "tpot": "ms", "e2el": "ms", "rtf": "", "underrun": "ms", "audio": "s"}


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not exceeded by `percent` of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summarise(
    concurrency: int | None, measured: Sequence[Measured], seconds: float, *, rate: float | None = None
) -> dict[str, Any]:
    """Milliseconds, seconds of audio, and rates over the whole pass. Failed requests count in `errors` only.

    concurrency: streams at once in a closed loop; None where requests arrived at `rate` a second.
    """
    good = [one for one in measured if one.error is None]
    samples = {
        "ttft": [1e3 * one.first_text_s for one in good if one.first_text_s is not None],
        "ttfp": [1e3 * one.packets[0][0] for one in good if one.packets],
        "tpot": [1e3 * gap for one in good if (gap := _token_gap(one)) is not None],
        "e2el": [1e3 * one.end_s for one in good],
        "rtf": [one.end_s / one.audio_s for one in good if one.packets],
        "underrun": [1e3 * underrun_s(one.packets) for one in good if one.packets],
        "audio": [one.audio_s for one in good if one.packets],
    }
    return {
        "concurrency": concurrency,
        "rate": rate,
        "requests": len(measured),
        "seconds": round(seconds, 3),
        "requests_per_s": len(good) / seconds,
        "audio_s_per_s": sum(one.audio_s for one in good) / seconds,
        "errors": [one.error for one in measured if one.error is not None],
        "prompt_tokens": percentile([one.prompt_tokens for one in good], 50) if good else 0,
        "cached_tokens": percentile([one.cached_tokens for one in good], 50) if good else 0,
        "first_chunk_ms": first_chunks(good),
        "figures": {
            name: {f"p{percent}": round(percentile(values, percent), 4) for percent in PERCENTILES}
            | {"mean": round(sum(values) / len(values), 4)}
            for name, values in samples.items()
            if values
        },
    }


def first_chunks(measured: Sequence[Measured]) -> dict[str, float]:
    """Edge → p50 of the milliseconds from the request's arrival at the broker to the edge's first chunk, earliest edge first."""
    by_edge: dict[str, list[float]] = {}
    for one in measured:
        for edge, at in one.first_chunks_ms.items():
            by_edge.setdefault(edge, []).append(at)
    split = {edge: round(percentile(values, 50), 2) for edge, values in by_edge.items()}
    return dict(sorted(split.items(), key=lambda item: item[1]))


def row(summary: dict[str, Any]) -> dict[str, Any]:
    """The pass in ten figures. `rtf` is the mean; a figure that the pass did not have is None."""

    def figure(name: str, which: str) -> float | None:
        value = summary["figures"].get(name, {}).get(which)
        return None if value is None else round(value, 4 if name == "rtf" else 1)

    return {
        "concurrency": summary["concurrency"],
        "ttft_p50_ms": figure("ttft", "p50"),
        "ttfp_p50_ms": figure("ttfp", "p50"),
        "ttfp_p95_ms": figure("ttfp", "p95"),
        "e2el_p50_ms": figure("e2el", "p50"),
        "rtf": figure("rtf", "mean"),
        "audio_s_per_s": round(summary["audio_s_per_s"], 2),
        "requests_per_s": round(summary["requests_per_s"], 3),
        "underrun_p50_ms": figure("underrun", "p50"),
        "underrun_p95_ms": figure("underrun", "p95"),
    }


def markdown(named: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> str:
    """Rows of several servers in one table, those of one concurrency together. named: (server, its rows)."""

    def cell(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    lines = [
        "| c | server | TTFT p50 ms | TTFP p50 / p95 ms | E2EL p50 ms | RTF | audio s/s | req/s | underrun p50 / p95 ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    counts = sorted({one["concurrency"] for _, rows in named for one in rows if one["concurrency"] is not None})
    for count in counts:
        for name, rows in named:
            lines += [
                f"| {count} | {name} | {cell(one['ttft_p50_ms'])} | {cell(one['ttfp_p50_ms'])} / {cell(one['ttfp_p95_ms'])} "
                f"| {cell(one['e2el_p50_ms'])} | {cell(one['rtf'], 3)} | {cell(one['audio_s_per_s'], 1)} "
                f"| {cell(one['requests_per_s'], 2)} | {cell(one['underrun_p50_ms'])} / {cell(one['underrun_p95_ms'])} |"
                for one in rows
                if one["concurrency"] == count
            ]
    return "\n".join(lines)


def report(summary: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    good = summary["requests"] - len(summary["errors"])
    load = f"concurrency {summary['concurrency']}" if summary["rate"] is None else f"{summary['rate']:g} requests/s"
    yield (
        f"{load}: {good} of {summary['requests']} requests in {summary['seconds']:.1f} s, "
        f"{summary['requests_per_s']:.2f} req/s, {summary['audio_s_per_s']:.1f} audio-s/s"
    )
    yield f"  {'':<12}" + "".join(f"{f'p{percent}':>10}" for percent in PERCENTILES)
    for name, figures in summary["figures"].items():
        digits = 3 if name == "rtf" else 2 if name == "audio" else 1
        label = name.upper() if name not in ("underrun", "audio") else name
        unit = f" {UNITS[name]}" if UNITS[name] else ""
        yield f"  {label + unit:<12}" + "".join(
            f"{value:>10.{digits}f}" for value in (figures[f"p{percent}"] for percent in PERCENTILES)
        )
    if summary["cached_tokens"]:
        yield f"  prompt tokens, p50: {summary['prompt_tokens']}, of which the server had {summary['cached_tokens']} from other requests"
    if summary["first_chunk_ms"]:
        edges = ", ".join(f"{edge} {at:.1f}" for edge, at in summary["first_chunk_ms"].items())
        yield f"  first chunk of each edge, p50 ms since the broker had the request: {edges}"


def _token_gap(one: Measured) -> float | None:
    if one.first_text_s is None or one.last_text_s is None or one.text_tokens < 2:
        return None
    return (one.last_text_s - one.first_text_s) / (one.text_tokens - 1)
