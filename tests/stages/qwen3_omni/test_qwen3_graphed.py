"""The form of Thinker and Talker that a CUDA graph holds, here run operator by operator: the same tokens and codes as the other form
and as transformers, for rows of one batch that come and go; and draws that depend on the request alone."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from tests.support.device_draws import device_draws
from tests.support.qwen3_omni import CASES, MAX_FRAMES, MAX_TEXT, Expected, options
from tests.support.qwen3_traces import codes, run, text_tokens
from tests.support.stage_pipeline import StagePipeline, Trace

STAGES = ("processor", "thinker", "talker")


@pytest.fixture(scope="module")
def graphed(omni_checkpoint: pathlib.Path) -> StagePipeline:
    torch.set_num_threads(1)
    plain = {"graphs": "plain"}
    return StagePipeline(
        load_pipeline("qwen3_omni"), str(omni_checkpoint), STAGES, options={"thinker": plain, "talker": plain}, max_batch=12
    )


def staggered(pipeline: StagePipeline, requests: dict[str, RequestOptions]) -> dict[str, Trace]:
    """All at once, each entering a few steps after the one before."""
    traces = {}
    for index, (name, request) in enumerate(requests.items()):
        traces[name] = pipeline.submit(len(pipeline.traces), *CASES[name].chat(), options=request)
        for _ in range(index % 4):
            pipeline.step()
    pipeline.run()
    assert all(trace.error is None for trace in traces.values())
    return traces


def talker_options(max_tokens: int = 16, **sampling: Any) -> RequestOptions:
    """A greedy Thinker with this Talker."""
    request = options()
    talker = SamplingParams(max_tokens=max_tokens, **sampling)
    return RequestOptions(
        modalities=request.modalities,
        voice=request.voice,
        seed=11,
        sampling={"thinker": request.sampling["thinker"], "talker": talker},
    )


def test_greedy_rows_of_one_batch_equal_transformers(graphed: StagePipeline, greedy: Callable[[str], Expected]) -> None:
    for name, trace in staggered(graphed, {name: options() for name in CASES}).items():
        expected = greedy(name)
        assert text_tokens(trace) == expected.text, name
        assert torch.equal(codes(trace), expected.codes), name
        assert trace.closed("talker->code2wav") and trace.closed("thinker->client")


def test_slots_used_again_remember_nothing(graphed: StagePipeline, greedy: Callable[[str], Expected]) -> None:
    for name in ("text", "image_audio"):
        assert torch.equal(codes(run(graphed, name, options())), greedy(name).codes)


def test_a_greedy_talker_with_a_penalty_equals_the_other_form(graphed: StagePipeline, omni_pipeline: StagePipeline) -> None:
    request = talker_options(temperature=0.0, repetition_penalty=1.6)
    free = talker_options(temperature=0.0)
    punished = codes(run(graphed, "text", request))
    assert torch.equal(punished, codes(run(omni_pipeline, "text", request)))
    assert not torch.equal(punished, codes(run(omni_pipeline, "text", free))), "the penalty must count"


def test_no_end_token_before_min_tokens(
    graphed: StagePipeline, omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]
) -> None:
    name = min(CASES, key=lambda name: len(greedy(name).talker))
    limit = len(greedy(name).talker) + 8
    assert limit < MAX_FRAMES, "one case must end by itself"
    for sampling in ({"min_tokens": limit}, {"ignore_eos": True}):
        request = talker_options(limit, temperature=0.0, **sampling)
        frames = codes(run(graphed, name, request))
        assert frames.shape[1] == limit - 1 and torch.equal(frames, codes(run(omni_pipeline, name, request)))


def test_a_thinker_without_end_token_equals_the_other_form(
    graphed: StagePipeline, omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]
) -> None:
    name = min(CASES, key=lambda name: len(greedy(name).text))
    limit = len(greedy(name).text) + 8
    assert limit < MAX_TEXT, "one case must end by itself"
    for sampling in ({"min_tokens": limit}, {"ignore_eos": True}, {"ignore_eos": True, "min_tokens": limit}):
        thinker = SamplingParams(temperature=0.0, max_tokens=limit, **sampling)
        request = RequestOptions(sampling={"thinker": thinker})
        ours, other = (run(pipeline, name, request).payloads("thinker->client") for pipeline in (graphed, omni_pipeline))
        tokens = [token for delta in ours for token in delta.token_ids]
        assert len(tokens) == limit and tokens == [token for delta in other for token in delta.token_ids]


def test_a_sampled_thinker_draws_from_what_the_other_form_draws_from(
    graphed: StagePipeline, omni_pipeline: StagePipeline
) -> None:
    """Penalty, temperature, top_k and top_p over the model's whole vocabulary; both forms with one noise."""
    for sampling in (
        SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.3, max_tokens=16),
        SamplingParams(temperature=1.0, max_tokens=16),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=16),
    ):
        request = RequestOptions(seed=5, sampling={"thinker": sampling})
        with device_draws():
            ours, other = (run(pipeline, "text", request).payloads("thinker->client") for pipeline in (graphed, omni_pipeline))
        assert [delta.token_ids for delta in ours] == [delta.token_ids for delta in other]


def test_sampled_text_depends_on_the_request_alone(graphed: StagePipeline) -> None:
    def said(trace: Trace) -> list[int]:
        return [token for delta in trace.payloads("thinker->client") for token in delta.token_ids]

    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=16)
    first, other = (RequestOptions(seed=seed, sampling={"thinker": sampling}) for seed in (5, 6))
    alone = said(run(graphed, "text", first))
    together = staggered(graphed, {name: first for name in ("audio", "history", "text", "image")})
    assert said(together["text"]) == alone
    assert said(run(graphed, "text", other)) != alone


def test_sampled_frames_depend_on_the_request_alone(graphed: StagePipeline) -> None:
    sampled = options(seed=7, max_frames=16)
    alone = codes(run(graphed, "text", sampled))
    together = staggered(graphed, {name: sampled for name in ("audio", "history", "text", "image")})
    assert torch.equal(codes(together["text"]), alone)
    assert not torch.equal(codes(run(graphed, "text", options(seed=8, max_frames=16)))[:, :8], alone[:, :8])
    assert alone.shape[1] > 4 and len(alone.unique(dim=1).T) > 4
