"""What a request has used by the moment it is broken off: from the figures that its items brought."""

from __future__ import annotations

from collections.abc import Mapping

from omni_bus.api.bus import Item
from omni_bus.payloads import AudioDelta, TextDelta


class UsageSoFar:
    """`take` each item of one request; `of` when it has ended, well or not."""

    def __init__(self, text_stage: str) -> None:
        self._text_stage = text_stage
        self._figures: dict[str, dict[str, int]] = {}
        self._tokens = 0  # of text, which the text stage counts only when its text is complete

    def take(self, item: Item) -> None:
        match item.payload:
            case TextDelta(_, token_ids, _, usage):
                self._tokens += len(token_ids)
                self._figures.setdefault(self._text_stage, {}).update(usage)
            case AudioDelta(frames=frames) if frames:
                figures = self._figures.setdefault(item.edge.partition("->")[0], {})
                figures["frames"] = figures.get("frames", 0) + frames

    def of(self, counted: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, int]]:
        """Stage → figure → value: what the stages counted, or, where they told no end, as much of it as came."""
        if counted:
            return counted
        text = self._figures.get(self._text_stage)
        if text is None:
            return self._figures
        return {**self._figures, self._text_stage: {"completion_tokens": self._tokens, **text}}
