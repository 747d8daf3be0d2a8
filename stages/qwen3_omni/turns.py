"""Which parts of a prompt the Talker reads: the user turns. Told by token ids, so that it holds for any chat template."""

from __future__ import annotations

from collections.abc import Sequence

from omni_bus.stages.qwen3_omni.config import SpecialIds


def user_turns(token_ids: Sequence[int], ids: SpecialIds) -> list[int]:
    """Positions of the tokens whose nearest `<|im_start|>` is followed by `user`. System and earlier assistant turns are left out."""
    positions: list[int] = []
    inside = False
    for position, token in enumerate(token_ids):
        if token == ids.im_start:
            inside = position + 1 < len(token_ids) and token_ids[position + 1] == ids.user
        if inside:
            positions.append(position)
    return positions
