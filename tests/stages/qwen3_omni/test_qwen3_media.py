"""Media part by part: encoded as transformers encodes the whole, named by content, kept, and read no more often than needed."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, MediaPart, Message, TextPart
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from omni_bus.stages.qwen3_omni.encoder_units import chunk_width, windows
from omni_bus.stages.qwen3_omni.kept_media import KeptMedia
from omni_bus.stages.qwen3_omni.media_input import Heard, MediaInput
from omni_bus.stages.qwen3_omni.processor import Processor
from omni_bus.stages.qwen3_omni.rope_index import audio_tokens
from tests.support.qwen3_omni import CASES, Reference, chirp, options
from tests.support.stage_pipeline import StagePipeline, Trace

RATE = 16_000
REACH = 200  # samples on either side of its middle that a mel frame is computed from


@pytest.fixture
def processor(omni_pipeline: StagePipeline) -> Processor:
    return omni_pipeline.stages["processor"]._processor  # type: ignore[attr-defined,no-any-return]


def fresh(checkpoint: pathlib.Path, *, processor: dict[str, Any] | None = None, **thinker: Any) -> StagePipeline:
    """Stages that have seen nothing yet."""
    each = {"processor": processor or {}, "thinker": thinker}
    return StagePipeline(
        load_pipeline("qwen3_omni"), str(checkpoint), ("processor", "thinker", "talker"), options=each, max_batch=4
    )


@pytest.fixture(scope="module")
def forgetful(omni_checkpoint: pathlib.Path) -> StagePipeline:
    """Stages that keep nothing: every request is the first one."""
    torch.set_num_threads(1)
    return fresh(omni_checkpoint, processor={"media_cache_mb": 0}, prefix_cache=False, media_cache_mb=0)


def spoken(seconds: float, seed: int) -> np.ndarray:
    """Loudest at its beginning: what follows moves no floor."""
    audio = chirp(seconds, seed)
    audio[: RATE // 4] *= 2.2
    return audio


def turn(*audios: np.ndarray, text: str = "") -> tuple[ChatInput, dict[str, torch.Tensor]]:
    """A conversation in which each audio is a turn of the user, and the assistant answered all but the last."""
    messages = []
    for index in range(len(audios)):
        parts = (MediaPart("audio", index), *((TextPart(text),) if text else ()))
        messages += [Message("user", parts), Message("assistant", (TextPart(f"Answer {index}."),))]
    return ChatInput(tuple(messages[:-1])), {f"media{index}": torch.from_numpy(audio) for index, audio in enumerate(audios)}


def drain(work: Any) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def hear(media: MediaInput, *audios: np.ndarray, growing: bool = False) -> list[Heard]:
    heard: list[Heard] = drain(media.audio(list(audios), growing=growing)).heard
    return heard


# ---- encoders


@pytest.mark.parametrize(
    "lengths",
    [
        [33],
        [65],
        [97],
        [98],
        [100],
        [163],
        [799],
        [800],
        [801],
        [865],
        [1650],
        [250, 63],
        [63, 40],
        [97, 33, 98],
        [40, 2000, 866],
    ],
    ids=str,
)
def test_windows_one_by_one_are_the_audio_encoder_on_the_whole(lengths: list[int], omni_pipeline: StagePipeline) -> None:
    encoders = omni_pipeline.stages["thinker"].program.media._encoders  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(sum(lengths))
    audios = [torch.randn(128, length, generator=generator) for length in lengths]
    with torch.no_grad():
        whole = encoders.audio_tower(torch.cat(audios, dim=1), feature_lens=torch.tensor(lengths)).last_hidden_state
    parts = [audio[:, part.start : part.stop] for audio in audios for part in windows(audio.shape[1], 800)]
    width = chunk_width(lengths)
    alone = torch.cat([encoders.audio([part], width)[0].rows for part in parts])
    together = torch.cat([encoded.rows for encoded in encoders.audio(parts, width)])
    assert whole.shape == alone.shape == (sum(map(audio_tokens, lengths)), whole.shape[1])
    assert (alone - whole).abs().max() < 2e-5 * whole.abs().max()
    assert (together - whole).abs().max() < 2e-5 * whole.abs().max()


def test_a_short_audio_needs_the_width_of_its_conversation(omni_pipeline: StagePipeline) -> None:
    """The test above would prove less than it says if the padding did not count."""
    encoders = omni_pipeline.stages["thinker"].program.media._encoders  # type: ignore[attr-defined]
    audio = torch.randn(128, 33, generator=torch.Generator().manual_seed(1))
    narrow, wide = (encoders.audio([audio], width)[0].rows for width in (33, 100))
    assert (narrow - wide).abs().max() > 1e-3


def test_steps_of_a_video_are_the_vision_encoder_on_the_whole(omni_pipeline: StagePipeline) -> None:
    encoders = omni_pipeline.stages["thinker"].program.media._encoders  # type: ignore[attr-defined]
    steps = torch.randn(3, 4 * 6, 1536, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = encoders.visual(steps.flatten(0, 1), grid_thw=torch.tensor([(3, 4, 6)]))
    parts = [encoders.vision([step], [(1, 4, 6)])[0] for step in steps]
    assert torch.allclose(torch.cat([part.rows for part in parts]), whole.pooler_output, atol=1e-5)
    deepstack = torch.cat([part.deepstack for part in parts], dim=1)
    assert torch.allclose(deepstack, torch.stack(list(whole.deepstack_features)), atol=1e-5)


# ---- features


def test_features_of_many_audios_are_those_of_transformers_in_one_call(processor: Processor, reference: Reference) -> None:
    dice = np.random.default_rng(0)
    for round_ in range(40):
        audios = [
            (dice.standard_normal(dice.integers(400, 30_000)) * dice.choice([1e-3, 0.1, 0.5])).astype(np.float32)
            for _ in range(dice.integers(1, 4))
        ]
        if round_ % 2:  # a little shorter than another, so that its end is part silence, part reflection
            audios.append(audios[0][: len(audios[0]) - int(dice.integers(0, min(700, len(audios[0]) - 399)))].copy())
        expected = reference.mel(
            audios, sampling_rate=RATE, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt"
        )
        counts = expected["attention_mask"].sum(-1).tolist()
        heard = hear(processor.media, *audios)
        assert [one.frames for one in heard] == counts
        for one, features, count in zip(heard, expected["input_features"], counts, strict=True):
            assert (one.features - features[:, :count]).abs().max() < 1e-6


def test_digests_name_what_an_encoder_reads(processor: Processor) -> None:
    audio = spoken(20, 1)
    first = hear(processor.media, audio)[0]
    assert len(first.digests) == len(set(first.digests)) == 3
    changed = audio.copy()
    changed[12 * RATE] += 0.01
    second = hear(processor.media, changed)[0]
    assert [a == b for a, b in zip(first.digests, second.digests, strict=True)] == [True, False, True]
    assert hear(processor.media, audio.copy())[0].digests == first.digests


def test_an_audio_that_ends_in_silence_is_the_same_whatever_else_is_said(processor: Processor) -> None:
    """Of any other one the last frames change when a longer one follows, as they do in transformers, and with them its last window."""
    audio = spoken(20, 2)
    silent = np.concatenate([audio[: -len(audio) % 160 or None], np.zeros(2 * REACH + 80, np.float32)])
    assert len(silent) % 160 == 0
    alone, silent_alone = hear(processor.media, audio)[0], hear(processor.media, silent)[0]
    followed = hear(processor.media, audio, silent, spoken(23, 3))
    assert [a == b for a, b in zip(alone.digests, followed[0].digests, strict=True)] == [True, True, False]
    assert followed[1].digests == silent_alone.digests


def test_the_chunk_width_counts_only_where_all_is_short(processor: Processor) -> None:
    short = np.concatenate([spoken(0.5, 4), np.zeros(480, np.float32)])
    among_short = hear(processor.media, short, short[:4800])[0]
    among_long = hear(processor.media, short, spoken(1.2, 5))[0]
    assert torch.equal(among_short.features, among_long.features) and among_short.digests != among_long.digests
    assert hear(processor.media, short, spoken(9, 5))[0].digests == among_long.digests


@pytest.mark.parametrize(
    ("samples", "certain"),
    [(0, 0), (199, 0), (48_000, 0), (128_000, 0), (128_039, 0), (128_040, 1), (256_039, 1), (260_000, 2)],
)
def test_what_is_prepared_of_a_growing_audio_stays(samples: int, certain: int, processor: Processor) -> None:
    """A window is certain when the last of its frames, whose middle is 160 samples before the window's end, has all that it reads."""
    whole = spoken(20, 6)
    final = hear(processor.media, spoken(1, 7), whole)
    grown = hear(processor.media, spoken(1, 7), whole[:samples], growing=True)
    assert len(grown) == (2 if certain else 1)
    if certain:
        assert grown[1].digests == final[1].digests[:certain]
        assert torch.equal(grown[1].features, final[1].features[:, : 800 * certain])
    if samples == 128_039:  # one sample too few, and what comes next would count
        before, after = (hear(processor.media, whole[:cut])[0].features[:, 799] for cut in (samples, samples + 400))
        assert not torch.equal(before, after)


