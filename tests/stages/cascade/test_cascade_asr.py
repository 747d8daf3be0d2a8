"""What the speech recogniser hears."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from omni_bus.errors import ModelRefused, UndecodableMedia
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, InputTranscript, MediaPart, Message, TextPart, ToolCall, TranscriptWish
from omni_bus.stages.cascade.payloads import Prompt, Turn
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
    from omni_bus.stages.cascade.recogniser import WINDOW, windows

    draw = numpy.random.default_rng(0)
    sound = draw.standard_normal(70 * 16_000).astype(numpy.float32)
    sound[25 * 16_000 : 26 * 16_000] = 0
    pieces = list(windows(sound))
    assert numpy.array_equal(numpy.concatenate(pieces), sound)
    assert max(map(len, pieces)) <= WINDOW
    assert 25 * 16_000 < len(pieces[0]) < 26 * 16_000


def test_it_computes_in_the_deployments_type(asr: Driver) -> None:
    other = Driver("asr", compute_type="float32")
    found = [driver.stage._recogniser.model.model.compute_type for driver in (asr, other)]  # type: ignore[attr-defined]
    assert found[0].startswith("int8") and found[1] == "float32"


def transcribe(asr: Driver, sound: torch.Tensor, **wish: object) -> tuple[list[InputTranscript], dict[str, int]]:
    """The pieces of a transcript that is asked for alone, and its usage."""
    request = asr.open(RequestOptions(modalities=("transcript",)))
    asked = ChatInput((user(audio(0)),), transcript=TranscriptWish(**wish))  # type: ignore[arg-type]
    asr.stage.feed(request, chunk("client->asr", asked, media0=sound))
    asr.run()
    assert not asr.outputs(request, "asr->llm"), "nobody answers it"
    pieces = [item.payload for item in asr.outputs(request, "asr->client") if not item.last]
    assert all(isinstance(piece, InputTranscript) and piece.text for piece in pieces)
    return pieces, dict(asr.finished(request).usage)  # type: ignore[return-value]


def fresh(speech: Speech, *sentences: str) -> torch.Tensor:
    """The sentences, as no other test has them: what was heard once is not heard again."""
    sound = torch.cat([speech(sentence) for sentence in sentences])
    return sound + 1e-6 * torch.randn(sound.shape)


def test_a_transcript_alone_comes_window_by_window_with_growing_times(asr: Driver, speech: Speech) -> None:
    sound = fresh(speech, *SENTENCES * 5)
    pieces, usage = transcribe(asr, sound, times=True)
    seconds = len(sound) / 16_000
    assert len(pieces) >= 2 and usage["audio_ms"] == usage["heard_ms"] == int(seconds * 1000)
    segments = [segment for piece in pieces for segment in piece.segments]
    assert [piece.text for piece in pieces] == [" ".join(segment.text for segment in piece.segments) for piece in pieces]
    times = [time for segment in segments for time in (segment.start_s, segment.end_s)]
    assert times == sorted(times) and all(segment.start_s < segment.end_s for segment in segments)
    assert times[0] < 1.0 and seconds - 2.0 < times[-1] <= seconds
    got, wanted = words(" ".join(piece.text for piece in pieces)), words(" ".join(SENTENCES * 5))
    assert sum(got.count(word) >= wanted.count(word) - 1 for word in set(wanted)) >= len(set(wanted)) - 1
    assert all(segment.token_ids and segment.avg_logprob < 0 and 0 <= segment.no_speech_prob <= 1 for segment in segments)
    assert {piece.language for piece in pieces} == {"english"}


def test_words_lie_where_they_are_spoken(asr: Driver, speech: Speech) -> None:
    """Two sentences a second apart: each word in its own sentence's sound, give or take what the alignment errs by."""
    spoken = [fresh(speech, sentence) for sentence in SENTENCES[:2]]
    pause = torch.zeros(16_000)
    pieces, _ = transcribe(asr, torch.cat([pause, spoken[0], pause, spoken[1]]), times=True, words=True)
    said = [word for piece in pieces for segment in piece.segments for word in segment.words]
    assert words(" ".join(word.text for word in said)) == words(" ".join(SENTENCES[:2]))
    assert all(word.text == word.text.strip() and word.start_s <= word.end_s for word in said)
    starts = [word.start_s for word in said]
    assert starts == sorted(starts)
    count = len(words(SENTENCES[0]))
    loud = [(sound.abs() > 0.003).nonzero()[:, 0] / 16_000 for sound in spoken]
    begins = [1.0, 2 + len(spoken[0]) / 16_000]
    first, second = ((begin + float(at[0]), begin + float(at[-1])) for begin, at in zip(begins, loud, strict=True))
    assert (said[0].start_s, said[count - 1].end_s) == pytest.approx(first, abs=0.5)
    assert (said[count].start_s, said[-1].end_s) == pytest.approx(second, abs=0.5)
    assert all(segment.words[0].text in segment.text for piece in pieces for segment in piece.segments)
    without, _ = transcribe(asr, spoken[0], times=True)
    assert all(segment.words == () for piece in without for segment in piece.segments)


