"""Function calls in a text stream: read alike however the stream is cut, and whatever is no call comes back as it was written."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence

import pytest

from omni_bus.api.voice.tool_calls import ArgumentsPiece, CallDone, CallNamed, CallStarted, Piece, TextPiece, ToolCallReader


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Text and arguments as if the stream had come in one piece."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece):
            out[-1] = TextPiece(last.text + piece.text)
        elif isinstance(piece, ArgumentsPiece) and isinstance(last, ArgumentsPiece):
            out[-1] = ArgumentsPiece(last.text + piece.text)
        else:
            out.append(piece)
    return out


def read(pieces: Sequence[str]) -> list[Piece]:
    reader = ToolCallReader()
    return joined([*(piece for text in pieces for piece in reader.feed(text)), *reader.end()])


def call(index: int, name: str, arguments: str, ok: bool = True) -> list[Piece]:
    pieces = [ArgumentsPiece(arguments)] if arguments else []
    return [CallStarted(index), CallNamed(name), *pieces, CallDone(name, arguments, ok)]


def said(text: str) -> list[Piece]:
    return [TextPiece(text)]


NESTED = '{"a": {"b": [1, {"c": "}"}]}, "d": "</tool_call>", "e": "\\"{\\\\", "é": -1.5e3, "f": [true, false, null]}'
GOOD: dict[str, tuple[str, list[Piece]]] = {
    "plain_text": ("Hello there,\n how are  you? ", said("Hello there,\n how are  you? ")),
    "white_space": (" \n ", said(" \n ")),
    "one_call": ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', call(0, "f", '{"a": 1}')),
    "braces_quotes_and_tags_in_strings": (
        f'<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>',
        call(0, "f", NESTED),
    ),
    "several_calls_with_text_around": (
        'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"x":[]}}\n</tool_call>\n Done.\n',
        [*said("Let me see."), *call(0, "f", "{}"), *call(1, "g", '{"x":[]}'), *said("\n Done.\n")],
    ),
    "arguments_first": ('<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>', call(0, "f", '{"a": "}"}')),
    "no_arguments": ('<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    "null_for_arguments": ('<tool_call>{"name": "f", "arguments": null }</tool_call>', call(0, "f", "{}")),
    "arguments_in_a_string": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}</tool_call>',
        call(0, "f", '{"a": "\\u00e9"}'),
    ),
    "other_keys": (
        '<tool_call>{"id": 1.5, "name": "f", "x": [{"arguments": 1}], "arguments": {"a": 1}, "y": "z"}</tool_call>',
        call(0, "f", '{"a": 1}'),
    ),
    "a_list_of_calls": (
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]</tool_call>',
        [*call(0, "f", "{}"), *call(1, "g", '{"a": 1}')],
    ),
    "no_closing_tag": ('<tool_call>{"name": "f", "arguments": {}}', call(0, "f", "{}")),
    "no_closing_tag_and_text": ('<tool_call>{"name": "f", "arguments": {}}\nSo.', [*call(0, "f", "{}"), *said("So.")]),
    "no_closing_tag_and_another_call": (
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        [*call(0, "f", "{}"), *call(1, "g", "{}")],
    ),
    "a_brace_too_many": ('<tool_call>\n{"name": "f", "arguments": {}}}\n</tool_call>', call(0, "f", "{}")),
    "almost_a_tag": ("a < b <tool <tool_cal> </tool_call> <<", said("a < b <tool <tool_cal> </tool_call> <<")),
    "almost_a_tag_then_one": ('<<tool_<tool_call>{"name": "f"}</tool_call>', [*said("<<tool_"), *call(0, "f", "{}")]),
}
BROKEN: dict[str, tuple[str, list[Piece]]] = {
    name: (text, said(text))
    for name, text in {
        "an_empty_tag": "<tool_call></tool_call>",
        "a_tag_alone": "x <tool_call>",
        "half_a_tag": "x <tool_ca",
        "no_json": "<tool_call> f(1) </tool_call> z",
        "a_bare_word": "<tool_call>{bad}</tool_call>",
        "no_name": '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        "an_empty_name": '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "a_name_that_is_a_number": '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        "a_name_without_an_end": '<tool_call>{"name": "f' + "f" * 400,
        "broken_off_in_the_name": ' <tool_call>\n{"name": "f',
        "broken_off_behind_the_name": '<tool_call>{"name": "f", "argu',
        "a_line_break_in_the_name": '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>',
        "arguments_that_are_a_list": '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "arguments_that_are_a_number": '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
        "arguments_in_a_string_that_are_none": '<tool_call>{"name": "f", "arguments": "a=1"}</tool_call>',
        "a_comma_too_many": '<tool_call>{"name": "f",}</tool_call>',
        "no_colon": '<tool_call>{"name" "f"}</tool_call>',
        "not_a_number": '<tool_call>{"x": NaN, "name": "f"}</tool_call>',
    }.items()
}
BROKEN |= {
    "a_tag_in_a_tag": ('<tool_call> <tool_call>{"name": "f"}</tool_call>', [*said("<tool_call> "), *call(0, "f", "{}")]),
    "broken_off_in_the_arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        call(0, "f", '{"a": "b', ok=False),
    ),
    "a_wrong_bracket_in_the_arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call> So.',
        [*call(0, "f", '{"a": 1]', ok=False), *said("So.")],
    ),
    "the_tag_closes_in_the_arguments": (
        'a<tool_call>{"name": "f", "arguments": {"a": tru</tool_call>b',
        [*said("a"), *call(0, "f", '{"a": tru', ok=False), *said("b")],
    ),
    "a_comma_too_many_in_the_arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call><tool_call>{"name": "g"}</tool_call>',
        [*call(0, "f", '{"a": 1,}', ok=False), *call(1, "g", "{}")],
    ),
    "a_line_break_in_a_string": (
        '<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}</tool_call>',
        call(0, "f", '{"a": "b', ok=False),
    ),
    "a_good_call_then_a_broken_one": (
        '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": 1}</tool_call>',
        [*call(0, "f", "{}"), *said('<tool_call>{"name": 1}</tool_call>')],
    ),
}
ALL = GOOD | BROKEN


@pytest.mark.parametrize("name", ALL)
def test_uncut(name: str) -> None:
    text, pieces = ALL[name]
    assert read([text]) == pieces


@pytest.mark.parametrize("name", ALL)
def test_every_cut_in_two_and_every_character_alone(name: str) -> None:
    text, pieces = ALL[name]
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]]) == pieces, text[:cut]
    assert read(list(text)) == pieces


@pytest.mark.parametrize("name", ["several_calls_with_text_around", "almost_a_tag_then_one", "the_tag_closes_in_the_arguments"])
def test_every_cut_in_three(name: str) -> None:
    text, pieces = ALL[name]
    text = text[-70:]  # the end is where tags close
    pieces = read([text])
    for first in range(len(text)):
        for second in range(first, len(text)):
            assert read([text[:first], text[first:second], text[second:]]) == pieces


def test_random_texts_read_alike_however_they_are_cut() -> None:
    random_ = random.Random(5)
    scraps = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f"',
        ', "arguments": ',
        '{"a": ',
        "1",
        "}",
        '"',
        "\\",
        "\n",
        " ",
        "[",
        "]",
        "x",
    ]
    for _ in range(2000):
        text = "".join(random_.choices(scraps, k=random_.randrange(1, 14)))
        whole = read([text])
        cuts = sorted(random_.choices(range(len(text) + 1), k=4))
        assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole, text
        started = [piece for piece in whole if isinstance(piece, CallStarted)]
        done = [piece for piece in whole if isinstance(piece, CallDone)]
        assert [piece.index for piece in started] == list(range(len(started))) and len(done) == len(started)
        assert all(isinstance(json.loads(piece.arguments), dict) for piece in done if piece.ok)
        assert "".join(piece.text for piece in whole if isinstance(piece, ArgumentsPiece)) == "".join(d.arguments for d in done)
        if not started:
            assert whole == said(text)


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    reader = ToolCallReader()
    assert reader.feed("Hello") == said("Hello")
    assert reader.feed(" ") == []
    assert reader.feed("wor") == said(" wor")
    assert reader.feed("ld <") == said("ld")
    assert reader.feed("b") == said(" <b")
    assert reader.feed("<tool_call>") == []
    assert reader.feed("no") == said("<tool_call>no")


def test_arguments_go_out_as_they_come() -> None:
    reader = ToolCallReader()
    assert reader.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert reader.feed('{"a"') == [CallStarted(0), CallNamed("f"), ArgumentsPiece('{"a"')]
    assert reader.feed(": 1") == [ArgumentsPiece(": 1")]
    assert reader.feed("}") == [ArgumentsPiece("}")]
    assert reader.feed("}") == [CallDone("f", '{"a": 1}', True)]
    assert reader.feed("\n</tool_call>\n") == [] and reader.end() == []
