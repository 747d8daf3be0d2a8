"""Encoded images and videos to pixels. Whatever a decoder does not read is UndecodableMedia (415); limits keep a small file from
growing into gigabytes of pixels."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Callable

import av
import numpy as np
from PIL import Image, ImageOps

from omni_bus.errors import TooLarge, UndecodableMedia

MAX_IMAGE_PIXELS = 64_000_000
MAX_FRAME_PIXELS = 8_847_360  # 4096 x 2160
MAX_VIDEO_FRAMES = 216_000  # an hour at 60 frames/s: bounds the time spent on counting


def decode_image(data: bytes) -> np.ndarray:
    """uint8 [height, width, 3], RGB, turned upright as its EXIF orientation says; of an animation, the first frame."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise TooLarge(f"an image has {image.width}x{image.height} pixels; at most {MAX_IMAGE_PIXELS:,} are accepted")
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    # Pillow's plugins raise all of these on damaged files.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, Image.DecompressionBombError) as error:
        raise UndecodableMedia("an image could not be decoded; send PNG, JPEG, WebP, GIF or BMP") from error


@dataclasses.dataclass(frozen=True, slots=True)
class VideoInfo:
    frames: int
    fps: float


def decode_video(data: bytes, sample: Callable[[VideoInfo], list[int]]) -> np.ndarray:
    """uint8 [n, height, width, 3]: the frames whose indices `sample` picks, ascending, given the video's length and rate.

    Packets are counted first, so that only the picked frames are ever held as pixels.
    """
    try:
        wanted = sample(_probe(data))
        return _read(data, wanted)
    except (av.FFmpegError, ValueError, EOFError) as error:
        raise UndecodableMedia("a video could not be decoded; send MP4, WebM, MKV or MOV") from error


def _probe(data: bytes) -> VideoInfo:
    with av.open(io.BytesIO(data), mode="r") as container:
        if not container.streams.video:
            raise UndecodableMedia("a video file has no video track")
        stream = container.streams.video[0]
        if stream.codec_context.width * stream.codec_context.height > MAX_FRAME_PIXELS:
            raise TooLarge(f"a video's frames are larger than {MAX_FRAME_PIXELS:,} pixels")
        rate = stream.average_rate or stream.guessed_rate
        frames = 0
        for packet in container.demux(stream):
            frames += packet.size > 0
            if frames > MAX_VIDEO_FRAMES:
                raise TooLarge(f"a video has more than {MAX_VIDEO_FRAMES:,} frames")
    if frames == 0 or not rate:
        raise UndecodableMedia("a video has no frames")
    return VideoInfo(frames, float(rate))


def _read(data: bytes, wanted: list[int]) -> np.ndarray:
    picked: list[np.ndarray] = []
    with av.open(io.BytesIO(data), mode="r") as container:
        for index, frame in enumerate(container.decode(container.streams.video[0])):
            if frame.width * frame.height > MAX_FRAME_PIXELS:
                raise TooLarge(f"a video's frames are larger than {MAX_FRAME_PIXELS:,} pixels")
            pixels = None
            while len(picked) < len(wanted) and wanted[len(picked)] == index:
                pixels = frame.to_ndarray(format="rgb24") if pixels is None else pixels
                picked.append(pixels)
            if len(picked) == len(wanted):
                break
    if not picked:
        raise UndecodableMedia("a video has no frame that can be decoded")
    # Containers may promise a few more packets than the decoder gives frames: the last picture stands for them.
    picked += [picked[-1]] * (len(wanted) - len(picked))
    if any(frame.shape != picked[0].shape for frame in picked):
        raise UndecodableMedia("a video changes its picture size on the way")
    return np.stack(picked)
