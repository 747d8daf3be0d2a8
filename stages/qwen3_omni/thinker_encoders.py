"""The Thinker's audio and vision encoders: transformers' own modules, run on the parts of media that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
    Qwen3OmniMoeVisionEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder, Qwen3OmniMoeVisionEncoder

from omni_bus.stages.ar.capture import device_alone
from omni_bus.stages.ar.transfer import ids_to_device, to_device
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.config import ThinkerConfig
from omni_bus.stages.qwen3_omni.encoder_units import CHUNK_FRAMES
from omni_bus.stages.qwen3_omni.media_rows import Encoded
from omni_bus.stages.qwen3_omni.payloads import Grid
from omni_bus.stages.qwen3_omni.rope_index import audio_tokens, grid_tokens


class ThinkerEncoders:
    def __init__(self, config: ThinkerConfig, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._merge = config.media.spatial_merge_size
        # Built in float32, so that the buffers (sinusoids, rotary frequencies) stay so; the parameters are replaced by the loaded ones.
        with device_alone, torch.device(device):
            self.audio_tower: Any = Qwen3OmniMoeAudioEncoder._from_config(  # type: ignore[no-untyped-call]
                Qwen3OmniMoeAudioEncoderConfig(**config.audio)
            )
            self.visual: Any = Qwen3OmniMoeVisionEncoder._from_config(  # type: ignore[no-untyped-call]
                Qwen3OmniMoeVisionEncoderConfig(**config.vision)
            )
        checkpoint.load_into(self.audio_tower, "thinker.audio_tower.", dtype=dtype, device=device)
        checkpoint.load_into(self.visual, "thinker.visual.", dtype=dtype, device=device)
        self.audio_tower.eval()
        self.visual.eval()

    @torch.inference_mode()
    def audio(self, windows: Sequence[torch.Tensor], width: int) -> list[Encoded]:
        """Windows of log-mel features [128, frames] → rows [tokens, hidden] of each; chunks are padded to `width` frames.

        What the encoder would work out for the audio as a whole is given to it for the windows as they are here.
        """
        chunks = [chunk for window in windows for chunk in torch.split(window, CHUNK_FRAMES, dim=1)]
        padded = torch.stack([F.pad(chunk, (0, width - chunk.shape[1])) for chunk in chunks])
        lengths = [chunk.shape[1] for chunk in chunks]
        stride = audio_tokens(width)
        valid = [index * stride + token for index, length in enumerate(lengths) for token in range(audio_tokens(length))]
        tokens = [audio_tokens(window.shape[1]) for window in windows]
        out: torch.Tensor = self.audio_tower(
            feature_lens=None,
            padded_feature=to_device(padded, self.device, self.dtype),
            chunk_lengths=torch.tensor(lengths),
            valid_indices=ids_to_device(valid, self.device),
            # On the CPU: each layer reads it back, which would wait for the card.
            cu_seqlens=F.pad(torch.tensor(tokens, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)),
        ).last_hidden_state
        return [Encoded(rows.clone()) for rows in torch.split(out, tokens)]  # a view would hold the others' memory

    @torch.inference_mode()
    def vision(self, patches: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[Encoded]:
        """Patches of pictures or of steps of videos → rows [tokens, hidden] and deepstack [taps, tokens, hidden] of each."""
        out = self.visual(
            to_device(torch.cat(list(patches)), self.device, self.dtype), grid_thw=torch.tensor(grids, device=self.device)
        )
        tokens = [grid_tokens(grid, self._merge) for grid in grids]
        deepstack = torch.stack(list(out.deepstack_features))
        return [
            Encoded(rows.clone(), taps.clone())
            for rows, taps in zip(torch.split(out.pooler_output, tokens), torch.split(deepstack, tokens, dim=1), strict=True)
        ]
