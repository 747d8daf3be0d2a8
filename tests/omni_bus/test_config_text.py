"""Lines of keys, against TOML that spells them in every way, and the values that tomllib reads from the same text."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from omni_bus.config_text import TomlError, locate, parse, parse_path, parse_value

DOCUMENT = '''# a comment = with [brackets]
[model]
pipeline = "probe # [no]" # yes
 path='a\\'
"quoted key" = """
inside = 3
[inside]
\\""" x"""""
list = [ # comment ]
  "a", ["b]"], { x = 1, y.z = '}' },
  "after",
]
[stages.thinker]
sampling = {temperature = 0.0, "top_k" = 3}
a.b.c = 1979-05-27 07:32:00
[edges."talker->code2wav"] # ]
first = 1
second = \'\'\'
third = 1
\'\'\'
last = true'''

LINES = {
    ("model",): 2,
    ("model", "pipeline"): 3,
    ("model", "path"): 4,
    ("model", "quoted key"): 5,
    ("model", "list"): 9,
    ("model", "list", "x"): 10,
    ("model", "list", "y"): 10,
    ("model", "list", "y", "z"): 10,
    ("stages",): 13,
    ("stages", "thinker"): 13,
    ("stages", "thinker", "sampling"): 14,
    ("stages", "thinker", "sampling", "temperature"): 14,
    ("stages", "thinker", "sampling", "top_k"): 14,
    ("stages", "thinker", "a"): 15,
    ("stages", "thinker", "a", "b"): 15,
    ("stages", "thinker", "a", "b", "c"): 15,
    ("edges",): 16,
    ("edges", "talker->code2wav"): 16,
    ("edges", "talker->code2wav", "first"): 17,
    ("edges", "talker->code2wav", "second"): 18,
    ("edges", "talker->code2wav", "last"): 21,
}


def paths(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found = set()
    for name, value in values.items():
        found.add((*prefix, name))
        if isinstance(value, dict):
            found |= paths(value, (*prefix, name))
    return found


def test_every_key_has_its_line() -> None:
    values, lines = parse(DOCUMENT)
    assert lines == LINES
    assert values == tomllib.loads(DOCUMENT)
    in_lists = {("model", "list", "x"), ("model", "list", "y"), ("model", "list", "y", "z")}
    assert paths(values) == set(lines) - in_lists


def test_lines_shift_with_the_text() -> None:
    shifted = locate("\n# more\n\n" + DOCUMENT)
    assert shifted == {path: line + 3 for path, line in LINES.items()}


@pytest.mark.parametrize(
    ("text", "line", "fragment"),
    [
        ("a = 1\nb = ", 2, "Invalid value"),
        ("a = 1\na = 2", 2, "overwrite"),
        ("[x]\ny = 1\n[x]\n", 3, "twice"),
        ('a = "x\nb = 1', 1, "Illegal character"),
        ('a = 1\n\nb = """\n\n', 3, "Unterminated"),
        ("a = 1\n= 3", 2, "Invalid statement"),
        ("a = [1, 2\n", 1, "Unclosed array"),
    ],
)
def test_text_that_is_not_toml_names_its_line(text: str, line: int, fragment: str) -> None:
    with pytest.raises(TomlError) as caught:
        parse(text)
    assert caught.value.line == line
    assert fragment in caught.value.message
    assert "at line" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("[1, 2]", [1, 2]),
        ("true", True),
        ('"4"', "4"),
        ("{a = 1}", {"a": 1}),
        ("/models/x", "/models/x"),
        ("", ""),
        ("a = 3", "a = 3"),
    ],
)
def test_a_value_outside_toml(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("api.port", ("api", "port")),
        ('edges."a->b".credits', ("edges", "a->b", "credits")),
        ("a..b", None),
        ("a b", None),
        ("", None),
        ("[a]", None),
    ],
)
def test_a_dotted_key(text: str, path: tuple[str, ...] | None) -> None:
    assert parse_path(text) == path
