"""Code2Wav, streamed: codec frames in, samples out, with the state of many streams in slots.

The first n frames of a stream give n * 1920 - 555 samples, every later n give n * 1920: the decoder looks 555 samples (23 ms) ahead.
In whatever pieces a stream is decoded, alone or with others, its samples are those of decoding it whole, up to rounding.
"""

from __future__ import annotations

import torch
from torch import nn

from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.code2wav_config import Code2WavConfig
from omni_bus.stages.qwen3_omni.code2wav_layers import (
    CausalConv,
    DecoderBlock,
    Rows,
    Snake,
    StreamingLayer,
    UpsampleStage,
)
from omni_bus.stages.qwen3_omni.code2wav_transformer import Transformer

PREFIX = "code2wav."


class Code2Wav(nn.Module):
    def __init__(self, config: Code2WavConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.decoder_dim
        self.code_embedding = nn.Embedding(config.codebook_size * config.num_quantizers, hidden)
        self.pre_transformer = Transformer(config)
        self.upsample = nn.ModuleList([UpsampleStage(hidden, ratio) for ratio in config.upsampling_ratios])
        blocks = [DecoderBlock(width >> index, rate) for index, rate in enumerate(config.upsample_rates)]
        width >>= len(blocks)
        self.decoder = nn.ModuleList(
            [CausalConv(hidden, config.decoder_dim, 7), *blocks, Snake(width), CausalConv(width, 1, 7)]
        )

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, config: Code2WavConfig, *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> Code2Wav:
        """With the checkpoint's weights and state for `slots` streams."""
        with torch.device("meta"):
            model = cls(config)
        checkpoint.load_into(model, PREFIX, dtype=dtype, device=device)
        for layer in model._streaming():
            layer.allocate(slots, dtype, device)
        return model.eval()

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The next n frames of some streams. codes: integers [rows, n, groups] → samples [rows, n * 1920 (- 555 if fresh)] in -1..1"""
        offsets = torch.arange(self.config.num_quantizers, device=codes.device) * self.config.codebook_size
        x = self.code_embedding(codes.to(torch.int64) + offsets).mean(2)
        x = self.pre_transformer(x, rows).transpose(1, 2)
        *layers, snake, last = self.decoder
        for layer in [*self.upsample, *layers]:
            x = layer(x, rows)
        out: torch.Tensor = last(snake(x), rows)[:, 0].clamp(-1, 1)
        return out

    def state_of(self, slot: int) -> list[torch.Tensor]:
        """A copy of one slot's state, to be put back with `restore`."""
        return [state[slot].clone() for layer in self._streaming() for state in layer.state()]

    @torch.inference_mode()
    def restore(self, slot: int, saved: list[torch.Tensor]) -> None:
        states = [state for layer in self._streaming() for state in layer.state()]
        for state, tensor in zip(states, saved, strict=True):
            state[slot] = tensor

    def _streaming(self) -> list[StreamingLayer]:
        return [module for module in self.modules() if isinstance(module, StreamingLayer)]


def to_pcm16(samples: torch.Tensor) -> torch.Tensor:
    """int16 = round(x * 32767), halves to even, held to -32768 … 32767; computed in at least float32."""
    wide = samples if samples.dtype == torch.float64 else samples.float()
    return (wide * 32767).round().clamp(-32768, 32767).to(torch.int16)
