"""What a listener gets out of streamed events, in both wire shapes, and the silence they hear."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import pytest

from omni_bus.bench_load import Measured
from omni_bus.bench_report import percentile, report, summarise
from omni_bus.speech_stream import SpeechStream, underrun_s

PCM = bytes(range(200))


def event(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta}]}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def wav(rate: int) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes(PCM)
    return out.getvalue()


@pytest.mark.parametrize(
    ("given", "text", "pcm"),
    [
        (event(role="assistant"), "", b""),
        (event(content="hello"), "hello", b""),
        ({**event(content="hello"), "modality": "text"}, "hello", b""),
        (event(audio={"id": "a", "data": encoded(PCM)}), "", PCM),
        ({**event(content=encoded(PCM)), "modality": "audio"}, "", PCM),
        ({**event(audio={"data": encoded(PCM)}), "modality": "audio"}, "", PCM),
        (event(audio={"transcript": "hello"}), "", b""),
        ({"choices": [], "usage": {"completion_tokens": 3}}, "", b""),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, "", b""),
    ],
)
def test_text_and_audio_of_an_event(given: dict[str, Any], text: str, pcm: bytes) -> None:
    assert SpeechStream().read(given) == (text, pcm)


def test_a_wav_header_says_the_rate_and_is_no_audio() -> None:
    stream = SpeechStream()
    assert stream.read(event(audio={"data": encoded(wav(16_000))})) == ("", PCM)
    assert stream.sample_rate == 16_000
    assert stream.read(event(audio={"data": encoded(PCM)})) == ("", PCM)


def test_usage_is_kept() -> None:
    stream = SpeechStream()
    stream.read({"choices": [], "usage": {"completion_tokens": 3}})
    stream.read({"choices": [], "usage": None})
    assert stream.usage == {"completion_tokens": 3}


@pytest.mark.parametrize(
    ("packets", "silence"),
    [
        ([], 0.0),
        ([(5.0, 1.0)], 0.0),
        ([(5.0, 1.0), (5.5, 1.0), (6.9, 1.0)], 0.0),
        ([(5.0, 1.0), (6.25, 1.0)], 0.25),
        ([(0.0, 1.0), (1.5, 1.0), (2.0, 1.0), (4.0, 1.0)], 1.0),
    ],
)
def test_underrun(packets: list[tuple[float, float]], silence: float) -> None:
    assert underrun_s(packets) == pytest.approx(silence)


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([7.0], 50) == 7.0


def test_a_summary_counts_the_failed_ones_apart() -> None:
    good = Measured(first_text_s=0.1, last_text_s=0.5, text_tokens=5, packets=[(0.2, 1.0), (1.7, 1.0)], end_s=2.0)
    summary = summarise(2, [good, Measured(error="broken", end_s=9.0)], 4.0)
    figures = {name: figure["p50"] for name, figure in summary["figures"].items()}
    assert figures == pytest.approx(
        {"ttft": 100, "ttfp": 200, "tpot": 100, "e2el": 2000, "rtf": 1.0, "underrun": 500, "audio": 2.0}
    )
    assert (summary["requests_per_s"], summary["audio_s_per_s"], summary["errors"]) == (0.25, 0.5, ["broken"])
    assert "1 of 2 requests" in next(report(summary))