def test_an_unfinished_prompt_is_the_beginning_of_the_finished_one(processor: Processor) -> None:
    history, said = spoken(2, 8), spoken(20, 9)
    chat, tensors = turn(history, said)
    final = processor.prepare(chat, tensors)
    for seconds, rows in ((0.2, 0), (7.5, 0), (8.5, 104), (16.5, 208)):
        cut = {**tensors, "media1": tensors["media1"][: int(seconds * RATE)]}
        begun = processor.prepare(chat, cut, unfinished=True)
        assert begun.token_ids == final.token_ids[: len(begun.token_ids)]
        assert begun.token_ids.count(processor.config.thinker.media.audio) == audio_tokens(200) + rows
        assert len(begun.media.audio_lengths) == len(begun.inputs.content.audios) == 1 + (rows > 0)
        assert begun.tensors["input_features"].shape[1] == sum(begun.media.audio_lengths)
    ended = Message("user", (TextPart("x"),))
    for other in (ChatInput((*chat.messages[:-1], ended)), ChatInput(chat.messages[:2])):
        assert processor.prepare(other, tensors, unfinished=True).inputs == processor.prepare(other, tensors).inputs


def test_media_are_read_once_within_the_bound(omni_checkpoint: pathlib.Path, forgetful: StagePipeline) -> None:
    names = ("audios", "images", "video", "mixture")
    kept = fresh(omni_checkpoint).stages["processor"]._processor  # type: ignore[attr-defined]
    chats = [CASES[name].chat() for name in names]
    before = [kept.prepare(*chat) for chat in chats]
    read = kept.media.extracted
    after = [kept.prepare(*chat) for chat in chats]
    assert kept.media.extracted == read > 0
    none = forgetful.stages["processor"]._processor  # type: ignore[attr-defined]
    anew = [none.prepare(*chat) for chat in chats]
    for one, two, three in zip(before, after, anew, strict=True):
        assert one.inputs == two.inputs == three.inputs and one.tensors.keys() == two.tensors.keys()
        assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)
        assert all(torch.equal(one.tensors[name], three.tensors[name]) for name in one.tensors)
    assert none.media._kept.bytes == 0 and len(none.media._kept) == 0


