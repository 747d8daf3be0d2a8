"""Encoded images and videos to pixels. Whatever a decoder does not read is UndecodableMedia (415); limits keep a small file from
growing into gigabytes of pixels."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections import deque
from collections.abc import Iterator, Sequence

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
            raise TooLarge(
                f"an image has {image.width}x{image.height} pixels; at most {MAX_IMAGE_PIXELS:,} are accepted", param="messages"
            )
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except Image.DecompressionBombError as error:
        raise TooLarge(f"an image has more than {MAX_IMAGE_PIXELS:,} pixels; send a smaller one", param="messages") from error
    # Pillow's plugins raise all of these on damaged files.
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError) as error:
        raise UndecodableMedia("an image could not be decoded; send PNG, JPEG, WebP, GIF or BMP", param="messages") from error


@dataclasses.dataclass(frozen=True, slots=True)
class VideoInfo:
    """A video track: how many frames, how many a second, and their size in pixels."""

    frames: int
    fps: float
    height: int
    width: int


def probe_video(data: bytes) -> VideoInfo:
    """Counts packets without decoding any, since a container may not say how long it is."""
    with _video_errors(), av.open(io.BytesIO(data), mode="r") as container:
        if not container.streams.video:
            raise UndecodableMedia("a video file has no video track", param="messages")
        stream = container.streams.video[0]
        height, width = stream.codec_context.height, stream.codec_context.width
        if height * width > MAX_FRAME_PIXELS:
            raise TooLarge(f"a video's frames are larger than {MAX_FRAME_PIXELS:,} pixels", param="messages")
        rate = stream.average_rate or stream.guessed_rate
        frames = 0
        for packet in container.demux(stream):
            frames += packet.size > 0
            if frames > MAX_VIDEO_FRAMES:
                raise TooLarge(f"a video has more than {MAX_VIDEO_FRAMES:,} frames", param="messages")
    if not (frames and rate and height and width):
        raise UndecodableMedia("a video has no frames", param="messages")
    return VideoInfo(frames, float(rate), height, width)


def read_frames(data: bytes, info: VideoInfo, indices: Sequence[int]) -> Iterator[np.ndarray]:
    """uint8 [height, width, 3] for each of the ascending `indices`; what lies between them is decoded and dropped."""
    wanted = deque(indices)
    pixels: np.ndarray | None = None
    with _video_errors(), av.open(io.BytesIO(data), mode="r") as container:
        for index, frame in enumerate(container.decode(container.streams.video[0])):
            if (frame.height, frame.width) != (info.height, info.width):
                raise UndecodableMedia("a video changes its picture size on the way", param="messages")
            if wanted and wanted[0] == index:
                pixels = frame.to_ndarray(format="rgb24")
                while wanted and wanted[0] == index:
                    wanted.popleft()
                    yield pixels
            if not wanted:
                return
    if pixels is None:
        raise UndecodableMedia("a video has no frame that can be decoded", param="messages")
    # Containers may promise a few more packets than the decoder gives frames: the last picture stands for them.
    for _ in wanted:
        yield pixels


@contextlib.contextmanager
def _video_errors() -> Iterator[None]:
    try:
        yield
    except (av.FFmpegError, ValueError, EOFError) as error:
        raise UndecodableMedia("a video could not be decoded; send MP4, WebM, MKV or MOV", param="messages") from error
