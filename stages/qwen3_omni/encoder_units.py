"""What the encoders compute by itself: a window of an audio, a picture, one step of a video's time axis. Nothing else enters its result.

An audio is cut into windows of `n_window_infer` mel frames (8 s). Attention stays inside a window, and the convolutions before it
inside chunks of 100 frames, so a window's result is the same alone as among others. One thing else counts for a chunk that is
not full: transformers pads all chunks of a call to the longest one, and two of the three convolutions see the padding.
"""

from __future__ import annotations

from collections.abc import Sequence

CHUNK_FRAMES = 100  # mel frames that the convolutions see at once


def windows(frames: int, window: int) -> list[range]:
    """The windows of an audio of that many mel frames, the last one maybe shorter."""
    return [range(begin, min(begin + window, frames)) for begin in range(0, frames, window)]


def chunk_width(lengths: Sequence[int]) -> int:
    """To how many frames the chunks of a conversation's audios are padded: less than all only where all are short."""
    return min(CHUNK_FRAMES, max(lengths))


def padded_width(frames: int, width: int) -> int:
    """The part of `width` that counts for a window of `frames`."""
    return width if frames % CHUNK_FRAMES else CHUNK_FRAMES
