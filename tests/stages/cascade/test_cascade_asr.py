"""What the speech recogniser hears."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from omni_bus.errors import ModelRefused, UndecodableMedia
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, InputTranscript, MediaPart, Message, TextPart
from omni_bus.stages.cascade.payloads import Prompt
from omni_bus.stages.contract import Consumed, Finished, Output
from tests.support.cascade import Driver, chunk, words

Speech = Callable[[str], torch.Tensor]

SENTENCES = [
    "What is the capital of France?",
    "Please tell me a short story about a cat.",
    "Good morning, how are you today?",
    "The weather in London is cold and wet.",
]


def user(*parts: TextPart | MediaPart) -> Message:
    return Message("user", parts)


def audio(index: int) -> MediaPart:
    return MediaPart("audio", index)


def prompt(asr: Driver, request: int) -> list[tuple[str, str]]:
    (sent,) = asr.outputs(request, "asr->llm")
    assert isinstance(sent.payload, Prompt)
    return [(turn.role, turn.text) for turn in sent.payload.turns]


def heard(asr: Driver, request: int) -> list[str]:
    payloads = [item.payload for item in asr.outputs(request, "asr->client")]
    return [payload.text for payload in payloads if isinstance(payload, InputTranscript) and payload.text]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_hears_every_word(asr: Driver, speech: Speech, sentence: str) -> None:
    request = asr.open()
    asr.stage.feed(request, chunk("client->asr", ChatInput((user(audio(0)),)), media0=speech(sentence)))
    asr.run()
    assert words(heard(asr, request)[0]) == words(sentence)
    assert prompt(asr, request) == [("user", heard(asr, request)[0])]
    assert asr.finished(request).usage["audio_ms"] > 1000
    assert asr.consumed(request) == 1


def test_audio_takes_its_place_among_the_parts_and_messages(asr: Driver, speech: Speech) -> None:
    conversation = ChatInput(
        (
            Message("system", (TextPart("Be brief."),)),
            user(audio(0), TextPart("(a question)"), audio(1)),
            Message("assistant", (TextPart("Paris."),)),
            user(TextPart("Thanks.")),
        )
    )
    request = asr.open()
    tensors = {"media0": speech(SENTENCES[0]), "media1": speech(SENTENCES[2])}
    asr.stage.feed(request, chunk("client->asr", conversation, **tensors))
    asr.run()
    asr.finished(request)
    (system, question, answer, thanks) = prompt(asr, request)
    assert (system, answer, thanks) == (("system", "Be brief."), ("assistant", "Paris."), ("user", "Thanks."))
    assert words(question[1]) == words(f"{SENTENCES[0]} a question {SENTENCES[2]}")
    assert [words(text) for text in heard(asr, request)] == [words(SENTENCES[0]), words(SENTENCES[2])]


def test_text_passes_at_once_beside_a_long_audio(asr: Driver, speech: Speech) -> None:
    long = asr.open()
    asr.stage.feed(long, chunk("client->asr", ChatInput((user(audio(0)),)), media0=speech(SENTENCES[1]).repeat(12)))
    short = asr.open(RequestOptions(modalities=("text",)))
    asr.stage.feed(short, chunk("client->asr", ChatInput((user(TextPart("Hi.")),))))
    first = [item for item in asr.stage.step() if item.request_id == short]
    asr.emissions += first
    assert prompt(asr, short) == [("user", "Hi.")]
    assert heard(asr, short) == [] and asr.outputs(short, "asr->client")[-1].last
    assert any(isinstance(item, Finished) for item in first)
    asr.stage.cancel(long)
    assert not asr.stage.has_work()


def test_a_long_audio_is_heard_window_by_window_in_turn_with_others(asr: Driver, speech: Speech) -> None:
    minute = torch.cat([speech(SENTENCES[index % 4]) for index in range(28)])
    assert len(minute) > 60 * 16_000
    long, short = asr.open(), asr.open()
    asr.stage.feed(long, chunk("client->asr", ChatInput((user(audio(0)),)), media0=minute))
    asr.stage.feed(short, chunk("client->asr", ChatInput((user(audio(0)),)), media0=speech(SENTENCES[0])))
    emissions = asr.run()
    ends = [item.request_id for item in emissions if isinstance(item, Finished)]
    assert ends == [short, long]
    got, wanted = words(heard(asr, long)[0]), words(" ".join(SENTENCES[index % 4] for index in range(28)))
    assert abs(len(got) - len(wanted)) <= 6
    assert sum(got.count(word) >= wanted.count(word) - 1 for word in set(wanted)) >= len(set(wanted)) - 1


@pytest.mark.parametrize("samples", [0, 1, 100, 16_000])
def test_silence_and_scraps_are_heard_as_nothing_and_do_no_harm(asr: Driver, samples: int) -> None:
    request = asr.open()
    asr.stage.feed(request, chunk("client->asr", ChatInput((user(audio(0)),)), media0=torch.zeros(samples)))
    asr.run()
    asr.finished(request)
    assert prompt(asr, request) == [("user", "")] and heard(asr, request) == []


def test_an_image_is_refused(asr: Driver) -> None:
    request = asr.open()
    picture = ChatInput((user(MediaPart("image", 0)),))
    with pytest.raises(ModelRefused, match="image"):
        asr.stage.feed(request, chunk("client->asr", picture, media0=torch.zeros(4, dtype=torch.uint8)))
    asr.stage.cancel(request)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
def test_audio_that_holds_no_numbers_is_refused(asr: Driver, value: float) -> None:
    request = asr.open()
    sound = torch.zeros(16_000).index_fill(0, torch.tensor([77]), value)
    with pytest.raises(UndecodableMedia):
        asr.stage.feed(request, chunk("client->asr", ChatInput((user(audio(0)),)), media0=sound))
    asr.stage.cancel(request)


def test_streamed_input_waits_for_its_last_chunk(asr: Driver) -> None:
    request = asr.open()
    asr.stage.feed(request, chunk("client->asr", ChatInput((user(TextPart("One.")),)), last=False))
    assert not asr.stage.has_work()
    asr.stage.feed(request, chunk("client->asr", ChatInput((user(TextPart("Two.")),))))
    asr.run()
    asr.finished(request)
    assert prompt(asr, request) == [("user", "One."), ("user", "Two.")]
    assert asr.consumed(request) == 2


def test_a_paused_request_rests_and_the_others_go_on(asr: Driver) -> None:
    held, free = asr.open(), asr.open()
    asr.stage.pause(held)
    for request in (held, free):
        asr.stage.feed(request, chunk("client->asr", ChatInput((user(TextPart("Hi.")),))))
    ran = {item.request_id for item in asr.run() if isinstance(item, Output | Consumed)}
    assert ran == {free}
    asr.stage.resume(held)
    asr.run()
    asr.finished(held)


def test_windows_join_to_the_whole_and_cut_in_the_pause() -> None:
    from omni_bus.stages.cascade.asr import WINDOW, windows

    draw = numpy.random.default_rng(0)
    sound = draw.standard_normal(70 * 16_000).astype(numpy.float32)
    sound[25 * 16_000 : 26 * 16_000] = 0
    pieces = list(windows(sound))
    assert numpy.array_equal(numpy.concatenate(pieces), sound)
    assert max(map(len, pieces)) <= WINDOW
    assert 25 * 16_000 < len(pieces[0]) < 26 * 16_000


def test_it_computes_in_the_deployments_type(asr: Driver) -> None:
    other = Driver("asr", compute_type="float32")
    found = [driver.stage._model.model.compute_type for driver in (asr, other)]  # type: ignore[attr-defined]
    assert found[0].startswith("int8") and found[1] == "float32"
