"""SteadyLoad on the tiny Qwen3-Omni: greedy streams of text and speech, each held to the first whole answer that its place had."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support.steady_load import SteadyLoad, Stream

STAGES = ("processor", "thinker", "talker", "code2wav")
TOKENS, FRAMES = 24, 30
FIRST = 16  # harbour: see tests/e2e/test_failures_qwen3.py
SETS = ("model.name=tiny", "stages.code2wav.dtype=float64")  # one question has one answer, whoever shares a batch


@dataclasses.dataclass(slots=True)
class Answer:
    text: str = ""
    pcm: bytes = b""  # 16 bits, mono


class SteadyVoice(SteadyLoad):
    """`expected`: place → its answer; what it lacks is added by the first whole answer of a place."""

    def __init__(self, url: str, expected: dict[int, Answer], *, text_only: int = 4) -> None:
        super().__init__(url, words=TOKENS, text_only=text_only)
        self._expected = expected
        self._said: dict[int, Answer] = {}  # place → what its stream has said so far

    def body(self, stream: Stream) -> dict[str, Any]:
        self._said[stream.place] = Answer()
        speech = "audio" in stream.modalities
        return {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"Tell me of harbour number {FIRST + stream.place}."}],
            "modalities": list(stream.modalities),
            "stream": True,
            "temperature": 0.0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            **({"audio": {"voice": "ethan", "format": "pcm16"}} if speech else {}),
            **({"sampling": {"talker": {"temperature": 0.0, "max_tokens": FRAMES, "ignore_eos": True}}} if speech else {}),
        }

    def hear(self, stream: Stream, text: str, pcm: bytes) -> None:
        said = self._said[stream.place]
        said.text += text
        said.pcm += pcm
        stream.text, stream.heard = said.text, len(said.pcm) // 2
        if (known := self._expected.get(stream.place)) is not None:
            assert known.text.startswith(said.text), f"place {stream.place}: {said.text!r} is not how {known.text!r} begins"
            assert known.pcm.startswith(said.pcm), f"place {stream.place}: another sound, or one that is missing"

    def check_whole(self, stream: Stream) -> None:
        said = self._said[stream.place]
        assert bool(said.pcm) == ("audio" in stream.modalities)
        assert said == self._expected.setdefault(stream.place, said), f"place {stream.place}: an answer that is not whole"