def test_kept_media_are_bounded_and_the_oldest_go_first() -> None:
    kept: KeptMedia[int] = KeptMedia(100)
    for number in range(12):
        kept.keep(bytes([number]), number, 10)
        assert kept.find(b"\0") == 0, "used each time"
    assert kept.bytes == 100 and [kept.find(bytes([number])) for number in range(1, 4)] == [None, None, 3]
    kept.keep(b"large", 1, 101)
    assert kept.find(b"large") is None and kept.bytes == 100
    kept.keep(b"\0", 7, 60)
    assert kept.find(b"\0") == 0 and kept.bytes == 100, "what is there stays as it is"


# ---- the Thinker


def ask(pipeline: StagePipeline, chat: ChatInput, tensors: dict[str, torch.Tensor], **said: Any) -> Trace:
    trace = pipeline.submit(len(pipeline.traces), chat, tensors, options=options(max_text=12, max_frames=12, **said))
    pipeline.run()
    assert trace.error is None
    return trace


def prepare(pipeline: StagePipeline, chat: ChatInput, tensors: dict[str, torch.Tensor]) -> Trace:
    trace = pipeline.submit(len(pipeline.traces), chat, tensors, options=RequestOptions(prepare=True))
    pipeline.run()
    assert trace.error is None
    assert [(delta.text, delta.token_ids) for delta in trace.payloads("thinker->client")] == [("", ())]
    assert trace.usage["thinker"]["completion_tokens"] == 0 and trace.closed("thinker->client")
    return trace


