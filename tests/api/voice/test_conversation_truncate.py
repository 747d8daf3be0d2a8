"""Truncation: a spoken answer keeps the words that were said by a moment of its audio, and only those."""

from __future__ import annotations

import pytest

from omni_bus.api.voice.conversation import Conversation, ConversationError
from omni_bus.api.voice.items import InputText, Item, OutputAudio, OutputText, Status
from omni_bus.api.voice.spoken_words import estimated_ms, whole_words


def cut(part: OutputAudio, audio_end_ms: int, status: Status = "completed") -> str:
    conversation = Conversation()
    conversation.add(Item.message("assistant", [part], item_id="answer", status=status))
    assert conversation.truncate("answer", 0, audio_end_ms) is part
    return part.transcript


def answer(transcript: str, *chunks: tuple[float, int | None]) -> OutputAudio:
    part = OutputAudio()
    part.add_text(transcript)
    for duration_ms, spoken in chunks:
        part.add_audio(duration_ms, spoken)
    return part


TEXT = "One two. Three four five."  # the first sentence has 8 characters
MARKED = ((500.0, 4), (500.0, 8), (300.0, 8), (700.0, 25))  # a pause of 300 ms behind the first sentence


@pytest.mark.parametrize(
    ("end_ms", "kept"),
    [
        (0, ""),
        (100, ""),
        (480, "One"),
        (999, "One two."),
        (1000, "One two."),
        (1250, "One two."),  # in the pause: not a word more
        (1300, "One two."),
        (1620, "One two. Three"),
        (1850, "One two. Three four"),
        (2000, TEXT),
    ],
)
def test_by_marks(end_ms: int, kept: str) -> None:
    assert cut(answer(TEXT, *MARKED), end_ms) == kept


def test_marks_hold_for_an_answer_that_was_broken_off() -> None:
    """Its text runs far ahead of its audio; the marks say how far the voice has come."""
    part = answer(TEXT + " And a great deal more, which nobody has heard.", (500.0, 4), (500.0, 8))
    assert cut(part, 1000, "incomplete") == "One two."


def test_audio_behind_the_last_mark_says_nothing_more() -> None:
    assert cut(answer(TEXT, (1000.0, 8), (1000.0, None)), 1900) == "One two."


def test_a_long_pause_keeps_two_marks_only() -> None:
    part = answer(TEXT, (500.0, 8), *[(20.0, 8)] * 1000)
    assert part.marks == [(500.0, 8), (20_500.0, 8)]


@pytest.mark.parametrize(
    ("end_ms", "kept"), [(0, ""), (500, ""), (2000, "one two"), (3100, "one two three"), (4000, "one two three four")]
)
def test_in_proportion_to_the_duration_without_marks(end_ms: int, kept: str) -> None:
    assert cut(OutputAudio("one two three four", 4000.0), end_ms) == kept


def test_without_marks_an_answer_broken_off_keeps_what_speech_takes() -> None:
    """3 s of audio have been given out for a text of half a minute that is all there: 2 s hold a few words, not two thirds."""
    text = "word " * 100
    kept = cut(OutputAudio(text, 3000.0), 2000, "incomplete")
    assert 4 <= len(kept.split()) <= 8
    assert estimated_ms(text) == pytest.approx(32_500)


@pytest.mark.parametrize(
    ("text", "said", "kept"),
    [
        ("你好。世界很大", 2, "你好。"),  # each character is a word, with the mark behind it
        ("你好。世界很大", 4, "你好。世"),
        ("用Python写", 4, "用"),
        ("用Python写", 7, "用Python"),
        ("「こんにちは」と言った", 3, "「こん"),
        ("สวัสดี", 2, "สวั"),  # a vowel sign stays with its consonant
        ("เธอ", 1, ""),  # as does one that is written before it
        ("नमस्ते दुनिया", 6, "नमस्ते"),
        ("नमस्ते दुनिया", 4, ""),
        ("안녕하세요 여러분", 5, "안녕하세요"),
        ("Привет, мир!", 6, "Привет,"),
        ("مرحبا بالعالم", 5, "مرحبا"),
        ("It's well-known — really.", 4, "It's"),
        ("It's well-known — really.", 15, "It's well-known"),
        ("👍🏽 ok", 1, ""),
        ("👍🏽 ok", 2, "👍🏽"),
        ("  two\n\nlines", 5, "  two"),
        ("", 5, ""),
    ],
)
def test_words_end_where_their_script_ends_them(text: str, said: int, kept: str) -> None:
    assert whole_words(text, said) == kept


@pytest.mark.parametrize(
    "text", [TEXT, "你好。世界,用Python写 一下", "「こ」と", "สวัสดีครับ เธอ", "नमस्ते दुनिया।", "a 👩‍👩‍👧 b", " x  "]
)
def test_more_time_never_keeps_less_and_all_keeps_all(text: str) -> None:
    kept = [whole_words(text, said) for said in range(len(text) + 1)]
    assert all(text.startswith(one) for one in kept)
    assert [len(one) for one in kept] == sorted(len(one) for one in kept)
    assert kept[-1].strip() == text.strip() and kept[0] == ""


def test_past_the_end_is_an_error_and_changes_nothing() -> None:
    conversation = Conversation()
    part = OutputAudio("one two", 1000.2)
    conversation.add(Item.message("assistant", [part], item_id="answer"))
    with pytest.raises(ConversationError) as caught:
        conversation.truncate("answer", 0, 1002)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "audio_end_ms")
    assert "1001 ms is already shorter than 1002 ms" in caught.value.message
    assert part == OutputAudio("one two", 1000.2)
    conversation.truncate("answer", 0, 1001)  # a client that has played all of it rounds up
    assert part.transcript == "one two"


def test_twice_cuts_further_and_never_back() -> None:
    conversation = Conversation()
    part = answer(TEXT, *MARKED)
    conversation.add(Item.message("assistant", [part], item_id="answer"))
    conversation.truncate("answer", 0, 1000)
    with pytest.raises(ConversationError):
        conversation.truncate("answer", 0, 1500)
    conversation.truncate("answer", 0, 480)
    assert part.transcript == "One"


def test_what_comes_after_a_truncation_is_not_heard() -> None:
    conversation = Conversation()
    part = answer("One two.", (1000.0, 8))
    conversation.add(Item.message("assistant", [part], item_id="answer", status="in_progress"))
    conversation.truncate("answer", 0, 480)
    part.add_text(" Three.")
    part.add_audio(500.0, 15)
    assert (part.transcript, part.duration_ms) == ("One", 480)


@pytest.mark.parametrize(
    ("item_id", "content_index", "audio_end_ms", "param"),
    [
        ("question", 0, 0, "item_id"),
        ("call", 0, 0, "item_id"),
        ("answer", 0, 0, "content_index"),  # text
        ("answer", 2, 0, "content_index"),
        ("answer", -1, 0, "content_index"),
        ("answer", 1, -1, "audio_end_ms"),
    ],
)
def test_only_audio_of_the_assistant_can_be_truncated(item_id: str, content_index: int, audio_end_ms: int, param: str) -> None:
    conversation = Conversation()
    conversation.add(Item.message("user", [InputText("hi")], item_id="question"))
    conversation.add(Item.function_call("f", item_id="call"))
    conversation.add(Item.message("assistant", [OutputText("text"), OutputAudio("spoken", 1000.0)], item_id="answer"))
    with pytest.raises(ConversationError) as caught:
        conversation.truncate(item_id, content_index, audio_end_ms)
    assert (caught.value.code, caught.value.param) == ("invalid_value", param)
