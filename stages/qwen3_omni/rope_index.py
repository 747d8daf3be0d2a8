"""Three-axis (time, height, width) positions of a prompt, as transformers' `get_rope_index` counts them.

Text and audio tokens advance all axes by one. A picture's tokens share one point of time and spread over height and width; a
video's time axis advances by `position_id_per_seconds` a second. What follows continues at the highest position + 1.
Audio inside a video (interleaved placeholders) is not supported: a video's own sound track is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from omni_bus.stages.qwen3_omni.config import MediaIds
from omni_bus.stages.qwen3_omni.payloads import Grid, Media


def grid_tokens(grid: Grid, merge: int) -> int:
    """Placeholder tokens of a picture or video of that many patches."""
    return grid[0] * grid[1] * grid[2] // merge**2


def audio_tokens(mel_frames: int) -> int:
    """Placeholder tokens of an audio: 13 for each 100 mel frames, and what three convolutions of stride 2 leave of the rest."""
    rest = mel_frames % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + mel_frames // 100 * 13


def rope_index(token_ids: Sequence[int], media: Media, ids: MediaIds) -> torch.Tensor:
    """int64 [3, len(token_ids)]. Every placeholder run must be as long as its entry in `media` says; ValueError otherwise."""
    pieces: list[torch.Tensor] = []
    images, videos = _steps(media, ids)
    start = at = 0
    while at < len(token_ids):
        token = token_ids[at]
        if token == ids.image or token == ids.video:
            grid, step = next(images if token == ids.image else videos, (None, 0))
            if grid is None:
                raise ValueError("the prompt has more placeholders than media")
            count = grid_tokens(grid, ids.spatial_merge_size)
            if any(other != token for other in token_ids[at : at + count]) or at + count > len(token_ids):
                raise ValueError("a placeholder run is shorter than its media")
            piece = _block(grid, step, ids.spatial_merge_size) + start
        else:
            count = 1
            while at + count < len(token_ids) and token_ids[at + count] not in (ids.image, ids.video):
                count += 1
            piece = torch.arange(start, start + count).expand(3, count)
        pieces.append(piece)
        start = int(piece.max()) + 1
        at += count
    if next(images, None) is not None or next(videos, None) is not None:
        raise ValueError("the prompt has fewer placeholders than media")
    return torch.cat(pieces, dim=1) if pieces else torch.zeros(3, 0, dtype=torch.int64)


def _steps(media: Media, ids: MediaIds) -> tuple[Iterator[tuple[Grid, int]], Iterator[tuple[Grid, int]]]:
    """Each picture's and video's grid with the positions that one step of its time axis spans."""
    spans = [seconds * ids.position_id_per_seconds for seconds in media.video_seconds]
    if any(span != int(span) for span in spans):
        raise ValueError("a video's time steps must fall on whole positions")
    images = iter([(grid, ids.position_id_per_seconds) for grid in media.image_grids])
    return images, iter([(grid, int(span)) for grid, span in zip(media.video_grids, spans, strict=True)])


def _block(grid: Grid, step: int, merge: int) -> torch.Tensor:
    time, height, width = grid[0], grid[1] // merge, grid[2] // merge
    axes = torch.meshgrid(torch.arange(time) * step, torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes])
