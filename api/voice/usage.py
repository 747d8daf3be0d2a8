"""What a response used, in tokens, from what the stages counted."""

from __future__ import annotations

from collections.abc import Mapping

from omni_bus.api.voice.events import Usage


def usage_of(counted: Mapping[str, Mapping[str, int]], text_stage: str) -> Usage:
    """counted: stage → figure → value."""
    text = counted.get(text_stage, {})
    audio, image = text.get("audio_tokens", 0), text.get("image_tokens", 0)
    return Usage(
        input_text=max(0, text.get("prompt_tokens", 0) - audio - image),
        input_audio=audio,
        input_image=image,
        cached=text.get("cached_tokens", 0),
        output_text=text.get("completion_tokens", 0),
        # Codec frames; stages in a row count the same ones.
        output_audio=max((figures.get("frames", 0) for stage, figures in counted.items() if stage != text_stage), default=0),
    )
