"""TextStream: the released text is the tokenizer's own, no half character leaves, stop strings are decided before a release."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from omni_bus.errors import CheckpointError
from omni_bus.stages.ar.text import TextStream


@pytest.fixture(scope="session")
def fallback_tokenizer():
    """SentencePiece style with byte fallback, one leading space stripped."""
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁the", "a", "b", "ing", "é", "日", "</w>", "<0xZZ>", "▁▁"]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = ["byte_tokenizer", "fallback_tokenizer"]


def decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def ids_with_characters(tokenizer, rng: random.Random, length: int) -> list[int]:
    """Random ids, some of them the bytes of whole characters, so that incomplete and complete ones mix. Ids that nobody knows too."""
    out: list[int] = []
    size = len(tokenizer)
    while len(out) < length:
        if rng.random() < 0.4:
            text = rng.choice(["é", "日本", "😀", "🏳️‍🌈", " hello", "ß", "\u0301"])
            ids = tokenizer.encode(text, add_special_tokens=False)
            out += ids[: rng.randint(1, len(ids))] if rng.random() < 0.3 else ids
        else:
            out.append(rng.randrange(size + 3))
    return out[:length]


def stream(tokenizer, ids: list[int], stop=()) -> tuple[list[int], str, bool]:
    """All ids and text that a stream releases, and whether it was stopped."""
    text = TextStream(tokenizer, stop)
    out_ids: list[int] = []
    out = ""
    for token in ids:
        release = text.push(token)
        out_ids += release.token_ids
        out += release.text
        if release.stopped:
            return out_ids, out, True
    release = text.flush()
    return out_ids + list(release.token_ids), out + release.text, release.stopped


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_text_is_what_decoding_all_ids_gives(name, request):
    tokenizer = request.getfixturevalue(name)
    rng = random.Random(0)
    for _ in range(600):
        ids = ids_with_characters(tokenizer, rng, rng.randint(0, 25))
        out_ids, out, stopped = stream(tokenizer, ids)
        assert (out_ids, out, stopped) == (ids, decode(tokenizer, ids), False)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_prefix_released_is_a_prefix_of_the_whole_and_of_every_end(name, request):
    """What has left never has to be taken back, wherever the output ends."""
    tokenizer = request.getfixturevalue(name)
    rng = random.Random(1)
    for _ in range(60):
        ids = ids_with_characters(tokenizer, rng, 14)
        text = TextStream(tokenizer)
        out = ""
        for count, token in enumerate(ids, start=1):
            release = text.push(token)
            assert release.token_ids == (token,), "without stop strings an id never waits"
            out += release.text
            for end in range(count, len(ids) + 1):
                assert decode(tokenizer, ids[:end]).startswith(out)
            if not decode(tokenizer, ids[:count]).endswith("\N{REPLACEMENT CHARACTER}") and name == "byte_tokenizer":
                assert out == decode(tokenizer, ids[:count]), "whole characters do not wait"


def test_half_a_character_never_leaves(byte_tokenizer):
    text = TextStream(byte_tokenizer)
    ids = byte_tokenizer.encode("a😀b", add_special_tokens=False)
    pieces = [text.push(token).text for token in ids]
    assert "".join(pieces) == "a😀b" and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert [piece for piece in pieces if piece] != ["a😀b"] and len(ids) > 3


def test_bytes_left_incomplete_at_the_end_become_a_replacement_character(byte_tokenizer):
    ids = byte_tokenizer.encode("ok😀", add_special_tokens=False)[:-1]
    text = TextStream(byte_tokenizer)
    assert "".join(text.push(token).text for token in ids) == "ok"
    assert text.flush().text == "\N{REPLACEMENT CHARACTER}"


def first_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """The text before the stop string that a reader, character by character, would find complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return text[: min(starts)]
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_are_found_however_the_text_is_cut_into_tokens(name, request):
    tokenizer = request.getfixturevalue(name)
    rng = random.Random(2)
    found = 0
    for _ in range(1500):
        ids = ids_with_characters(tokenizer, rng, rng.randint(1, 16))
        if rng.random() < 0.5:
            ids = [tokenizer.encode(rng.choice("ab"), add_special_tokens=False)[-1] for _ in ids]
        whole = decode(tokenizer, ids)
        stop = tuple(
            rng.choice(["aab", "abb", "ba", "aaaa", "hello", "日本", "é", "b", "abab"]) for _ in range(rng.randint(1, 3))
        )
        if whole and rng.random() < 0.5:
            begin = rng.randrange(len(whole))
            stop = (*stop, whole[begin : begin + rng.randint(1, 5)])
        expected = first_stop(whole, stop)
        out_ids, out, stopped = stream(tokenizer, ids, stop)
        assert stopped == (expected is not None)
        assert out == (whole if expected is None else expected)
        assert out_ids == (ids if expected is None else ids[: len(out_ids)])
        if expected is not None:
            found += 1
            assert len(out_ids) < len(ids)
            assert out.startswith(decode(tokenizer, out_ids)), "an id is released only when all its text is"
    assert 200 < found < 1400


@pytest.mark.parametrize("name", TOKENIZERS)
def test_nothing_that_a_stop_string_reaches_into_has_left_before(name, request):
    """Text and ids of a suffix that may still become a stop string wait, and leave when it does not."""
    tokenizer = request.getfixturevalue(name)
    one = {letter: tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ab"}
    text = TextStream(tokenizer, ("aab",))
    releases = [text.push(one[letter]) for letter in "baaa"]
    assert [(release.text, release.token_ids) for release in releases] == [
        ("b", (one["b"],)),
        ("", ()),
        ("", ()),
        ("a", (one["a"],)),
    ]
    last = text.push(one["b"])
    assert (last.text, last.token_ids, last.stopped) == ("", (), True)
    assert text.flush().text == ""


def test_an_id_whose_text_ends_where_the_stop_string_begins_is_released(byte_tokenizer):
    before = byte_tokenizer.encode("x日", add_special_tokens=False)
    stop = byte_tokenizer.encode("hello", add_special_tokens=False)
    assert stream(byte_tokenizer, before + stop, ("hell",)) == (before, "x日", True)


def test_held_text_and_work_do_not_grow_with_the_output(byte_tokenizer):
    text = TextStream(byte_tokenizer, ("never",))
    token = byte_tokenizer.encode("n", add_special_tokens=False)[0]
    for _ in range(2000):
        text.push(token)
        assert len(text._held) <= 1 and len(text._tokens) <= 1


def test_a_tokenizer_that_cannot_be_decoded_in_pieces_is_refused():
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="byte-level"):
        TextStream(PreTrainedTokenizerFast(tokenizer_object=backend))
