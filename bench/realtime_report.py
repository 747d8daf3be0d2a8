"""The figures of bench/realtime.py: what is kept of many turns, and the tables of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.quickstart import percentile
from bench.realtime_turns import Turn

Figure = dict[str, float]


def summary(values: Sequence[float]) -> Figure:
    """p50, p95 and the largest, and of how many."""
    if not values:
        return {"n": 0}
    p50, p95 = (round(percentile(list(values), share), 1) for share in (0.5, 0.95))
    return {"p50": p50, "p95": p95, "max": round(max(values), 1), "n": len(values)}


def of_turns(turns: Sequence[Turn]) -> dict[str, Figure]:
    """By what is measured, a session's first turn ("first: …") apart from its later ones ("later: …")."""
    found: dict[str, list[float]] = {}
    for turn in turns:
        for name, value in {**turn.since, "computed": turn.computed, "prompt": turn.prompt}.items():
            found.setdefault(f"{'first' if turn.first else 'later'}: {name}", []).append(value)
    return {name: summary(values) for name, values in sorted(found.items())}


def cell(figure: Mapping[str, float] | None) -> str:
    return f"{figure['p50']:.0f} / {figure['p95']:.0f}" if figure and figure["n"] else "–"


def worst(figure: Mapping[str, float] | None) -> str:
    return f"{cell(figure)} / {figure['max']:.0f}" if figure and figure["n"] else "–"


def middle(figure: Mapping[str, float] | None) -> str:
    return f"{figure['p50']:.0f}" if figure and figure["n"] else "–"


def tables(parts: Mapping[str, Any]) -> str:
    """parts: "turns", "interruption" and "load" of each model, as far as they have been measured."""
    return "\n".join([*_turns(parts), "", *_interruptions(parts), "", *_load(parts)])


def _table(columns: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]


def _of(parts: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    return [(name.partition(": ")[2], part) for name, part in parts.items() if name.startswith(f"{kind}: ")]


def _left(figures: Mapping[str, Any]) -> str:
    """Of an answer's prompt, what is computed when it is asked for."""
    return ", ".join(
        f"{which} {middle(figures.get(f'{which}: computed'))} of {middle(figures.get(f'{which}: prompt'))}"
        for which in ("first", "later")
    )


def _yes(prepares: bool) -> str:
    return "yes" if prepares else "no"


def _turns(parts: Mapping[str, Any]) -> list[str]:
    columns = {
        "by hand, first turn": ("by_hand", "first: end_of_speech"),
        "by hand, later turns": ("by_hand", "later: end_of_speech"),
        "by VAD, first turn": ("by_vad", "first: end_of_speech"),
        "by VAD, later turns": ("by_vad", "later: end_of_speech"),
        "first turn, from speech_stopped": ("by_vad", "first: speech_stopped"),
        "later turns, from speech_stopped": ("by_vad", "later: speech_stopped"),
    }
    lines = ["## End of speech → first audio, ms, p50 / p95", ""]
    lines += _table(
        ["pipeline", "speech s", "work during speech", "first / later turns of each", *columns, "prompt computed after"]
    )
    for model, part in _of(parts, "turns"):
        for row in part:
            cells = [cell(row[kind].get(name)) for kind, name in columns.values()]
            by_hand = row["by_hand"]
            counts = " / ".join(str(by_hand.get(f"{which}: end_of_speech", {"n": 0})["n"]) for which in ("first", "later"))
            said = [model, str(row["speech_s"]), _yes(row["prepare"]), counts, *cells, _left(by_hand)]
            lines.append("| " + " | ".join(said) + " |")
    return [
        *lines,
        "",
        "Prompt computed after: positions of the answer's prompt that the text stage had not kept, by hand, p50 of turns.",
    ]


def _interruptions(parts: Mapping[str, Any]) -> list[str]:
    columns = {
        "speech begins → speech_started": "onset_to_speech_started",
        "→ last audio byte": "speech_started_to_last_audio",
        "→ response.done": "speech_started_to_done",
        "→ every stage let go": "cancel_to_every_stage_let_go",
        "audio sent ahead of playback": "sent_ahead",
    }
    lines = ["## Interruption → silence, ms, p50 / p95 / max", "", *_table(["pipeline", "interruptions", *columns])]
    for model, part in _of(parts, "interruption"):
        cells = [worst(part.get(name)) for name in columns.values()]
        lines.append("| " + " | ".join([model, str(part["sent_ahead"]["n"]), *cells]) + " |")
    return lines


def _load(parts: Mapping[str, Any]) -> list[str]:
    lines = ["## Sessions at once: end of speech (by hand) → first audio, ms, p50 / p95", ""]
    lines += _table(
        [
            "pipeline",
            "speech s",
            "work during speech",
            "sessions",
            "first turn",
            "later turn",
            "turns with audio",
            "prompt computed after",
        ]
    )
    for model, part in _of(parts, "load"):
        for row in part:
            figures = row["figures"]
            cells = [cell(figures.get(f"{which}: end_of_speech")) for which in ("first", "later")]
            counts = f"{row['answered']} of {row['turns']}"
            said = [model, str(row["speech_s"]), _yes(row["prepare"]), str(row["sessions"]), *cells, counts, _left(figures)]
            lines.append("| " + " | ".join(said) + " |")
    return lines
