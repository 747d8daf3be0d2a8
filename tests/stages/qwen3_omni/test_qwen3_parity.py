"""Thinker and Talker through the stage contract against transformers' generate: tokens and codes are equal, not close."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch

from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from tests.support.qwen3_omni import CASES, Expected, Reference, options
from tests.support.qwen3_traces import codes, text_tokens
from tests.support.stage_pipeline import StagePipeline, Trace


def check(trace: Trace, expected: Expected) -> None:
    assert trace.error is None
    got = text_tokens(trace)
    if got != expected.text:
        at = next(index for index in range(len(got) + 1) if got[: index + 1] != expected.text[: index + 1])
        pytest.fail(f"text token {at} differs; transformers' margin there is {expected.text_margins[at]:.2e}")
    frames = codes(trace)
    first = frames[0].tolist()
    if first != expected.codes[0].tolist():
        at = next(index for index in range(len(first) + 1) if first[: index + 1] != expected.talker[: index + 1])
        pytest.fail(f"talker token {at} differs; transformers' margin there is {expected.talker_margins[at]:.2e}")
    assert torch.equal(frames, expected.codes), "residual codes differ"
    assert frames.shape[1] == len(expected.talker) - 1
    for edge in ("thinker->talker", "thinker->client", "talker->code2wav", "processor->thinker", "processor->talker"):
        assert trace.closed(edge), edge
    assert set(trace.usage) == {"processor", "thinker", "talker"}
    assert trace.usage["thinker"]["completion_tokens"] == len(expected.text)
    first, *between, last = [delta.usage for delta in trace.payloads("thinker->client")]
    assert first == {name: count for name, count in last.items() if name != "completion_tokens"} and first["prompt_tokens"]
    assert last == trace.usage["thinker"] and not any(between), "what is broken off has its figures, and they are told twice"
    assert trace.usage["talker"]["frames"] == frames.shape[1]


def run(pipeline: StagePipeline, name: str, request: RequestOptions) -> Trace:
    trace = pipeline.submit(len(pipeline.traces), *CASES[name].chat(), options=request)
    pipeline.run()
    return trace


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_and_codes_equal_transformers(
    name: str, omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]
) -> None:
    check(run(omni_pipeline, name, options()), greedy(name))


def test_greedy_cases_end_in_both_ways(greedy: Callable[[str], Expected], reference: Reference) -> None:
    """The checkpoint must exercise end tokens and length stops, or the tests above prove less than they say."""
    ends = {greedy(name).text[-1] == reference.config.im_end_token_id for name in CASES}
    talker_ends = {greedy(name).talker[-1] == reference.config.talker_config.codec_eos_token_id for name in CASES}
    assert ends == {True, False} and talker_ends == {True, False}


@pytest.mark.parametrize(("name", "seed"), [("text", 1), ("audio", 2), ("image_audio", 3), ("history", 4)])
def test_sampled_talker_equals_transformers_draw_for_draw(
    name: str, seed: int, omni_pipeline: StagePipeline, reference: Reference
) -> None:
    expected = reference.generate(CASES[name], seed=seed, max_frames=24)
    check(run(omni_pipeline, name, options(seed=seed, max_frames=24)), expected)


@pytest.mark.parametrize("name", ["text_system", "image_audio"])
def test_sampled_thinker_equals_transformers_draw_for_draw(
    name: str, omni_pipeline: StagePipeline, reference: Reference
) -> None:
    """The penalty sees the prompt too, as in transformers."""
    sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.3, max_tokens=24)
    inputs = reference.inputs(CASES[name])
    for seed in (5, 6):
        torch.manual_seed(seed)
        with torch.no_grad():
            sequence = reference.model.thinker.generate(
                **inputs,
                do_sample=True,
                temperature=0.8,
                top_k=40,
                top_p=0.9,
                repetition_penalty=1.3,
                max_new_tokens=24,
                eos_token_id=reference.config.im_end_token_id,
            )
        request = RequestOptions(seed=seed, sampling={"thinker": sampling})
        deltas = run(omni_pipeline, name, request).payloads("thinker->client")
        expected = sequence[0, inputs["input_ids"].shape[1] :].tolist()
        stopped = expected[-1] == reference.config.im_end_token_id
        assert [token for delta in deltas for token in delta.token_ids] == (expected[:-1] if stopped else expected)


@pytest.mark.parametrize("voice", ["chelsie", "AIDEN"])
def test_each_voice_equals_transformers(voice: str, omni_pipeline: StagePipeline, reference: Reference) -> None:
    expected = reference.generate(CASES["text_system"], speaker=voice, max_frames=16)
    check(run(omni_pipeline, "text_system", options(voice=voice, max_frames=16)), expected)


def test_batched_rows_equal_the_same_rows_alone(omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]) -> None:
    """All cases at once, each entering a few steps after the one before, one of them sampled."""
    traces = {}
    for index, name in enumerate(CASES):
        traces[name] = omni_pipeline.submit(1000 + index, *CASES[name].chat(), options=options())
        for _ in range(index % 4):
            omni_pipeline.step()
    sampled = omni_pipeline.submit(1999, *CASES["text"].chat(), options=options(seed=1, max_frames=24))
    omni_pipeline.run()
    for name, trace in traces.items():
        check(trace, greedy(name))
    alone = run(omni_pipeline, "text", options(seed=1, max_frames=24))
    assert text_tokens(sampled) == text_tokens(alone) and torch.equal(codes(sampled), codes(alone))


def test_prefill_in_pieces_changes_nothing(omni_checkpoint: pathlib.Path, greedy: Callable[[str], Expected]) -> None:
    pieces = {"max_prefill_tokens": 7, "block_size": 4}
    pipeline = StagePipeline(
        load_pipeline("qwen3_omni"),
        str(omni_checkpoint),
        ("processor", "thinker", "talker"),
        options={"thinker": pieces, "talker": pieces},
        max_batch=4,
    )
    names = ("audios", "image_audio", "video")
    traces = [pipeline.submit(index, *CASES[name].chat(), options=options()) for index, name in enumerate(names)]
    pipeline.run()
    for name, trace in zip(names, traces, strict=True):
        check(trace, greedy(name))


def test_text_without_speech_is_the_same_text(omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]) -> None:
    request = RequestOptions(sampling=options().sampling)
    trace = omni_pipeline.submit(2000, *CASES["image_audio"].chat(), options=request)
    omni_pipeline.run()
    assert trace.error is None and set(trace.usage) == {"processor", "thinker"}
    assert set(trace.chunks) == {"client->processor", "processor->thinker", "thinker->client"}
    sent = [token for payload in trace.payloads("thinker->client") for token in payload.token_ids]
    expected = greedy("image_audio").text
    assert sent == (expected[:-1] if trace.payloads("thinker->client")[-1].finish_reason == "stop" else expected)


def test_client_text_is_the_decoded_text_without_the_end_token(
    omni_pipeline: StagePipeline, greedy: Callable[[str], Expected], reference: Reference
) -> None:
    for name in ("text", "text_system", "audio"):
        deltas = run(omni_pipeline, name, options()).payloads("thinker->client")
        expected = greedy(name).text
        assert "".join(delta.text for delta in deltas) == reference.tokenizer.decode(expected, skip_special_tokens=True)
        stopped = expected[-1] == reference.config.im_end_token_id
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop" if stopped else "length"]
        assert [token for delta in deltas for token in delta.token_ids] == (expected[:-1] if stopped else expected)


def test_placeholder_rows_travel_once_and_only_for_media(omni_pipeline: StagePipeline) -> None:
    for name in ("text", "audios"):
        trace = run(omni_pipeline, name, options(max_frames=4))
        with_rows = [bool(output.tensors) for output in trace.chunks["thinker->talker"]]
        assert with_rows == [name == "audios", *[False] * (len(with_rows) - 1)]
        for edge in ("thinker->talker", "talker->code2wav"):
            sizes = [sum(tensor.nbytes for tensor in output.tensors.values()) for output in trace.chunks[edge][1:]]
            assert max(sizes) <= 32, "while decoding, only ids and 16 codes travel"
