"""What `omni-bus top` draws on a terminal: one frame of a status, as wide as the terminal is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from omni_bus import status_view
from omni_bus.status_view import Column, Json

_AROUND = 9  # lines of a frame beside the replicas'
_GAP = 2  # between two columns
_STYLES = {"ready": "green", "loading": "yellow", "starting": "yellow", "draining": "magenta", "lost": "bold red"}
_LEAST = {"state": 7}  # of a column's width, where a terminal is too narrow for all of them
_FULL = 0.9  # of the KV blocks, from which on their number stands out


def frame(status: Json | None, width: int, height: int, note: str = "") -> RenderableType:
    """Of a terminal's width and height. `note`: what is wrong just now; the status is then the last that was seen, None where there was none."""
    if status is None:
        return Group(Text(note, style="bold red"), _foot())
    columns = _fitting(status, width)
    head = Text(status_view.headline(status), style="bold" if status["ready"] and not note else "bold red")
    lines = [Text.assemble((f"{name:<10}", "dim"), text) for name, text in status_view.summary(status)]
    rows = [row for stage in status["stages"] for row in _rows(stage, columns)]
    shown = rows[: max(1, height - _AROUND)]
    more = [Text(f"and {len(rows) - len(shown)} more: `omni-bus status` shows all")] if len(shown) < len(rows) else []
    noted = [Text(note, style="bold red")] if note else []
    return Group(head, *lines, *noted, _table(columns, shown), *more, _foot())


def _fitting(status: Json, width: int) -> list[Column]:
    columns = list(status_view.COLUMNS)
    rows = [[column.name for column in columns], *map(status_view.cells, status_view.replicas(status))]
    widths = {column.name: max(map(len, cells)) + _GAP for column, cells in zip(columns, zip(*rows, strict=True), strict=True)}
    while sum(widths[column.name] for column in columns) > width:
        least = max(columns, key=lambda column: column.rank)
        if least.rank == 0:
            break
        columns.remove(least)
    return columns


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        side: JustifyMethod = "right" if column.number else "left"
        table.add_column(column.name, justify=side, no_wrap=True, overflow="ellipsis", min_width=_LEAST.get(column.name))
    for row in rows:
        table.add_row(*row)
    return table


def _rows(stage: Json, columns: Sequence[Column]) -> Iterator[list[Text]]:
    if not stage["replicas"]:
        yield [Text(stage["name"]), Text("no replica", style=_STYLES["lost"])]
    for replica in stage["replicas"]:
        cells = zip(columns, status_view.cells(replica, columns), strict=True)
        yield [Text(text, style=_style(column, replica)) for column, text in cells]


def _style(column: Column, replica: Json) -> str:
    load = replica.get("load") or {}
    if column.name == "state":
        return _STYLES.get(replica["state"], "")
    if column.name == "kv" and load.get("kv_blocks_total") and load["kv_blocks_used"] > _FULL * load["kv_blocks_total"]:
        return "bold yellow"
    return "bold yellow" if column.name == "restarts" and replica.get("restarts") else ""


def _foot() -> Text:
    return Text("q or Ctrl-C ends", style="dim")
