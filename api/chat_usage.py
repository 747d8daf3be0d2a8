"""Usage as OpenAI counts it, from what the stages counted; beside it, under our own name, when each edge had its first chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_bus.api.bus import RequestStream
from omni_bus.api.usage_so_far import UsageSoFar


def answer_usage(stream: RequestStream, text_stage: str) -> dict[str, Any]:
    """What an answer says in `usage`. `first_chunk_ms`: edge → milliseconds since the broker had the request."""
    return _with_times(stream.usage, text_stage, stream.first_chunks)


def broken_off_usage(so_far: UsageSoFar, text_stage: str) -> dict[str, Any]:
    """The same of an answer that failed: what had been counted by then."""
    return _with_times(so_far.of({}), text_stage, {})


def _with_times(usage: Mapping[str, Mapping[str, int]], text_stage: str, first_chunks: Mapping[str, float]) -> dict[str, Any]:
    first = {edge: round(1e3 * seconds, 2) for edge, seconds in first_chunks.items()}
    return {**openai_usage(usage, text_stage), "omni_bus": {"first_chunk_ms": first}}


def openai_usage(usage: Mapping[str, Mapping[str, int]], text_stage: str) -> dict[str, Any]:
    """Text tokens are the text stage's. Audio tokens are codec frames; stages in a row count the same ones, so the most any counted."""
    text = usage.get(text_stage, {})
    prompt, completion = text.get("prompt_tokens", 0), text.get("completion_tokens", 0)
    cached = text.get("cached_tokens", 0)
    frames = max((figures.get("frames", 0) for stage, figures in usage.items() if stage != text_stage), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"audio_tokens": frames},
    }
