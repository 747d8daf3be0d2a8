"""The figures of `omni-bus bench`: percentiles of each measure, and how they are printed."""

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


def summarise(concurrency: int, measured: Sequence[Measured], seconds: float) -> dict[str, Any]:
    """Milliseconds, seconds of audio, and rates over the whole pass. Failed requests count in `errors` only."""
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
        "requests": len(measured),
        "seconds": round(seconds, 3),
        "requests_per_s": len(good) / seconds,
        "audio_s_per_s": sum(one.audio_s for one in good) / seconds,
        "errors": [one.error for one in measured if one.error is not None],
        "figures": {
            name: {f"p{percent}": round(percentile(values, percent), 4) for percent in PERCENTILES}
            for name, values in samples.items()
            if values
        },
    }


def report(summary: dict[str, Any]) -> Iterator[str]:
    """Lines for people."""
    good = summary["requests"] - len(summary["errors"])
    yield (
        f"concurrency {summary['concurrency']}: {good} of {summary['requests']} requests in {summary['seconds']:.1f} s, "
        f"{summary['requests_per_s']:.2f} req/s, {summary['audio_s_per_s']:.1f} audio-s/s"
    )
    yield f"  {'':<12}" + "".join(f"{f'p{percent}':>10}" for percent in PERCENTILES)
    for name, figures in summary["figures"].items():
        digits = 3 if name == "rtf" else 2 if name == "audio" else 1
        label = name.upper() if name not in ("underrun", "audio") else name
        unit = f" {UNITS[name]}" if UNITS[name] else ""
        yield f"  {label + unit:<12}" + "".join(f"{value:>10.{digits}f}" for value in figures.values())


def _token_gap(one: Measured) -> float | None:
    if one.first_text_s is None or one.last_text_s is None or one.text_tokens < 2:
        return None
    return (one.last_text_s - one.first_text_s) / (one.text_tokens - 1)
