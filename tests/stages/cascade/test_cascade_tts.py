"""What the speech synthesiser says."""

from __future__ import annotations

import itertools

import pytest
import torch

from omni_bus.errors import ModelRefused
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, MediaPart, Message
from omni_bus.stages.cascade.payloads import Clause, Prompt
from omni_bus.stages.contract import Consumed, Output
from tests.support.cascade import Driver, chunk, microphone, words


def say(tts: Driver, *clauses: str, seed: int | None = None) -> torch.Tensor:
    """The clauses, then the empty last one: int16 [samples]."""
    request = tts.open(RequestOptions(modalities=("text", "audio"), seed=seed))
    for text in clauses:
        tts.stage.feed(request, chunk("llm->tts", Clause(text), last=False))
    tts.stage.feed(request, chunk("llm->tts", Clause("")))
    tts.run()
    tts.finished(request)
    assert tts.consumed(request) == len(clauses) + 1
    return tts.pcm(request)


def test_what_is_said_is_understood(tts: Driver, asr: Driver) -> None:
    pcm = say(tts, "The capital of France is Paris,", " and the weather there is very nice today.")
    request = asr.open()
    spoken = microphone(pcm.float() / 32768)
    asr.stage.feed(request, chunk("client->asr", ChatInput((Message("user", (MediaPart("audio", 0),)),)), media0=spoken))
    asr.run()
    (sent,) = asr.outputs(request, "asr->llm")
    assert isinstance(sent.payload, Prompt)
    text = words(sent.payload.turns[0].text)
    assert " ".join(text[:6]) == "the capital of france is paris" and {"weather", "nice", "today"} <= set(text)


def test_audio_is_loud_enough_not_clipped_and_starts_soon(tts: Driver) -> None:
    pcm = say(tts, "The capital of France is Paris.")
    seconds = len(pcm) / 24_000
    assert 1.0 < seconds < 4.0
    peak = int(pcm.abs().max())
    assert 3000 < peak < 32_767
    assert int((pcm.abs() > 300).nonzero()[0]) < 0.15 * 24_000


def test_a_seed_fixes_every_sample_and_another_changes_them(tts: Driver) -> None:
    first, again = say(tts, "Hello there,", " friend.", seed=7), say(tts, "Hello there,", " friend.", seed=7)
    other = say(tts, "Hello there,", " friend.", seed=8)
    assert torch.equal(first, again)
    assert len(first) and not (len(first) == len(other) and torch.equal(first, other))
    assert len(say(tts, "Hello.", seed=-3))


def test_speed_and_seed_of_the_deployment(tts: Driver) -> None:
    fast = Driver("tts", speed=2.0, seed=5)
    text = "The capital of France is Paris."
    assert len(say(fast, text)) < 0.7 * len(say(tts, text))
    assert torch.equal(say(fast, text), say(fast, text, seed=5))
    slow, again = say(tts, text), say(tts, text, seed=0)
    assert torch.equal(slow, again), "0 is the default"


def test_each_clause_is_spoken_before_the_next_has_come(tts: Driver) -> None:
    request = tts.open()
    tts.stage.feed(request, chunk("llm->tts", Clause("Hello there,"), last=False))
    emissions = tts.run()
    assert isinstance(emissions[0], Output) and len(emissions[0].tensors["pcm"])
    assert emissions[-1] == Consumed(request, "llm->tts", 1)
    tts.stage.cancel(request)
    assert not tts.stage.has_work()


@pytest.mark.parametrize("text", ["", " ", "😀", "你好", "...", " , ", "—", "\n\n", "\x00\ufffd", "**", "e\u0301" * 3])
def test_what_cannot_be_spoken_is_left_out(tts: Driver, text: str) -> None:
    plain = say(tts, "Hello there.")
    assert len(say(tts, text)) < len(plain)
    assert len(say(tts, "Hello there.", text)) >= len(plain)


def test_no_delta_is_empty_and_none_is_long(tts: Driver) -> None:
    request = tts.open()
    tts.stage.feed(
        request, chunk("llm->tts", Clause("On the 3rd of March 2024, 1,250 people paid $9.99 each to hear it read."))
    )
    tts.run()
    tts.finished(request)
    *deltas, end = tts.outputs(request, "tts->client")
    assert not end.tensors and all(0 < len(item.tensors["pcm"]) <= 12_000 for item in deltas)
    assert all(item.tensors["pcm"].dtype == torch.int16 for item in deltas)


def test_requests_take_turns(tts: Driver) -> None:
    first, second = tts.open(), tts.open()
    for index in range(3):
        for request in (first, second):
            tts.stage.feed(request, chunk("llm->tts", Clause("One two three."), last=index == 2))
    order = [item.request_id for item in tts.run() if isinstance(item, Consumed)]
    assert order == [first, second] * 3


def test_a_paused_request_rests_and_the_others_go_on(tts: Driver) -> None:
    held, free = tts.open(), tts.open()
    tts.stage.pause(held)
    for request in (held, free):
        tts.stage.feed(request, chunk("llm->tts", Clause("One two three.")))
    assert {item.request_id for item in tts.run()} == {free}
    tts.stage.resume(held)
    tts.run()
    tts.finished(held)


def test_another_voice_is_refused(tts: Driver) -> None:
    with pytest.raises(ModelRefused, match="heart"):
        tts.open(RequestOptions(modalities=("audio",), voice="nobody"))
    assert not tts.stage.has_work()


def test_audio_says_how_far_the_text_is_spoken(tts: Driver) -> None:
    clauses = ["Hello there,", " my good old friend from London,", " 😀", " goodbye."]
    request = tts.open()
    for text in clauses:
        tts.stage.feed(request, chunk("llm->tts", Clause(text), last=False))
    tts.stage.feed(request, chunk("llm->tts", Clause("")))
    ends, total = [], 0
    for text in clauses:
        emissions = list(tts.stage.step())
        tts.emissions += emissions
        marks = [item.payload.spoken for item in emissions if isinstance(item, Output)]  # type: ignore[attr-defined]
        total += len(text)
        assert marks == sorted(marks) and (not marks or marks[-1] == total), "exact where a clause ends"
        ends.append(marks)
    assert len(ends[1]) >= 3 and ends[2] == []
    sizes = [len(item.tensors["pcm"]) for item in tts.outputs(request, "tts->client")][len(ends[0]) :][: len(ends[1])]
    begin, length = len(clauses[0]), len(clauses[1])
    for played, mark in zip(itertools.accumulate(sizes), ends[1], strict=True):
        assert abs(mark - (begin + length * played / sum(sizes))) <= 1, "even in between"
    tts.run()
    tts.finished(request)
    assert tts.outputs(request, "tts->client")[-1].payload.spoken == len("".join(clauses))  # type: ignore[attr-defined]