def said(trace: Trace) -> tuple[list[int], list[list[int]]]:
    """The answer's tokens and codes."""
    tokens = [token for payload in trace.payloads("thinker->talker") for token in payload.token_ids]
    frames = [output.tensors["codes"][0].tolist() for output in trace.chunks["talker->code2wav"] if output.payload.count]
    return tokens, frames


@pytest.mark.parametrize("name", ["audios", "mixture"])
def test_kept_parts_are_not_encoded_again_and_change_nothing(
    name: str, omni_checkpoint: pathlib.Path, forgetful: StagePipeline
) -> None:
    first, second = {}, {}
    chat = CASES[name].chat()
    for kept, thinker in (
        ("nothing", None),
        ("parts", {"prefix_cache": False}),
        ("blocks", {"media_cache_mb": 0}),
        ("both", {}),
    ):
        pipeline = forgetful if thinker is None else fresh(omni_checkpoint, **thinker)
        first[kept] = ask(pipeline, *chat)
        second[kept] = ask(pipeline, *chat)
        assert said(first[kept]) == said(second[kept]) == said(first["nothing"])
    encoded = {
        kept: (first[kept].usage["thinker"]["encoded_parts"], second[kept].usage["thinker"]["encoded_parts"]) for kept in first
    }
    parts = encoded["nothing"][0]
    assert parts > 0
    in_last_block = encoded["blocks"][1]  # of the prompt, which is not full: what ends there is computed again
    assert in_last_block == (name == "audios")
    assert encoded == {"nothing": (parts, parts), "parts": (parts, 0), "blocks": (parts, in_last_block), "both": (parts, 0)}


def test_a_long_audio_is_encoded_between_the_steps_of_others(omni_checkpoint: pathlib.Path) -> None:
    pipeline = fresh(omni_checkpoint, max_prefill_tokens=104)
    talking = RequestOptions(sampling={"thinker": SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)})
    other = pipeline.submit(0, *CASES["text"].chat(), options=talking)
    while not other.payloads("thinker->client"):
        pipeline.step()
    chat, tensors = turn(spoken(45, 10))
    listening = pipeline.submit(1, chat, tensors, options=RequestOptions(sampling={"thinker": SamplingParams(max_tokens=2)}))
    thinker = pipeline.stages["thinker"]
    pipeline._handle("processor", pipeline.stages["processor"].step())
    while pipeline.stages["processor"].has_work():
        pipeline._handle("processor", pipeline.stages["processor"].step())
    rows = thinker._rows[1].data.media[0]  # type: ignore[attr-defined]
    assert len(rows.parts) == 6
    written = thinker._rows[0].output_ids  # type: ignore[attr-defined]
    steps = 0
    while not listening.payloads("thinker->client"):
        encoded, tokens = rows.encoded, len(written)
        pipeline._handle("thinker", thinker.step())
        steps += 1
        assert rows.encoded - encoded <= 2, "no more than the piece needs"
        assert len(written) == tokens + 1, "the other row goes on in each of these steps"
    assert steps >= 6 and rows.encoded == 6
    pipeline.cancel(0)
    pipeline.run()


