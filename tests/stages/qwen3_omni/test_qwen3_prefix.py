"""Conversations with Qwen3-Omni turn by turn: what the Thinker has computed before it does not compute again, media included, and
text and codes are those of a pipeline that keeps nothing."""

from __future__ import annotations

import msgspec
import pytest
import torch

from omni_bus.events import RequestOptions
from omni_bus.payloads import TextDelta
from omni_bus.spec import load_pipeline
from tests.support.qwen3_omni import AUDIO, IMAGE, Case, chirp, options
from tests.support.stage_pipeline import StagePipeline, Trace

STAGES = ("processor", "thinker", "talker")
BLOCK = 4
SHORT = options(max_text=9, max_frames=6)


def pipeline(directory, **thinker: object) -> StagePipeline:
    torch.set_num_threads(1)
    said = {"thinker": {"block_size": BLOCK, "kv_blocks": 400, **thinker}, "talker": {"kv_blocks": 100}}
    return StagePipeline(load_pipeline("qwen3_omni"), str(directory), STAGES, options=said)


@pytest.fixture(scope="module")
def fresh(omni_checkpoint) -> StagePipeline:
    return pipeline(omni_checkpoint, prefix_cache=False, media_cache_mb=0)


@pytest.fixture(params=["off", "plain"])
def keeping(omni_checkpoint, request) -> StagePipeline:
    return pipeline(omni_checkpoint, graphs=request.param)


def run(stages: StagePipeline, case: Case, request: RequestOptions = SHORT) -> Trace:
    trace = stages.submit(len(stages.traces), *case.chat(), options=request)
    stages.run()
    assert trace.error is None
    for name in ("thinker", "talker"):
        stats = stages.stages[name].stats()
        assert (stats.waiting, stats.running, stats.kv_blocks_used) == (0, 0, 0)
    return trace


def prompt_of(trace: Trace) -> list[int]:
    return list(trace.payloads("processor->thinker")[0].token_ids)


def tokens_of(trace: Trace) -> list[int]:
    return [token for delta in trace.payloads("thinker->client") for token in delta.token_ids]


def text_of(trace: Trace) -> str:
    return "".join(delta.text for delta in trace.payloads("thinker->client"))


def codes_of(trace: Trace) -> list[list[int]]:
    return [
        frame
        for output in trace.chunks["talker->code2wav"]
        if output.payload.count
        for frame in output.tensors["codes"].tolist()
    ]


def check_same(trace: Trace, expected: Trace) -> None:
    assert prompt_of(trace) == prompt_of(expected)
    assert tokens_of(trace) == tokens_of(expected) and tokens_of(trace)
    assert codes_of(trace) == codes_of(expected) and codes_of(trace)


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Talk:
    """A conversation whose every turn is asked of both pipelines; counts what is computed."""

    def __init__(self, keeping: StagePipeline, fresh: StagePipeline) -> None:
        self.keeping, self.fresh = keeping, fresh
        self.known: list[list[int]] = []  # what has been computed, as ids; equal ids are equal media in these tests

    def ask(self, case: Case) -> Trace:
        before = self.keeping.stages["thinker"].stats().prompt_computed
        trace = run(self.keeping, case)
        check_same(trace, run(self.fresh, case))
        ids = prompt_of(trace)
        most = max((common(known, ids) for known in self.known), default=0)
        cached = min(most, len(ids) - 1) // BLOCK * BLOCK
        assert trace.usage["thinker"]["cached_tokens"] == cached
        assert trace.usage["thinker"]["prompt_tokens"] == len(ids)
        assert self.keeping.stages["thinker"].stats().prompt_computed - before == len(ids) - cached
        heard = [token for payload in trace.payloads("thinker->talker") for token in payload.token_ids]
        self.known.append([*ids, *heard[:-1]])  # the last token is never computed
        return trace