def test_without_the_wish_there_are_no_times(asr: Driver, speech: Speech) -> None:
    pieces, _ = transcribe(asr, fresh(speech, SENTENCES[0]))
    assert [piece.segments for piece in pieces] == [()] and words(pieces[0].text) == words(SENTENCES[0])


def test_a_prompt_says_what_to_expect(asr: Driver, speech: Speech) -> None:
    sound = fresh(speech, "My name is Katherine Smyth.")
    plain, _ = transcribe(asr, sound)
    prompted, _ = transcribe(asr, sound, prompt="Speakers: Kathryn Smythe.")
    assert "Kathryn" in prompted[0].text and "Kathryn" not in plain[0].text
    long, _ = transcribe(asr, sound, prompt="Speakers: " + "Kathryn Smythe, " * 300)
    assert long, "a prompt that is longer than the model's context is cut, not refused"


def test_another_language_is_refused(asr: Driver, speech: Speech) -> None:
    request = asr.open(RequestOptions(modalities=("transcript",)))
    asked = ChatInput((user(audio(0)),), transcript=TranscriptWish(language="de"))
    with pytest.raises(ModelRefused, match="en only") as refused:
        asr.stage.feed(request, chunk("client->asr", asked, media0=torch.zeros(16_000)))
    assert refused.value.param == "language"
    asr.stage.cancel(request)


