"""A transcript as clients want it: text, OpenAI's two kinds of JSON, or subtitles (SubRip, WebVTT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omni_bus.payloads import TranscriptSegment, TranscriptWord

UNKNOWN_LANGUAGE = "und"  # ISO 639-3: undetermined


def as_json(text: str, usage: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"text": text, "usage": usage})


def as_verbose_json(
    text: str,
    segments: Sequence[TranscriptSegment] | None,
    words: Sequence[TranscriptWord] | None,
    language: str,
    duration_s: float,
    usage: Mapping[str, Any],
) -> bytes:
    """`segments` and `words` None: the model gives no times, or they were not asked for."""
    body: dict[str, Any] = {
        "task": "transcribe",
        "language": language or UNKNOWN_LANGUAGE,
        "duration": round(duration_s, 3),
        "text": text,
        "usage": usage,
    }
    if segments is not None:
        body["segments"] = [_segment(number, segment) for number, segment in enumerate(segments)]
    if words is not None:
        body["words"] = [{"word": word.text, "start": word.start_s, "end": word.end_s} for word in words]
    return msgspec.json.encode(body)


def _segment(number: int, segment: TranscriptSegment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": int(segment.start_s * 100),  # hundredths of a second, as Whisper counts
        "start": segment.start_s,
        "end": segment.end_s,
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def as_srt(segments: Sequence[TranscriptSegment]) -> str:
    cues = (
        f"{number}\n{_time(cue.start_s, ',')} --> {_time(cue.end_s, ',')}\n{_line(cue.text)}\n"
        for number, cue in enumerate(segments, 1)
    )
    return "\n".join(cues)


def as_vtt(segments: Sequence[TranscriptSegment]) -> str:
    cues = (f"{_time(cue.start_s, '.')} --> {_time(cue.end_s, '.')}\n{_escaped(_line(cue.text))}\n" for cue in segments)
    return "\n".join(("WEBVTT\n", *cues))


def _time(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{milliseconds:03}"


def _line(text: str) -> str:
    """On one line, and without what would be read as a time."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