QUESTIONS = {
    "text": (("Who are you?",), ("Whose voice is it?",), ("And now?",)),
    "audio": ((AUDIO, "What is said?"), (("audio", chirp(0.9, 7)),), ("Say it again.", ("audio", chirp(0.6, 8)))),
    "image": ((IMAGE, "What is it?"), (AUDIO, "And this?"), ("Both again.",)),
}


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_turn_computes_only_what_is_new(keeping, fresh, kind):
    talk = Talk(keeping, fresh)
    turns: tuple = (("system", ("You are terse.",)),)
    for question in QUESTIONS[kind]:
        turns = (*turns, ("user", question))
        trace = talk.ask(Case(turns))
        turns = (*turns, ("assistant", (text_of(trace),)))
    assert trace.usage["thinker"]["cached_tokens"] > len(prompt_of(trace)) // 2


def test_a_history_that_is_cut_or_changed_computes_the_rest(keeping, fresh):
    talk = Talk(keeping, fresh)
    user, other = (AUDIO, "What is said?"), ("audio", chirp(0.9, 7))
    whole = (("user", user), ("assistant", ("It was a tone, and it rose.",)), ("user", ("And this?", other)))
    talk.ask(Case(whole))
    talk.ask(Case((*whole[:1], ("assistant", ("It was a tone",)), *whole[2:])))  # only so far was heard
    talk.ask(Case((*whole[:1], ("user", ("Hello?",)))))  # an answer was deleted
    talk.ask(Case(whole[2:]))  # the first turn was
    talk.ask(Case(whole))


def test_another_audio_of_the_same_length_is_computed(keeping, fresh):
    for seed in (0, 5, 0):
        case = Case((("user", (("audio", chirp(1.7, seed)), "What is said?")),))
        trace = run(keeping, case)
        check_same(trace, run(fresh, case))
    first = prompt_of(trace).index(load_ids(keeping).audio)
    cached = [trace.usage["thinker"]["cached_tokens"] for trace in keeping.traces.values()]
    assert cached[:2] == [0, first // BLOCK * BLOCK] and cached[2] > len(prompt_of(trace)) - BLOCK - 1


def load_ids(stages: StagePipeline):
    return stages.stages["thinker"].program.config.thinker.media  # type: ignore[attr-defined]


@pytest.mark.parametrize("modalities", [("text",), ("text", "audio")])
def test_a_prepared_conversation_says_nothing_and_is_there_when_it_is_asked(keeping, fresh, modalities):
    case = Case((("user", (AUDIO, "What is said?")), ("assistant", ("A tone.",)), ("user", (IMAGE, "And here?"))))
    request = msgspec.structs.replace(SHORT, prepare=True, modalities=modalities)
    trace = run(keeping, case, request)
    assert trace.payloads("thinker->client") == [TextDelta("", (), "stop")] and trace.closed("thinker->client")
    assert trace.usage["thinker"]["completion_tokens"] == 0 and trace.usage["thinker"]["cached_tokens"] == 0
    spoken = modalities == ("text", "audio")
    assert set(trace.usage) == ({"processor", "thinker", "talker"} if spoken else {"processor", "thinker"})
    if spoken:
        assert trace.closed("talker->code2wav") and codes_of(trace) == []
    answer = run(keeping, case)
    check_same(answer, run(fresh, case))
    assert answer.usage["thinker"]["cached_tokens"] == (len(prompt_of(answer)) - 1) // BLOCK * BLOCK


def test_conversations_beside_each_other_in_a_small_pool(omni_checkpoint, fresh):
    """Kept blocks are written over all the time; nobody's answer changes."""
    stages = pipeline(omni_checkpoint, kv_blocks=70, max_prefill_tokens=48)
    cases = [
        Case((("user", (AUDIO, "What is said?")), ("assistant", ("Aha.",)), ("user", (f"Turn {number}",))))
        if number % 3
        else Case((("user", (IMAGE, f"Look {number}")),))
        for number in range(9)
    ]
    for _ in range(2):
        traces = [stages.submit(len(stages.traces), *case.chat(), options=SHORT) for case in cases]
        stages.run()
        for case, trace in zip(cases, traces, strict=True):
            assert trace.error is None
            check_same(trace, run(fresh, case))
    stats = stages.stages["thinker"].stats()
    assert stats.kv_blocks_used == 0 and stats.prompt_cached > 100
