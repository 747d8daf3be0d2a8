"""The Thinker's audio and vision encoders: transformers' own modules, run on exactly the media of one request.

Requests are never mixed: in the audio encoder the last window's padding depends on the other audios of the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
    Qwen3OmniMoeVisionEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder, Qwen3OmniMoeVisionEncoder

from omni_bus.stages.ar.transfer import to_device
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.config import ThinkerConfig
from omni_bus.stages.qwen3_omni.payloads import Grid


class ThinkerEncoders:
    def __init__(self, config: ThinkerConfig, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        # Built in float32, so that the buffers (sinusoids, rotary frequencies) stay so; the parameters are replaced by the loaded ones.
        with torch.device(device):
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
    def audio(self, features: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Log-mel [128, frames of all audios in a row] → [tokens, hidden], one audio behind the other."""
        out: torch.Tensor = self.audio_tower(
            to_device(features, self.device, self.dtype), feature_lens=torch.tensor(lengths, device=self.device)
        ).last_hidden_state
        return out

    @torch.inference_mode()
    def vision(self, patches: torch.Tensor, grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches of all pictures or videos in a row → embeddings [tokens, hidden] and deepstack [taps, tokens, hidden]."""
        out = self.visual(to_device(patches, self.device, self.dtype), grid_thw=torch.tensor(grids, device=self.device))
        return out.pooler_output, torch.stack(list(out.deepstack_features))
