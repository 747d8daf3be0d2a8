"""The picture of `omni-bus bench`: time to first packet and underrun over concurrency, as SVG, beside a baseline's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 460, 320  # of one panel, with its margins
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 44, 46
LEGEND = 22  # below the panels, for each server
COLOURS = ("#0b6e4f", "#b5482a", "#3b5ba5", "#8a6d1d")


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    name: str
    rows: Sequence[dict[str, Any]]  # as bench_report.row makes them

    def points(self, key: str) -> list[tuple[float, float]]:
        """(concurrency, milliseconds), in order; rows without the one or the other are left out."""
        found = [(row["concurrency"], row.get(key)) for row in self.rows]
        return sorted((float(x), float(y)) for x, y in found if x is not None and y is not None)


def picture(series: Sequence[Series], title: str) -> str:
    """An SVG document. Solid lines are medians, dashed ones the 95th percentile; concurrency is on a logarithmic axis."""
    width, height = 2 * WIDTH, HEIGHT + 34 + LEGEND * len(series)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{width / 2:g}" y="20" text-anchor="middle" font-size="15">{escape(title)}</text>',
        *_panel(series, "ttfp", "time to first packet, ms", 0),
        *_panel(series, "underrun", "silence while listening (underrun), ms", WIDTH),
    ]
    for index, one in enumerate(series):
        y = HEIGHT + 24 + LEGEND * index
        lines.append(_line([(LEFT, y), (LEFT + 36, y)], _colour(index), dashed=False))
        lines.append(f'<text x="{LEFT + 44}" y="{y + 4}">{escape(one.name)}: p50 solid, p95 dashed</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(series: Sequence[Series], measure: str, heading: str, x0: int) -> Iterator[str]:
    keys = (f"{measure}_p50_ms", f"{measure}_p95_ms")
    points = [point for one in series for key in keys for point in one.points(key)]
    counts = sorted({x for x, _ in points}) or [1.0]
    top = _ceiling(max((y for _, y in points), default=1.0))
    low, high = math.log2(counts[0]), math.log2(max(counts[-1], counts[0] * 2))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return x0 + LEFT + inner_width * (math.log2(x) - low) / (high - low), TOP + inner_height * (1 - y / top)

    yield f'<text x="{x0 + LEFT}" y="{TOP - 10}">{escape(heading)}</text>'
    for step in range(5):
        value = top * step / 4
        left, y = place(counts[0], value)
        yield f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{left + inner_width:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for count in counts:
        x, y = place(count, 0.0)
        yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{count:g}</text>'
    yield f'<text x="{x0 + LEFT + inner_width / 2:g}" y="{HEIGHT - 10}" text-anchor="middle">streams at once</text>'
    for index, one in enumerate(series):
        for key, dashed in zip(keys, (False, True), strict=True):
            placed = [place(x, y) for x, y in one.points(key)]
            yield _line(placed, _colour(index), dashed=dashed)
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(index)}"/>' for x, y in placed)


def _line(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'


def _ceiling(value: float) -> float:
    """The next of 1, 2, 4, 6, 8 × a power of ten: its quarters are short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 6, 8, 10) if power * step >= value)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
