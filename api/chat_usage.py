"""Usage as OpenAI counts it, from what the stages counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def openai_usage(usage: Mapping[str, Mapping[str, int]], text_stage: str) -> dict[str, Any]:
    """Text tokens are the text stage's. Audio tokens are codec frames; stages in a row count the same ones, so the most any counted."""
    text = usage.get(text_stage, {})
    prompt, completion = text.get("prompt_tokens", 0), text.get("completion_tokens", 0)
    frames = max((figures.get("frames", 0) for stage, figures in usage.items() if stage != text_stage), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {"audio_tokens": frames},
    }
