"""Pixels to the patches that the vision encoder takes, as transformers' image and video processors of this model make them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from omni_bus.errors import ModelRefused
from omni_bus.stages.media import VideoInfo
from omni_bus.stages.qwen3_omni.json_fields import Section
from omni_bus.stages.qwen3_omni.payloads import Grid

MAX_ASPECT = 200  # longer side to shorter one, as in transformers' smart_resize
VIDEO_FPS = 2.0  # frames taken a second; with 2 frames to a patch, a step of the time axis is one second
# Where a checkpoint has no video_preprocessor_config.json: the values of transformers' processor for this model.
FRAME_PIXELS = (128 * 32 * 32, 768 * 32 * 32)
FRAMES = (4, 768)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisionInputConfig:
    """Keys of preprocessor_config.json, and of video_preprocessor_config.json where there is one."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_pixels: tuple[int, int]  # least and most pixels after resizing
    frame_pixels: tuple[int, int]
    frames: tuple[int, int]

    @classmethod
    def parse(cls, image: dict[str, Any], video: dict[str, Any]) -> VisionInputConfig:
        section, frames = Section(image, "", "preprocessor_config.json"), Section(video, "", "video_preprocessor_config.json")
        return cls(
            patch_size=section.get(int, "patch_size"),
            merge_size=section.get(int, "merge_size"),
            temporal_patch_size=section.get(int, "temporal_patch_size"),
            mean=section.numbers("image_mean"),
            std=section.numbers("image_std"),
            image_pixels=_pixels(section, None),
            frame_pixels=_pixels(frames, FRAME_PIXELS),
            frames=(frames.get_or(FRAMES[0], "min_frames"), frames.get_or(FRAMES[1], "max_frames")),
        )

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size


def _pixels(section: Section, default: tuple[int, int] | None) -> tuple[int, int]:
    """`min_pixels` and `max_pixels`, in the newer spelling `size.shortest_edge` and `size.longest_edge`."""
    if "size" in section.fields and "min_pixels" not in section.fields:
        size = section.section("size")
        return size.get(int, "shortest_edge"), size.get(int, "longest_edge")
    if default is not None:
        return section.get_or(default[0], "min_pixels"), section.get_or(default[1], "max_pixels")
    return section.get(int, "min_pixels"), section.get(int, "max_pixels")


class VisionInput:
    def __init__(self, config: VisionInputConfig) -> None:
        self.config = config
        self._images = Qwen2VLImageProcessorPil(
            patch_size=config.patch_size,
            merge_size=config.merge_size,
            temporal_patch_size=config.temporal_patch_size,
            image_mean=list(config.mean),
            image_std=list(config.std),
            size={"shortest_edge": config.image_pixels[0], "longest_edge": config.image_pixels[1]},
        )
        # (x / 255 - mean) / std in one multiplication and one subtraction
        self._scale = torch.tensor([1 / (255 * std) for std in config.std])[:, None, None]
        self._shift = torch.tensor([mean / std for mean, std in zip(config.mean, config.std, strict=True)])[:, None, None]

    def image(self, pixels: np.ndarray) -> tuple[torch.Tensor, Grid]:
        """uint8 [height, width, 3] → float32 [patches, 3 * 2 * patch * patch] and its grid."""
        check_aspect(pixels.shape[0], pixels.shape[1])
        features = self._images.preprocess([pixels], return_tensors="pt", input_data_format="channels_last")
        time, height, width = features["image_grid_thw"][0].tolist()
        patches: torch.Tensor = features["pixel_values"]
        return patches, (time, height, width)

    def plan_video(self, info: VideoInfo) -> tuple[list[int], Grid]:
        """Which frames to take, and the grid of patches they will make; nothing is decoded yet."""
        config = self.config
        check_aspect(info.height, info.width)
        height, width = smart_resize(
            info.height, info.width, config.factor, min_pixels=config.frame_pixels[0], max_pixels=config.frame_pixels[1]
        )
        indices = self.sample_frames(info)
        steps = -(-len(indices) // config.temporal_patch_size)
        return indices, (steps, height // config.patch_size, width // config.patch_size)

    def frame(self, pixels: np.ndarray, grid: Grid) -> torch.Tensor:
        """uint8 [h, w, 3] → float32 [3, height, width] of the planned size, normalised."""
        patch = self.config.patch_size
        return self._resize(torch.from_numpy(pixels), grid[1] * patch, grid[2] * patch)

    def video(self, frames: Sequence[torch.Tensor], grid: Grid) -> torch.Tensor:
        """Frames of `frame` → float32 [patches, 3 * 2 * patch * patch]. An odd last frame is repeated."""
        patch, merge, step = self.config.patch_size, self.config.merge_size, self.config.temporal_patch_size
        stacked = torch.stack([*frames, *[frames[-1]] * (-len(frames) % step)])
        blocks = stacked.view(grid[0], step, 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch)
        # time, then merge blocks row by row, then patches inside a block; each patch as channel, time, y, x
        blocks = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return blocks.reshape(math.prod(grid), -1)

    def sample_frames(self, info: VideoInfo) -> list[int]:
        """Indices of the frames to take: VIDEO_FPS a second, evenly spread, an even number, within the least and the most."""
        least, most = self.config.frames
        step = self.config.temporal_patch_size
        most = min(most, info.frames) // step * step
        count = int(min(max(info.frames / info.fps * VIDEO_FPS, least), most, info.frames)) // step * step
        if count == 0:  # a single picture
            return list(range(info.frames))
        return [int(index) for index in torch.arange(0, info.frames, info.frames / count).int().tolist()][:count]

    def _resize(self, frame: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """uint8 [h, w, 3] → float32 [3, height, width], normalised. Bicubic with antialiasing, rounded to whole grey levels between."""
        pixels = frame.permute(2, 0, 1)[None].float()
        resized = F.interpolate(pixels, size=(height, width), mode="bicubic", antialias=True, align_corners=False)[0]
        return resized.round_().clamp_(0, 255) * self._scale - self._shift


def check_aspect(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ModelRefused(
            f"a picture of {width}x{height} is too narrow; at most {MAX_ASPECT} to 1 is accepted", param="messages"
        )
