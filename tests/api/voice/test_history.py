"""What prompts are made of: what is left out of a conversation, and what counts as heard of answers that were cut short."""

from __future__ import annotations

from omni_bus.api.voice.conversation import Conversation
from omni_bus.api.voice.history import History
from omni_bus.api.voice.items import InputText, Item, OutputAudio


def said(item_id: str, *, role: str = "user") -> Item:
    part = OutputAudio("one two", 2000.0) if role == "assistant" else InputText("hi")
    return Item.message(role, [part], item_id=item_id)  # type: ignore[arg-type]


def history(*items: Item) -> History:
    conversation = Conversation()
    for item in items:
        conversation.add(item)
    return History(conversation)


def test_the_older_half_is_left_out_and_instructions_are_not() -> None:
    kept = history(said("s", role="system"), *(said(f"{number}") for number in range(5)))
    assert kept.leave_out_older_half()
    assert [item.id for item in kept.items] == ["s", "3", "4"]
    assert kept.leave_out_older_half()
    assert [item.id for item in kept.items] == ["s", "4"]
    assert not kept.leave_out_older_half(), "one message alone is too long"
    assert len(kept.conversation) == 6, "the items stay"


def test_an_id_that_is_used_again_is_not_left_out() -> None:
    kept = history(said("a"), said("b"))
    kept.leave_out_older_half()
    kept.forget(kept.conversation.delete("a"))
    kept.conversation.add(said("a"))
    assert [item.id for item in kept.items] == ["b", "a"]


def test_our_clock_guesses_until_the_client_says_better() -> None:
    kept = history(said("a", role="assistant"))
    kept.clock.sent("a", 2000.0, 10.0)
    assert kept.silenced(None, 10.5) == {"a": 500.0}
    assert kept.clock.lead_s(10.5) == 0.0
    kept.report_played("a", 700.0, 10.6)
    assert kept.heard_ms == {"a": 700.0}
    kept.report_played("a", 9000.0, 10.6)
    assert kept.heard_ms == {"a": 2000.0}, "no more than was sent"
    kept.truncate("a", 0, 300)
    assert kept.heard_ms == {}


def test_what_is_silenced_twice_was_not_heard_in_between() -> None:
    answer = said("a", role="assistant")
    kept = history(answer)
    kept.clock.sent("a", 2000.0, 10.0)
    assert kept.silenced(answer, 10.5) == {"a": 500.0}
    assert kept.silenced(answer, 11.5) == {"a": 500.0}


def test_what_was_sent_of_a_cancelled_answer_may_be_heard() -> None:
    kept = history(said("a", role="assistant"))
    kept.clock.sent("a", 2000.0, 10.0)
    kept.ended_early("a")
    assert kept.heard_ms == {"a": 2000.0}


def test_nothing_is_kept_of_items_that_the_conversation_has_not() -> None:
    """Out-of-band answers, and deleted ones: a session that cancels many of them must not grow."""
    answer = said("beside", role="assistant")
    kept = history(said("a"))
    kept.ended_early(answer.id)
    assert kept.silenced(answer, 1.0) == {"beside": 0.0}, "the client is told all the same"
    assert kept.heard_ms == {}
