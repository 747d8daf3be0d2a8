"""What `python -m bench.simulate` found, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.simulation.beside import SHOWN, Pair
from bench.simulation.experiments import Row

HEADS = (
    "",
    "asked",
    "refused",
    "TTFP p50 / p95 / p99 ms",
    "underrun p50 / p95 / p99 ms",
    "answers with a gap",
    "audio s/s",
    "events/s",
    "broker",
    "cached",
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {' | '.join(HEADS)} |"
    yield "| --- " * len(HEADS) + "|"
    for label, one in rows:
        cells = (
            label,
            f"{one.requests}",
            f"{one.refused}",
            f"{one.ttfp_p50:.0f} / {one.ttfp_p95:.0f} / {one.ttfp_p99:.0f}",
            f"{one.underrun_p50:.0f} / {one.underrun_p95:.0f} / {one.underrun_p99:.0f}",
            f"{one.silent:.1%}",
            f"{one.audio_s_per_s:.0f}",
            f"{one.broker_events_per_s:.0f}",
            f"{one.broker_utilisation:.0%}",
            f"{one.cached:.0%}" if one.cached else "-",
        )
        yield f"| {' | '.join(cells)} |"


def pairs(rows: Sequence[Pair]) -> Iterator[str]:
    """Predicted / measured, and the error of the throughput."""
    shown = [name for name in SHOWN if any(name in pair.measured for pair in rows)]
    yield f"| predicted / measured | {' | '.join(shown)} | throughput's error |"
    yield "| --- " * (len(shown) + 2) + "|"
    for pair in rows:
        cells = [f"{pair.predicted[name]:.0f} / {pair.measured.get(name, float('nan')):.0f}" for name in shown]
        yield f"| {pair.label} | {' | '.join(cells)} | {error(pair):+.0%} |"


def error(pair: Pair) -> float:
    return float(pair.predicted["audio_s_per_s"] / pair.measured["audio_s_per_s"] - 1)
