"""A given answer: the Talker speaks it as if the Thinker had made it, and the Thinker computes no more than that needs."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from omni_bus.errors import ModelRefused
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from omni_bus.stages.qwen3_omni.processor import Processor
from tests.support.qwen3_omni import CASES, Reference, options
from tests.support.qwen3_traces import frames, text_tokens
from tests.support.stage_pipeline import StagePipeline, Trace

WORDS = "Grüße, 世界! <|im_end|> Stop.\n"


@pytest.fixture(scope="module", params=["off", "plain"])
def pipeline(request: pytest.FixtureRequest, omni_checkpoint: pathlib.Path) -> StagePipeline:
    """With steps of fixed size, and without."""
    torch.set_num_threads(1)
    each = {"thinker": {"graphs": request.param}, "talker": {"graphs": request.param}}
    return StagePipeline(
        load_pipeline("qwen3_omni"), str(omni_checkpoint), ("processor", "thinker", "talker"), options=each, max_batch=4
    )


def engine(pipeline: StagePipeline) -> Any:
    return pipeline.stages["thinker"]._engine  # type: ignore[attr-defined]


def say(pipeline: StagePipeline, name: str | None, words: str, request: RequestOptions | None = None) -> Trace:
    chat, tensors = CASES[name].chat() if name else (ChatInput(()), {})
    trace = pipeline.submit(
        len(pipeline.traces),
        msgspec.structs.replace(chat, say=words),
        tensors,
        options=request or options(max_text=3, max_frames=12),
    )
    pipeline.run()
    assert trace.error is None
    stats = pipeline.stages["thinker"].stats()
    assert (stats.waiting, stats.running, stats.kv_blocks_used) == (0, 0, 0)
    return trace


def answer(pipeline: StagePipeline, name: str, tokens: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Trace:
    """What an ordinary request gives whose Thinker decides on these tokens, one after the other."""
    program, vocabulary = pipeline.stages["thinker"].program, len(pipeline.stages["thinker"].program.lm_head)  # type: ignore[attr-defined]
    left = list(tokens)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        assert len(hidden) == 1
        scores = torch.full((1, vocabulary), -10.0)
        scores[0, left.pop(0)] = 10.0
        return scores

    trace = pipeline.submit(len(pipeline.traces), *CASES[name].chat(), options=options(max_text=len(tokens), max_frames=12))
    with monkeypatch.context() as patch:
        patch.setattr(program, "logits", logits)
        pipeline.run()
    assert trace.error is None and not left
    return trace


@pytest.mark.parametrize("name", ["text", "audios", "mixture"])
def test_given_words_are_spoken_as_the_same_words_of_the_thinker(
    name: str, pipeline: StagePipeline, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = say(pipeline, name, WORDS)
    tokens = text_tokens(given)
    assert tokens[-1] == reference.config.im_end_token_id and reference.tokenizer.decode(tokens[:-1]) == WORDS
    assert not set(tokens[:-1]) & set(reference.tokenizer.added_tokens_decoder)
    made = answer(pipeline, name, tokens, monkeypatch)
    assert frames(given) == frames(made) and len(frames(given)) > 3
    assert text_tokens(made) == tokens
    text, words = (
        [(delta.text, delta.token_ids, delta.finish_reason) for delta in trace.payloads("thinker->client")]
        for trace in (given, made)
    )
    assert text == [(WORDS, tuple(tokens[:-1]), "stop")] and words[-1][2] == "stop"
    assert "".join(delta[0] for delta in words) == WORDS
    for key in ("prompt_tokens", "completion_tokens"):
        assert given.usage["thinker"][key] == made.usage["thinker"][key]
    assert given.usage["talker"] == made.usage["talker"]
    for edge in ("thinker->talker", "thinker->client", "talker->code2wav"):
        assert given.closed(edge)


@pytest.mark.parametrize("name", ["text", "image_audio"])
def test_the_thinker_computes_what_the_talker_needs_and_no_more(name: str, omni_checkpoint: pathlib.Path) -> None:
    for graphs in ("off", "plain"):
        pipeline = StagePipeline(
            load_pipeline("qwen3_omni"),
            str(omni_checkpoint),
            ("processor", "thinker", "talker"),
            options={"thinker": {"graphs": graphs, "prefix_cache": False}},
            max_batch=2,
        )
        drawn = []
        program = pipeline.stages["thinker"].program  # type: ignore[attr-defined]
        logits = program.logits
        program.logits = lambda hidden, drawn=drawn, logits=logits: (drawn.append(len(hidden)), logits(hidden))[1]
        trace = say(pipeline, name, "Yes.")
        prompt = trace.payloads("processor->thinker")[0]
        places = [at for at, token in enumerate(prompt.token_ids) if token in program.config.thinker.media.placeholders]
        assert not drawn and engine(pipeline).prompt_computed == (places[-1] + 1 if places else 0)
        silent = say(pipeline, name, "Yes.", RequestOptions(modalities=("text",)))
        assert not drawn and engine(pipeline).prompt_computed == (places[-1] + 1 if places else 0), "text alone needs nothing"
        assert [delta.text for delta in silent.payloads("thinker->client")] == ["Yes."]
        assert silent.usage["thinker"]["completion_tokens"] == len("Yes.") + 1


def test_words_without_a_conversation_are_spoken(pipeline: StagePipeline, reference: Reference) -> None:
    trace = say(pipeline, None, "Hello.")
    assert len(frames(trace)) > 0 and trace.closed("talker->code2wav")
    prompt = trace.payloads("processor->thinker")[0].token_ids
    assert reference.tokenizer.decode(prompt) == "<|im_start|>assistant\n"
    refused = pipeline.submit(len(pipeline.traces), ChatInput(()), options=options())
    pipeline.run()
    assert refused.error is not None and refused.error.code == ModelRefused.code
    pipeline.cancel(len(pipeline.traces) - 1)  # as the bus does


def test_nothing_to_say_is_an_answer_without_text_and_audio(pipeline: StagePipeline) -> None:
    for name in ("text", "audio"):
        trace = say(pipeline, name, "")
        assert frames(trace) == [] and trace.closed("talker->code2wav")
        assert [(delta.text, delta.finish_reason) for delta in trace.payloads("thinker->client")] == [("", "stop")]


def test_neither_length_nor_stop_string_cuts_what_is_given(pipeline: StagePipeline) -> None:
    words = "One STOP two, and so on. " * 20
    request = RequestOptions(
        modalities=("text", "audio"),
        sampling={
            "thinker": SamplingParams(temperature=0.0, max_tokens=5, stop=("STOP",)),
            "talker": SamplingParams(temperature=0.0, max_tokens=8),
        },
    )
    trace = say(pipeline, "text", words, request)
    assert "".join(delta.text for delta in trace.payloads("thinker->client")) == words
    assert trace.payloads("thinker->client")[-1].finish_reason == "stop"
    assert trace.usage["thinker"]["completion_tokens"] == len(words) + 1


def test_given_words_beside_other_requests_change_nothing(pipeline: StagePipeline) -> None:
    alone = say(pipeline, "audios", WORDS)
    others = [
        pipeline.submit(len(pipeline.traces), *CASES[name].chat(), options=options(max_frames=12)) for name in ("text", "image")
    ]
    for _ in range(3):
        pipeline.step()
    together = say(pipeline, "audios", WORDS)
    assert frames(together) == frames(alone)
    assert all(trace.error is None and trace.closed("talker->code2wav") for trace in others)


def test_words_of_a_request_that_prepares_are_not_said(pipeline: StagePipeline) -> None:
    chat, tensors = CASES["audio"].chat()
    trace = pipeline.submit(
        len(pipeline.traces), msgspec.structs.replace(chat, say="No."), tensors, options=RequestOptions(prepare=True)
    )
    pipeline.run()
    assert trace.error is None and [delta.text for delta in trace.payloads("thinker->client")] == [""]


def test_words_too_long_for_the_model_are_refused(pipeline: StagePipeline) -> None:
    processor: Processor = pipeline.stages["processor"]._processor  # type: ignore[attr-defined]
    with pytest.raises(ModelRefused):
        processor.prepare(ChatInput((), say="a" * processor.config.thinker.text.max_positions), {})
