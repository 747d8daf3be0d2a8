"""A prompt's media as the Thinker reads them: which parts there are, which features each is encoded from, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from omni_bus.errors import InvalidRequest
from omni_bus.stages.qwen3_omni.config import ThinkerConfig
from omni_bus.stages.qwen3_omni.encoder_units import windows
from omni_bus.stages.qwen3_omni.kept_media import KeptMedia
from omni_bus.stages.qwen3_omni.media_rows import Encoded, MediaRows, Part
from omni_bus.stages.qwen3_omni.payloads import Digests, Grid, ModelInputs
from omni_bus.stages.qwen3_omni.rope_index import audio_tokens, grid_tokens
from omni_bus.stages.qwen3_omni.thinker_encoders import ThinkerEncoders


class ThinkerMedia:
    def __init__(self, config: ThinkerConfig, encoders: ThinkerEncoders, *, kept_bytes: int) -> None:
        self.kept: KeptMedia[Encoded] = KeptMedia(kept_bytes)
        self._encoders = encoders
        self._ids = config.media
        self._window: int = config.audio["n_window_infer"]

    def rows(self, prompt: ModelInputs, tensors: Mapping[str, torch.Tensor]) -> list[MediaRows]:
        """Every audio, picture and video in the order of its placeholders. Nothing is encoded yet. InvalidRequest where placeholders,
        sizes and digests do not fit each other."""
        ids, sizes, content = self._ids, prompt.media, prompt.content
        sources = {
            ids.audio: self._audios(prompt, tensors),
            ids.image: self._visuals(sizes.image_grids, content.images, tensors.get("pixel_values")),
            ids.video: self._visuals(sizes.video_grids, content.videos, tensors.get("pixel_values_videos")),
        }
        out: list[MediaRows] = []
        at = 0
        try:
            while at < len(prompt.token_ids):
                token = prompt.token_ids[at]
                if token in sources:
                    out.append(next(sources[token]))
                    at += out[-1].count
                else:
                    at += 1
        except (StopIteration, ValueError):
            raise InvalidRequest("the prompt's placeholders do not fit its media") from None
        return out

    def _audios(self, prompt: ModelInputs, tensors: Mapping[str, torch.Tensor]) -> Iterator[MediaRows]:
        begin = 0
        for frames, digests in zip(prompt.media.audio_lengths, prompt.content.audios, strict=True):
            features = tensors["input_features"][:, begin : begin + frames]
            begin += frames
            parts = windows(frames, self._window)
            yield MediaRows(
                [Part(digest, audio_tokens(len(part))) for part, digest in zip(parts, digests, strict=True)],
                self._encode_audio([features[:, part.start : part.stop] for part in parts], prompt.chunk_width),
                self.kept,
            )

    def _encode_audio(self, parts: Sequence[torch.Tensor], width: int) -> Callable[[Sequence[int]], list[Encoded]]:
        return lambda numbers: self._encoders.audio([parts[number] for number in numbers], width)

    def _visuals(self, grids: Sequence[Grid], contents: Digests, patches: torch.Tensor | None) -> Iterator[MediaRows]:
        begin = 0
        for (steps, height, width), digests in zip(grids, contents, strict=True):
            assert patches is not None
            count = height * width
            parts = torch.split(patches[begin : begin + steps * count], count)
            begin += steps * count
            step: Grid = (1, height, width)
            rows = grid_tokens(step, self._ids.spatial_merge_size)
            yield MediaRows(
                [Part(digest, rows) for _, digest in zip(parts, digests, strict=True)],
                self._encode_visual(parts, step),
                self.kept,
            )

    def _encode_visual(self, parts: Sequence[torch.Tensor], grid: Grid) -> Callable[[Sequence[int]], list[Encoded]]:
        return lambda numbers: self._encoders.vision([parts[number] for number in numbers], [grid] * len(numbers))
