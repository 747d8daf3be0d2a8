"""Positions equal to transformers' get_rope_index on random mixtures of text, audio, pictures and videos."""

from __future__ import annotations

import random

import pytest
import torch

from omni_bus.stages.qwen3_omni.config import MediaIds
from omni_bus.stages.qwen3_omni.payloads import Media
from omni_bus.stages.qwen3_omni.rope_index import audio_tokens, grid_tokens, rope_index
from tests.support.qwen3_omni import Reference

KINDS = ("text", "audio", "image", "video")


def mixture(seed: int, ids: MediaIds, special: dict[str, int]) -> tuple[list[int], Media]:
    draw = random.Random(seed)
    tokens: list[int] = []
    lengths, images, videos = [], [], []
    for _ in range(draw.randint(1, 9)):
        kind = draw.choice(KINDS)
        if kind == "text":
            tokens += [draw.randrange(97, 123) for _ in range(draw.randint(1, 7))]
        elif kind == "audio":
            lengths.append(draw.randint(3, 950))
            tokens += [ids.audio_start, *[ids.audio] * audio_tokens(lengths[-1]), special["audio_end"]]
        else:
            grid = (draw.randint(1, 4) if kind == "video" else 1, 2 * draw.randint(1, 5), 2 * draw.randint(1, 5))
            (videos if kind == "video" else images).append(grid)
            pad = ids.video if kind == "video" else ids.image
            tokens += [ids.vision_start, *[pad] * grid_tokens(grid, 2), special["vision_end"]]
        if draw.random() < 0.5:
            tokens.append(10)
    media = Media(tuple(lengths), tuple(images), tuple(videos), tuple(float(draw.choice((1, 2))) for _ in videos))
    return tokens, media


def test_random_mixtures_count_as_transformers_does(reference: Reference) -> None:
    thinker = reference.model.thinker
    config = thinker.config
    ids = MediaIds(
        audio=config.audio_token_id,
        image=config.image_token_id,
        video=config.video_token_id,
        audio_start=config.audio_start_token_id,
        vision_start=config.vision_start_token_id,
        spatial_merge_size=2,
        position_id_per_seconds=config.position_id_per_seconds,
    )
    token = reference.tokenizer.convert_tokens_to_ids
    special = {"audio_end": token("<|audio_end|>"), "vision_end": token("<|vision_end|>")}
    for seed in range(120):
        tokens, media = mixture(seed, ids, special)
        row = torch.tensor([tokens])
        expected, _ = thinker.get_rope_index(
            row,
            torch.tensor(media.image_grids) if media.image_grids else None,
            torch.tensor(media.video_grids) if media.video_grids else None,
            torch.ones_like(row),
            False,
            torch.tensor(media.audio_lengths),
            torch.tensor(media.video_seconds),
        )
        assert torch.equal(rope_index(tokens, media, ids).float(), expected[:, 0]), f"seed {seed}"


IDS = MediaIds(audio=1, image=2, video=3, audio_start=4, vision_start=5, spatial_merge_size=2, position_id_per_seconds=13)


@pytest.mark.parametrize(
    ("tokens", "media"),
    [
        ([5, 2, 2, 6], Media(image_grids=((1, 4, 4),))),
        ([5, 2, 2, 2, 2, 6], Media()),
        ([7, 8], Media(image_grids=((1, 4, 4),))),
        ([5, 3, 6], Media(video_grids=((1, 2, 2),), video_seconds=(0.7,))),
        ([5, 3, 6], Media(video_grids=((1, 2, 2),))),
    ],
)
def test_media_that_do_not_fit_their_placeholders_are_refused(tokens: list[int], media: Media) -> None:
    with pytest.raises(ValueError):
        rope_index(tokens, media, IDS)


def test_audio_tokens_as_in_transformers() -> None:
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    for frames in range(1, 1700):
        assert audio_tokens(frames) == _get_feat_extract_output_lengths(frames)
