"""Where an answer is cut for speaking."""

from __future__ import annotations

import random

import pytest

from omni_bus.stages.cascade.clauses import MAX_RUN, ClauseSplitter

CASES = {
    "one sentence": ["The capital of France is Paris."],
    "two sentences": ["It is Paris.", " It lies on the Seine."],
    "comma": ["Of course I can,", " what is it?"],
    "a comma after few words waits, the first does not": ["Well,", " yes, I can do that,", " gladly."],
    "decimal and grouped numbers": ["It costs 1,234.50 dollars,", " or 2.5 percent."],
    "time": ["The train leaves at 7:30 and 8:15."],
    "title": ["Ask Dr. Smith and Mr. Jones.", " They know."],
    "initials and letters": ["J. K. Rowling lives in the U.K. with Prof. Lee,", " i.e. nearby."],
    "the word no ends a sentence": ["The answer is no.", " Sorry."],
    "ellipsis": ["Let me think...", " Paris."],
    "closing quote": ['"Is it Paris?"', " she asked them,", " twice."],
    "list": ["1. Red", "\n2. Blue", "\n3. Green"],
    "blank lines": ["First line here", "\n\nSecond line"],
    "address": ["See example.com for more."],
    "conjunction in a long run": [
        "The river runs through the old town with its many bridges",
        " and quiet little houses where nobody ever found a faster way to the sea",
    ],
    "nothing": [],
    "spaces": ["  "],
}


@pytest.mark.parametrize("name", CASES)
def test_cut_at(name: str) -> None:
    wanted = CASES[name]
    splitter = ClauseSplitter()
    got = [*splitter.push("".join(wanted)), splitter.flush()]
    assert [clause for clause in got if clause] == wanted


def test_a_clause_is_ready_with_the_character_behind_it() -> None:
    splitter = ClauseSplitter()
    assert splitter.push("It is Paris.") == []
    assert splitter.push(" ") == ["It is Paris."]


def test_a_run_without_any_mark_is_bounded() -> None:
    splitter = ClauseSplitter()
    clauses = splitter.push("word " * 200)
    assert clauses and max(map(len, clauses)) <= MAX_RUN + len("word ")


@pytest.mark.parametrize("seed", range(20))
def test_same_clauses_however_the_text_arrives(seed: int) -> None:
    text = "".join(piece for clauses in CASES.values() for piece in [*clauses, " "]) * 2
    whole = ClauseSplitter()
    wanted = [*whole.push(text), whole.flush()]
    assert "".join(wanted) == text
    draw = random.Random(seed)
    splitter, got, rest = ClauseSplitter(), [], text
    while rest:
        size = draw.randint(1, 9)
        got += splitter.push(rest[:size])
        rest = rest[size:]
    assert [*got, splitter.flush()] == wanted
