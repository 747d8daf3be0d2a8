"""A conversation's media to what the encoders read: mel features and patches, each with digests that name its content."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from omni_bus.errors import CheckpointError, UndecodableMedia
from omni_bus.stages.media import decode_image, probe_video, read_frames
from omni_bus.stages.qwen3_omni.encoder_units import chunk_width, padded_width, windows
from omni_bus.stages.qwen3_omni.json_fields import Section
from omni_bus.stages.qwen3_omni.kept_media import KeptMedia, digest
from omni_bus.stages.qwen3_omni.payloads import Grid
from omni_bus.stages.qwen3_omni.vision_input import VisionInput

AUDIO_RATE = 16_000
MIN_AUDIO_SAMPLES = 400  # one window of the mel filter bank
MAX_AMPLITUDE = 1e6  # full scale is 1; the power of much larger samples leaves the range of float32


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """One audio: mel features float32 [128, frames], and a digest of each encoder window."""

    features: torch.Tensor
    digests: tuple[bytes, ...]

    @property
    def frames(self) -> int:
        return self.features.shape[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Audios:
    """All audios of a conversation, and to how many mel frames the encoder pads their chunks."""

    heard: list[Heard]
    chunk_width: int


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One picture or video: patches float32 [patches, 3 * 2 * patch * patch], and a digest of each step of its time axis."""

    patches: torch.Tensor
    grid: Grid
    digests: tuple[bytes, ...]


class MediaInput:
    """`kept_bytes`: of features that are kept for a conversation's next turn. One request's media at a time."""

    def __init__(self, mel: WhisperFeatureExtractor, vision: VisionInput, *, window: int, kept_bytes: int) -> None:
        self.vision = vision
        self.extracted = 0  # audios, pictures and videos that were not found among what is kept
        self._mel = mel
        self._window = window
        self._hop, self._half = int(mel.hop_length), int(mel.n_fft) // 2
        self._kept: KeptMedia[Any] = KeptMedia(kept_bytes)

    def audio(self, samples: list[np.ndarray], *, growing: bool) -> Generator[None, None, Audios]:
        """The audios of one conversation, float32 [samples] at 16 kHz. With `growing` the last one goes on later: it is cut to the
        encoder windows that what is still to come cannot change (but for a louder sound: it moves the floor at which the features
        of the whole audio are cut off), and left out if there is none.

        As transformers does it for all audios in one call, an audio that is not the longest is followed by silence, and the longest
        one by its own reflection; that is in the features of its last frames.
        """
        longest, silence = max(map(len, samples)), 2 * self._half  # silence beyond that reaches no frame of the audio
        plan = [
            (audio, min(longest - len(audio), silence), min(-(-len(audio) // self._hop), longest // self._hop))
            for audio in (samples[:-1] if growing else samples)
        ]
        if growing:
            certain = max(0, (len(samples[-1]) - self._half) // self._hop + 1) // self._window * self._window
            plan += [(samples[-1], silence, certain)] * bool(certain)
        width = chunk_width([longest // self._hop, *[frames for _, _, frames in plan]])
        heard = []
        for audio, padding, frames in plan:
            heard.append(self._heard(audio, padding, frames, width))
            yield
        return Audios(heard, width)

    def _heard(self, audio: np.ndarray, padding: int, frames: int, width: int) -> Heard:
        """`frames` of the audio with `padding` zeros behind it, in chunks padded to `width`."""
        _check_audio(audio)
        key = digest("audio", _bytes(audio), f"{padding} {frames} {width}".encode())
        found: Heard | None = self._kept.find(key)
        if found is None:
            self.extracted += 1
            mel = self._mel(
                [np.pad(audio, (0, padding))],
                sampling_rate=AUDIO_RATE,
                padding="longest",
                truncation=False,
                return_tensors="pt",
            )
            features: torch.Tensor = mel["input_features"][0, :, :frames].clone()
            found = Heard(features, self._digests(features, width))
            self._kept.keep(key, found, features.nbytes)
        return found

    def _digests(self, features: torch.Tensor, width: int) -> tuple[bytes, ...]:
        out = []
        for window in windows(features.shape[1], self._window):
            read = features[:, window.start : window.stop].numpy()
            out.append(digest("window", _bytes(read), padded_width(len(window), width).to_bytes(2, "little")))
        return tuple(out)

    def image(self, data: bytes) -> Seen:
        """Of an encoded picture."""
        key = digest("image", data)
        found: Seen | None = self._kept.find(key)
        if found is None:
            self.extracted += 1
            patches, grid = self.vision.image(decode_image(data))
            found = Seen(patches, grid, (key,))
            self._kept.keep(key, found, patches.nbytes)
        return found

    def plan_video(self, data: bytes) -> Grid:
        """The grid of patches that an encoded video will make; no frame of it is decoded."""
        return self.vision.plan_video(probe_video(data))[1]

    def video(self, data: bytes) -> Generator[None, None, Seen]:
        """Of an encoded video, with a pause behind each frame."""
        key = digest("video", data)
        found: Seen | None = self._kept.find(key)
        if found is None:
            self.extracted += 1
            info = probe_video(data)
            indices, grid = self.vision.plan_video(info)
            frames = []
            for pixels in read_frames(data, info, indices):
                frames.append(self.vision.frame(pixels, grid))
                yield
            patches = self.vision.video(frames, grid)
            found = Seen(patches, grid, tuple(digest("video step", key, step.to_bytes(4, "little")) for step in range(grid[0])))
            self._kept.keep(key, found, patches.nbytes)
        return found


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array)).cast("B")  # type: ignore[arg-type]


def _check_audio(audio: np.ndarray) -> None:
    if len(audio) < MIN_AUDIO_SAMPLES:
        raise UndecodableMedia("an audio is shorter than 25 ms", param="messages")
    # A float WAV may hold anything; NaN fails the comparison too.
    if not np.abs(audio).max() <= MAX_AMPLITUDE:
        raise UndecodableMedia("an audio holds samples that are no numbers, or far beyond full scale", param="messages")


def mel_extractor(section: Section) -> WhisperFeatureExtractor:
    """Of preprocessor_config.json."""
    if section.get(int, "sampling_rate") != AUDIO_RATE:
        raise CheckpointError(f"{section.file}: sampling_rate must be {AUDIO_RATE}")
    return WhisperFeatureExtractor(  # type: ignore[no-untyped-call]
        feature_size=section.get(int, "feature_size"),
        sampling_rate=AUDIO_RATE,
        hop_length=section.get(int, "hop_length"),
        chunk_length=section.get(int, "chunk_length"),
        n_fft=section.get(int, "n_fft"),
        padding_value=section.get(float, "padding_value"),
        dither=section.get_or(0.0, "dither"),
        return_attention_mask=True,
    )
