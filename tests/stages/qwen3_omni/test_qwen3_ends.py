"""How answers end: no text, no speech, length, stop strings, cancel and pause. Where transformers raises, there is a right answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.stages.contract import Chunk, StageRequest
from omni_bus.stages.qwen3_omni.payloads import ThinkerTokens
from tests.support.qwen3_omni import CASES, Expected, Reference, options
from tests.support.qwen3_traces import frames, run
from tests.support.stage_pipeline import StagePipeline


def talker_options(request: RequestOptions, **talker: object) -> RequestOptions:
    sampling = {**request.sampling, "talker": SamplingParams(temperature=0.0, **talker)}  # type: ignore[arg-type]
    return RequestOptions(modalities=request.modalities, voice=request.voice, sampling=sampling)


def nothing_left(pipeline: StagePipeline) -> None:
    for name in ("thinker", "talker"):
        stats = pipeline.stages[name].stats()
        assert (stats.waiting, stats.running, stats.kv_blocks_used) == (0, 0, 0)
        assert not pipeline.stages[name]._rows  # type: ignore[attr-defined]
    assert not pipeline.stages["processor"]._jobs  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["text", "image_audio"])
def test_no_text_gives_no_audio(name: str, omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]) -> None:
    first = greedy(name).text[0]
    for request in (options(max_text=1), options(stop_token_ids=(first,))):
        trace = run(omni_pipeline, name, request)
        assert [(output.payload.count, output.last) for output in trace.chunks["talker->code2wav"]] == [(0, True)]
        assert trace.usage["talker"] == {"prompt_rows": 0, "frames": 0}
    nothing_left(omni_pipeline)


def test_talker_that_ends_at_once_gives_empty_audio(omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]) -> None:
    first = greedy("text").talker[0]
    for talker in ({"max_tokens": 1}, {"stop_token_ids": (first,)}):
        trace = run(omni_pipeline, "text", talker_options(options(), **talker))
        assert frames(trace) == [] and trace.closed("talker->code2wav") and trace.closed("thinker->client")
        assert [token for p in trace.payloads("thinker->talker") for token in p.token_ids] == greedy("text").text
    nothing_left(omni_pipeline)


def test_talker_told_to_ignore_its_end_token_goes_on_with_codes(
    omni_pipeline: StagePipeline, greedy: Callable[[str], Expected], reference: Reference
) -> None:
    eos = reference.config.talker_config.codec_eos_token_id
    name = next(name for name in CASES if greedy(name).talker[-1] == eos and len(greedy(name).talker) < 30)
    trace = run(omni_pipeline, name, talker_options(options(), max_tokens=36, ignore_eos=True))
    made = frames(trace)
    assert len(made) == 35 and max(map(max, made)) < reference.config.code2wav_config.codebook_size
    assert made[: len(greedy(name).talker) - 1] == greedy(name).codes.T.tolist()


def test_text_stopped_by_length_is_spoken_without_its_last_token(omni_pipeline: StagePipeline, reference: Reference) -> None:
    for max_text in (2, 3, 6):
        expected = reference.generate(CASES["text"], max_text=max_text, max_frames=12)
        trace = run(omni_pipeline, "text", options(max_text=max_text, max_frames=12))
        assert frames(trace) == expected.codes.T.tolist()
        assert trace.payloads("thinker->client")[-1].finish_reason == "length"


def test_a_stop_string_is_neither_shown_nor_spoken(
    omni_pipeline: StagePipeline, greedy: Callable[[str], Expected], reference: Reference
) -> None:
    """The Talker must hear what it would hear if the text had ended there by itself: the tokens before, then the end."""
    whole = greedy("text").text
    tokenizer = reference.tokenizer
    at, stop = next(
        (index, piece)
        for index in range(3, len(whole) - 2)
        if "\ufffd" not in (piece := tokenizer.decode(whole[index : index + 2]))
        and piece.strip()
        and "\ufffd" not in tokenizer.decode(whole[:index])[-2:]
        and piece not in tokenizer.decode(whole[: index + 1])
    )
    trace = run(omni_pipeline, "text", options(stop=(stop,)))
    text = "".join(delta.text for delta in trace.payloads("thinker->client"))
    assert text == tokenizer.decode(whole, skip_special_tokens=True).split(stop)[0]
    assert trace.payloads("thinker->client")[-1].finish_reason == "stop"
    heard = [token for payload in trace.payloads("thinker->talker") for token in payload.token_ids]
    assert heard == [*whole[:at], reference.config.im_end_token_id]
    assert trace.closed("thinker->talker") and frames(trace)
    nothing_left(omni_pipeline)


def test_talker_starts_on_the_first_token_and_waits_for_each_next_one(
    omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]
) -> None:
    """Fed by hand: after tokens 0 … n, exactly n frames come, however long one waits."""
    recorded = run(omni_pipeline, "audio", options())
    prompt = recorded.chunks["processor->talker"][0]
    talker = omni_pipeline.stages["talker"]
    request = options()
    talker.open(
        StageRequest(
            id=5000,
            options=request,
            sampling=omni_pipeline.spec.stage("talker").sampling.merged(request.sampling["talker"]),  # type: ignore[union-attr]
            inputs=("processor->talker", "thinker->talker"),
            outputs=("talker->code2wav",),
            deadline=1e18,
        )
    )
    made: list[list[int]] = []

    def drain() -> int:
        while talker.has_work():
            made.extend(
                emission.tensors["codes"][0].tolist()
                for emission in talker.step()
                if "codes" in getattr(emission, "tensors", {})
            )
        return len(made)

    talker.feed(5000, Chunk(prompt.edge, prompt.payload, {}, True))
    assert drain() == 0
    text = greedy("audio").text
    rows = recorded.chunks["thinker->talker"][0].tensors
    talker.feed(5000, Chunk("thinker->talker", ThinkerTokens(()), rows, False))
    assert drain() == 0
    row = talker._rows[5000]  # type: ignore[attr-defined]
    assert row.length == recorded.usage["talker"]["prompt_rows"] - 1, "every row but the first spoken token's is there"
    assert row.computed >= row.length - 1, "and computed, but for the one that is held back while the prompt is open"
    most = row.length + 1 + request.sampling["talker"].max_tokens  # type: ignore[operator]
    assert talker.stats().kv_blocks_used <= -(-most // 16), "waiting for a token reserves what the answer can need, not all"
    expected = greedy("audio").codes.T.tolist()
    for index, token in enumerate(text[:-1]):
        talker.feed(5000, Chunk("thinker->talker", ThinkerTokens((token,)), {}, False))
        count = drain()
        assert count == min(index + 1, len(expected))
        if count == len(expected):
            break
    talker.feed(5000, Chunk("thinker->talker", ThinkerTokens((text[-1],), last=True), {}, True))
    drain()
    assert made == expected
    nothing_left(omni_pipeline)


def test_cancel_at_any_moment_leaves_nothing_and_disturbs_nobody(
    omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]
) -> None:
    for steps in (0, 1, 2, 3, 6, 15):
        base = 6000 + steps * 10
        gone = [
            omni_pipeline.submit(base + index, *CASES[name].chat(), options=options(max_frames=16))
            for index, name in enumerate(("text", "image_audio"))
        ]
        kept = omni_pipeline.submit(base + 5, *CASES["text"].chat(), options=options())
        for _ in range(steps):
            omni_pipeline.step()
        for index in range(len(gone)):
            omni_pipeline.cancel(base + index)
        omni_pipeline.cancel(base + 1)  # twice is once
        omni_pipeline.run()
        assert frames(kept) == greedy("text").codes.T.tolist()
        nothing_left(omni_pipeline)


def test_paused_talker_holds_its_frames_while_the_text_goes_on(
    omni_pipeline: StagePipeline, greedy: Callable[[str], Expected]
) -> None:
    trace = omni_pipeline.submit(7000, *CASES["text"].chat(), options=options())
    while not trace.chunks.get("talker->code2wav"):
        omni_pipeline.step()
    omni_pipeline.stages["talker"].pause(7000)
    omni_pipeline.run()
    assert trace.closed("thinker->client") and len(frames(trace)) == 1
    omni_pipeline.stages["talker"].resume(7000)
    omni_pipeline.run()
    assert torch.tensor(frames(trace)).T.tolist() == greedy("text").codes.tolist()


def test_unknown_voice_is_refused_with_the_nearest_one(omni_pipeline: StagePipeline) -> None:
    trace = omni_pipeline.submit(8000, *CASES["text"].chat(), options=options(voice="chelsea"))
    assert trace.error is not None
    assert (trace.error.code, trace.error.status) == ("model_refused", 422) and "chelsie" in trace.error.message
    omni_pipeline.run()
    nothing_left(omni_pipeline)
