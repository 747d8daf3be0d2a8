"""The result of bench/realtime.py: kept part by part, gone on with by the same command only, and shown as far as it goes."""

from __future__ import annotations

import json
import pathlib

from bench.realtime import Result
from bench.realtime_report import of_turns, tables
from bench.realtime_turns import Turn

ASKED = {"turns": 3, "interruptions": 1, "sessions": [1]}
TURNS = [
    Turn(first=not number, since={"end_of_speech": 100.0 + number, "speech_stopped": 40.0 + number}, computed=46, prompt=254)
    for number in range(4)
]


def row(prepare: bool) -> dict[str, object]:
    return {"prepare": prepare, "speech_s": 18.7, "by_hand": of_turns(TURNS), "by_vad": of_turns(TURNS[:1])}


def test_first_and_later_turns_are_told_apart() -> None:
    found = of_turns(TURNS)
    assert found["first: end_of_speech"] == {"p50": 100.0, "p95": 100.0, "max": 100.0, "n": 1}
    assert found["later: end_of_speech"] == {"p50": 102.0, "p95": 103.0, "max": 103.0, "n": 3}
    assert found["later: computed"]["p50"] == 46


def test_a_part_that_was_measured_is_not_measured_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "realtime.json"
    Result(path, ASKED).add("turns: tiny", [row(True), row(False)], 12.34)
    again = Result(path, json.loads(json.dumps(ASKED)))
    assert list(again.parts) == ["turns: tiny"] and again.seconds == {"turns: tiny": 12.3}
    again.add("interruption: tiny", {"sent_ahead": {"p50": 1.0, "p95": 2.0, "max": 2.0, "n": 2}}, 1.0)
    assert list(Result(path, ASKED).parts) == ["turns: tiny", "interruption: tiny"]
    assert not Result(path, {**ASKED, "turns": 4}).parts, "of another command"
    shown = path.with_suffix(".md").read_text()
    assert (
        "| tiny | 18.7 | yes | 1 / 3 | 100 / 100 | 102 / 103 | 100 / 100 | – | 40 / 40 | – | first 46 of 254, later 46 of 254 |"
        in shown
    )
    assert "| tiny | 2 | – | – | – | – | 1 / 2 / 2 |" in shown


def test_sessions_at_once_are_shown_with_how_many_were_answered() -> None:
    load = [{"prepare": False, "speech_s": 8.6, "sessions": 32, "turns": 64, "answered": 4, "figures": of_turns(TURNS)}]
    assert "| tiny | 8.6 | no | 32 | 100 / 100 | 102 / 103 | 4 of 64 | first 46 of 254, later 46 of 254 |" in tables(
        {"load: tiny": load}
    )
