"""Qwen3-Omni through the running server: HTTP in, SSE out, and every token and sample what transformers makes of the prompt."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import pathlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.chat_http import Answer, messages, stream
from tests.support.qwen3_omni import CASES, MAX_FRAMES, MAX_TEXT, Case, Expected, Reference
from tests.support.running_server import Server, eventually, running

MODEL = "tiny-omni"
GREEDY_TALKER = {"temperature": 0.0, "max_tokens": MAX_FRAMES}
Greedy = Callable[[str], Expected]


@pytest.fixture(scope="module")
def server(omni_checkpoint: pathlib.Path) -> Iterator[Server]:
    """Code2Wav in float64, so that its PCM16 can be compared bit for bit."""
    sets = [f"model.path={omni_checkpoint}", f"model.name={MODEL}", "stages.code2wav.dtype=float64"]
    with running("qwen3_omni_tiny.toml", sets=sets) as server:
        yield server


def ask(server: Server, case: Case, **said: Any) -> Answer:
    body = {
        "model": MODEL,
        "messages": messages(case),
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "pcm16"},
        "sampling": {"thinker": {"temperature": 0.0, "max_tokens": MAX_TEXT}, "talker": GREEDY_TALKER},
        **said,
    }
    return stream(server.url, body)


def pcm16(reference: Reference, codes: torch.Tensor) -> np.ndarray:
    """transformers' Code2Wav in one pass and in float64, rounded to int16. codes: [16, frames]."""
    if not codes.shape[-1]:
        return np.zeros(0, np.int16)
    decoder = reference.model.code2wav.double()
    try:
        with torch.no_grad():
            wave = decoder(codes[None])[0, 0]
    finally:
        reference.model.code2wav.float()
    return (wave.clamp(-1, 1) * 32767).round().to(torch.int16).numpy()


def check(answer: Answer, expected: Expected, reference: Reference) -> None:
    assert not answer.errors
    assert answer.text == reference.tokenizer.decode(expected.text, skip_special_tokens=True)
    assert answer.usage["completion_tokens"] >= len(expected.text)
    ended = expected.text[-1] == reference.config.im_end_token_id
    assert answer.finish_reason == ("stop" if ended else "length")
    wanted = pcm16(reference, expected.codes)
    assert len(answer.pcm) == len(wanted)
    assert np.array_equal(answer.pcm, wanted), np.abs(answer.pcm.astype(int) - wanted).max()


@pytest.mark.parametrize("name", CASES)
def test_text_and_waveform_equal_transformers(server: Server, greedy: Greedy, reference: Reference, name: str) -> None:
    check(ask(server, CASES[name]), greedy(name), reference)


def test_requests_at_the_same_time_equal_the_same_requests_alone(server: Server, greedy: Greedy, reference: Reference) -> None:
    names = [*CASES] * 2
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(server, CASES[name]), names))
    for name, answer in zip(names, answers, strict=True):
        check(answer, greedy(name), reference)


def test_sampled_talker_equals_transformers_draw_for_draw(server: Server, reference: Reference) -> None:
    for name in ("text", "audio"):
        expected = reference.generate(CASES[name], seed=11)
        sampling = {"thinker": {"temperature": 0.0, "max_tokens": MAX_TEXT}, "talker": {"max_tokens": MAX_FRAMES}}
        check(ask(server, CASES[name], sampling=sampling, seed=11), expected, reference)


def test_speech_beyond_300_frames_follows_the_one_pass_decode(server: Server, reference: Reference) -> None:
    """transformers' own chunked_decode drops 555 samples at each border from there on."""
    expected = reference.generate(CASES["text"], seed=4, max_frames=345)
    assert expected.codes.shape[-1] > 310, "this seed speaks too short; choose another"
    sampling = {"thinker": {"temperature": 0.0, "max_tokens": MAX_TEXT}, "talker": {"max_tokens": 345}}
    answer = ask(server, CASES["text"], sampling=sampling, seed=4)
    check(answer, expected, reference)
    assert answer.audio_sizes[0] == 1920 - 555, "the first chunk is one frame"


def test_speech_starts_while_the_text_is_still_being_written(server: Server) -> None:
    """A text so long that a Talker which gets the CPU late still speaks before its end."""
    sampling = {"thinker": {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True}, "talker": GREEDY_TALKER}
    answer = ask(server, CASES["text"], sampling=sampling)
    assert "text" in answer.order[answer.order.index("audio") :], answer.order


def test_text_alone_passes_neither_talker_nor_code2wav(server: Server, greedy: Greedy, reference: Reference) -> None:
    answer = ask(server, CASES["audio"], modalities=["text"])
    assert answer.text == reference.tokenizer.decode(greedy("audio").text, skip_special_tokens=True)
    assert not len(answer.pcm)


def test_no_text_to_speak_is_an_answer_without_audio(server: Server) -> None:
    """transformers raises where the Thinker stops after one token, and where the Talker stops at once."""
    one_token = {"thinker": {"temperature": 0.0, "max_tokens": 1}, "talker": GREEDY_TALKER}
    silent = {"thinker": {"temperature": 0.0, "max_tokens": 4}, "talker": {"temperature": 0.0, "max_tokens": 1}}
    for sampling in (one_token, silent):
        answer = ask(server, CASES["text"], sampling=sampling)
        assert not answer.errors and answer.finish_reason == "length" and not len(answer.pcm)


def test_readers_that_hang_up_at_any_moment_disturb_nobody(server: Server, greedy: Greedy, reference: Reference) -> None:
    """Before the first event, in mid-text, in mid-speech. What they held is looked at by the next test."""
    dice = random.Random(3)

    def hang_up(moment: float, events: int) -> None:
        """After so many events, or at that moment where it waits for none."""
        body = {
            "model": MODEL,
            "messages": messages(CASES["audio"]),
            "modalities": ["text", "audio"],
            "stream": True,
            "sampling": {"thinker": {"max_tokens": 200, "ignore_eos": True}, "talker": {"max_tokens": 400, "ignore_eos": True}},
        }
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=200)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        if events:
            answer = connection.getresponse()
            for _ in range(2 * events):
                assert answer.readline(), "it ended by itself"
        else:
            time.sleep(moment)
        connection.close()

    ended = server.get("/v1/status")["ended"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ways = [(dice.random() * 0.8, dice.choice((0, 1, 5, 30))) for _ in range(40)]
        hung_up = [pool.submit(hang_up, *way) for way in ways]
        check(ask(server, CASES["image"]), greedy("image"), reference)
        for each in hung_up:
            each.result()

    begun = sum(events > 0 for _, events in ways)

    def all_ended() -> bool:
        status = server.get("/v1/status")
        cancelled = status["ended"].get("cancelled", 0) - ended.get("cancelled", 0)
        return not any(status["requests"].values()) and cancelled >= begun  # more: those that were on the bus without an event

    eventually(all_ended, 10, "each is cancelled in every stage")
    check(ask(server, CASES["text"]), greedy("text"), reference)


def test_nothing_is_held_when_all_answers_are_out(server: Server) -> None:
    def free() -> bool:
        replicas = [replica for stage in server.get("/v1/status")["stages"] for replica in stage["replicas"]]
        loads = [replica["load"] for replica in replicas]
        held = ("kv_blocks_used", "slots_used", "segments_used", "held")
        return len(replicas) == 4 and not any(load is None or any(load[name] for name in held) for load in loads)

    eventually(free, 10, "a heartbeat of every stage that says nothing is held")