def test_what_was_prepared_is_not_computed_again_and_the_answer_is_that_of_a_fresh_start(
    omni_checkpoint: pathlib.Path, forgetful: StagePipeline
) -> None:
    """A turn of 20 s behind a history: prepared when it begins, at 8 s and at 16 s; the request itself encodes the tail alone."""
    history = np.concatenate([spoken(2, 11)[:31_840], np.zeros(480, np.float32)])
    whole = spoken(20.3, 12)
    chat, tensors = turn(history, whole)
    pipeline = fresh(omni_checkpoint)
    engine = pipeline.stages["thinker"]._engine  # type: ignore[attr-defined]
    computed, encoded = [], []
    for request in (
        lambda: prepare(pipeline, ChatInput(chat.messages[:2]), {"media0": tensors["media0"]}),
        lambda: prepare(pipeline, chat, {**tensors, "media1": tensors["media1"][: 8 * RATE + 400]}),
        lambda: prepare(pipeline, chat, {**tensors, "media1": tensors["media1"][: 16 * RATE + 400]}),
        lambda: ask(pipeline, chat, tensors),
    ):
        before = engine.prompt_computed
        trace = request()
        computed.append(engine.prompt_computed - before)
        encoded.append(trace.usage["thinker"]["encoded_parts"])
    assert encoded == [1, 1, 1, 1]
    block = 16
    tail = audio_tokens(2030 - 1600) + 8  # and what the template puts behind an audio
    assert computed[1] < 104 + 2 * block and computed[2] < 104 + 2 * block and computed[3] < tail + 2 * block
    usage = trace.usage["thinker"]
    assert usage["cached_tokens"] + computed[3] == usage["prompt_tokens"]
    alone = ask(forgetful, chat, tensors)
    assert alone.usage["thinker"]["encoded_parts"] == 4 and "cached_tokens" not in alone.usage["thinker"]
    assert said(trace) == said(alone)


def test_a_louder_sound_later_costs_time_and_nothing_else(omni_checkpoint: pathlib.Path, forgetful: StagePipeline) -> None:
    """It moves the floor of the features before it, so that what was prepared is of no use."""
    whole = chirp(18, 13)
    whole[-RATE:] *= 2
    chat, tensors = turn(whole)
    pipeline = fresh(omni_checkpoint)
    prepare(pipeline, chat, {"media0": tensors["media0"][: 16 * RATE + 400]})
    trace = ask(pipeline, chat, tensors)
    assert trace.usage["thinker"]["encoded_parts"] == 3 and trace.usage["thinker"]["cached_tokens"] == 0
    assert said(trace) == said(ask(forgetful, chat, tensors))


def test_the_next_turn_computes_what_is_new_alone(omni_checkpoint: pathlib.Path, forgetful: StagePipeline) -> None:
    """Audio with silence at its end, as a session sends it; a picture; then a change in the middle."""
    pipeline = fresh(omni_checkpoint, media_cache_mb=0)
    engine = pipeline.stages["thinker"]._engine  # type: ignore[attr-defined]
    silence = np.zeros(480, np.float32)
    first, second = (
        np.concatenate([spoken(seconds, seed)[: int(seconds * 100) * 160], silence]) for seconds, seed in ((3, 14), (5, 15))
    )
    one = ask(pipeline, *turn(first, text="Listen."))
    before = engine.prompt_computed
    two = ask(pipeline, *turn(first, second, text="Listen."))
    new = two.usage["thinker"]["prompt_tokens"] - one.usage["thinker"]["prompt_tokens"]
    assert engine.prompt_computed - before <= new + 2 * 16 and two.usage["thinker"]["encoded_parts"] == 1
    assert said(two) == said(ask(forgetful, *turn(first, second, text="Listen.")))
    before = engine.prompt_computed
    three = ask(pipeline, *turn(second, second, text="Listen."))
    assert three.usage["thinker"]["encoded_parts"] == 2 and engine.prompt_computed - before > new
    assert said(three) == said(ask(forgetful, *turn(second, second, text="Listen.")))


def test_a_picture_that_cannot_be_encoded_fails_its_request_alone(
    omni_checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = fresh(omni_checkpoint)
    media = pipeline.stages["thinker"].program.media  # type: ignore[attr-defined]
    encode = media._encoders.vision

    def broken(patches: Any, grids: Any) -> Any:
        if len(patches[0]) == 4 * 6:
            raise RuntimeError("no memory")
        return encode(patches, grids)

    monkeypatch.setattr(media._encoders, "vision", broken)
    bad = pipeline.submit(0, *CASES["image"].chat(), options=options(max_text=4, max_frames=4))
    good = [
        pipeline.submit(1 + index, *CASES[name].chat(), options=options(max_text=4, max_frames=4))
        for index, name in enumerate(("text", "video"))
    ]
    pipeline.run()
    assert bad.error is not None and bad.error.code == "stage_failed" and "no memory" not in bad.error.message
    assert all(trace.error is None and trace.closed("talker->code2wav") for trace in good)
    stats = pipeline.stages["thinker"].stats()
    assert (stats.waiting, stats.running, stats.kv_blocks_used) == (0, 0, 0)