def test_the_history_of_a_conversation_is_not_heard_again(asr: Driver, speech: Speech) -> None:
    first, second = fresh(speech, SENTENCES[0]), fresh(speech, SENTENCES[2])
    turns = (user(audio(0)), Message("assistant", (TextPart("Paris."),)), user(audio(1)))
    prompts, usages = [], []
    for messages, tensors in ((turns[:1], {"media0": first}), (turns, {"media0": first, "media1": second})):
        request = asr.open()
        asr.stage.feed(request, chunk("client->asr", ChatInput(messages), **tensors))
        asr.run()
        usages.append(asr.finished(request).usage)
        prompts.append(prompt(asr, request))
        assert len(heard(asr, request)) == len(tensors), "the client is told of each, known or new"
    assert usages[0]["heard_ms"] == usages[0]["audio_ms"] == len(first) // 16
    assert usages[1]["audio_ms"] == (len(first) + len(second)) // 16
    assert usages[1]["heard_ms"] == len(second) // 16, "only what is new"
    assert prompts[1][0] == prompts[0][0] and words(prompts[1][2][1]) == words(SENTENCES[2])


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(speech: Speech) -> None:
    small, none = Driver("asr", kept_transcripts=2), Driver("asr", kept_transcripts=0)
    sounds = [fresh(speech, SENTENCES[0]) for _ in range(3)]
    ms = [len(sound) // 16 for sound in sounds]
    assert [transcribe(small, sounds[index])[1]["heard_ms"] for index in (0, 1, 0, 2, 0, 1)] == [*ms[:2], 0, ms[2], 0, ms[1]]
    assert [transcribe(none, sounds[0])[1]["heard_ms"] for _ in range(2)] == [ms[0]] * 2


def test_a_transcript_is_kept_for_the_way_it_was_heard_in(asr: Driver, speech: Speech) -> None:
    sound = fresh(speech, SENTENCES[1])
    ways = [{}, {"times": True}, {"prompt": "A cat."}, {"temperature": 0.4}, {"temperature": 0.4}]
    assert all(transcribe(asr, sound, **way)[1]["heard_ms"] for way in ways), "chance is drawn anew each time"
    again, usage = transcribe(asr, sound, times=True)
    assert usage["heard_ms"] == 0 and again[0].segments


def test_preparing_hears_nothing_and_goes_on_with_what_is_known(asr: Driver, speech: Speech) -> None:
    known, new = fresh(speech, SENTENCES[0]), fresh(speech, SENTENCES[3])
    request = asr.open()
    asr.stage.feed(request, chunk("client->asr", ChatInput((user(audio(0)),)), media0=known))
    asr.run()
    said = prompt(asr, request)[0]
    turns = (
        user(audio(0)),
        Message("assistant", (TextPart("Paris."),)),
        user(TextPart("Listen."), audio(1)),
        user(TextPart("Hm.")),
    )
    prepared = asr.open(RequestOptions(modalities=("text",), prepare=True))
    asr.stage.feed(prepared, chunk("client->asr", ChatInput(turns, tools=("{}",)), media0=known, media1=new))
    asr.run()
    usage = asr.finished(prepared).usage
    assert usage["heard_ms"] == 0 and heard(asr, prepared) == []
    assert prompt(asr, prepared) == [said, ("assistant", "Paris.")]
    (sent,) = asr.outputs(prepared, "asr->llm")
    assert isinstance(sent.payload, Prompt) and sent.payload.tools == ("{}",)


def test_what_only_prepares_comes_behind_what_is_to_be_heard(asr: Driver) -> None:
    asked = ChatInput((user(audio(0)),))
    prepared = asr.open(RequestOptions(modalities=("text",), prepare=True))
    asr.stage.feed(prepared, chunk("client->asr", asked, media0=torch.rand(8_000)))
    request = asr.open()
    asr.stage.feed(request, chunk("client->asr", asked, media0=torch.rand(8_000)))
    ended = [emission.request_id for emission in asr.run() if isinstance(emission, Finished)]
    assert ended == [request, prepared] and asr.finished(prepared).usage["heard_ms"] == 0
    asr.finished(request)


def test_tools_calls_and_a_text_to_speak_pass_on(asr: Driver) -> None:
    call = ToolCall("clock", '{"zone": "UTC"}')
    turns = (user(TextPart("Time?")), Message("assistant", (), (call,)), Message("tool", (TextPart("12:00"),)))
    request = asr.open()
    asr.stage.feed(request, chunk("client->asr", ChatInput(turns, tools=('{"type": "function"}',), say="It is noon.")))
    asr.run()
    asr.finished(request)
    (sent,) = asr.outputs(request, "asr->llm")
    expected = (Turn("user", "Time?"), Turn("assistant", "", (call,)), Turn("tool", "12:00"))
    assert sent.payload == Prompt(expected, ('{"type": "function"}',), "It is noon.")


def test_a_text_to_speak_waits_for_no_audio(asr: Driver) -> None:
    request = asr.open()
    asr.stage.feed(request, chunk("client->asr", ChatInput((user(audio(0)),), say="Hello."), media0=torch.rand(16_000)))
    asr.run()
    assert asr.finished(request).usage["heard_ms"] == 0
