"""Code2Wav for a GPU: the streaming model with its operators joined into few kernels, for capture into CUDA graphs.

Same weights, same streaming rule and same samples, up to rounding, as code2wav_model.Code2Wav. What differs is the layout: activations
channels-last, transposed and pointwise convolutions as one matrix product each, kept steps gathered where they are used. No cuDNN
convolution is left, and torch's matrix products use no TF32 unless told to: float32 stays float32.
Slot 0 is scratch: rows that only fill up a batch use it.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from omni_bus.stages.qwen3_omni.code2wav_layers import (
    CausalConv,
    ConvNeXt,
    DecoderBlock,
    LookaheadUpsample,
    ResidualUnit,
    Snake,
    Upsample,
    UpsampleStage,
)
from omni_bus.stages.qwen3_omni.code2wav_model import Code2Wav
from omni_bus.stages.qwen3_omni.code2wav_ops import FusedRows, Join, Ops, SnakeScale
from omni_bus.stages.qwen3_omni.code2wav_transformer import TransformerLayer

# Narrower convolutions run over many steps and go through `Ops.conv`; wider ones over few, where a matrix product that may share
# the taps' long sum between multiprocessors is faster than the copy it needs.
WIDE = 256


class FusedCode2Wav:
    """`slots` streams, not counting the scratch slot; calls of at most `max_frames`. The tensors of `model` are copied."""

    def __init__(self, model: Code2Wav, ops: Ops, *, slots: int, max_frames: int) -> None:
        self.config = model.config
        self._ops = ops
        self._embedding = model.code_embedding.weight.detach()
        kept = _Kept(slots + 1, self._embedding)
        groups, device = self.config.num_quantizers, self._embedding.device
        self._offsets = torch.arange(groups, dtype=torch.int32, device=device) * self.config.codebook_size
        exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.int64, device=device).float() / self.config.head_dim
        self._rates = 1.0 / self.config.rope_theta**exponents
        ring = self.config.sliding_window - 1 + max_frames
        layers = cast("list[TransformerLayer]", list(model.pre_transformer.layers))
        self._layers = [_Layer(layer, kept, ring, self.config.num_kv_heads, self.config.head_dim) for layer in layers]
        self._norm = model.pre_transformer.norm.weight.detach()
        self._upsample = [_Upsample(stage, kept) for stage in cast("list[UpsampleStage]", list(model.upsample))]
        first, *blocks, snake, last = list(model.decoder)
        self._first = _Conv(cast(CausalConv, first), kept)
        self._blocks = [_Block(cast(DecoderBlock, block), kept) for block in blocks]
        self._last_snake = _scale(cast(Snake, snake))
        self._last = _Conv(cast(CausalConv, last), kept)
        self._state = kept.tensors
        self._rings = kept.rings

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor, rows: FusedRows, *, pcm: bool = True) -> torch.Tensor:
        """codes: int32 [rows, n, groups] → int16 [rows, n * 1920 (- 555 if fresh)]; the samples themselves where not `pcm`"""
        ops = self._ops
        x = F.embedding(codes + self._offsets, self._embedding).mean(2)
        x = self._transform(x, rows)
        for stage in self._upsample:
            x = stage(ops, x, rows)
        taps, _ = ops.join(x, self._first.kept, rows, Join(taps=self._first.taps))
        x = _linear(taps, self._first.matrix, self._first.bias)
        residual: torch.Tensor | None = None
        for block in self._blocks:
            x, residual = block(ops, x, residual, rows)
        joined, _ = ops.join(x, self._last.kept, rows, Join(), self._last_snake, residual)
        return ops.last_conv(joined, self._last.weight[..., 0].contiguous(), self._last.bias, pcm)

    def state_of(self, slot: int, turn: int) -> list[torch.Tensor]:
        """A copy of one slot's state; `turn`: the half that its next call would read."""
        return [ring[slot].clone() for ring in self._rings] + [kept[2 * slot + turn].clone() for kept in self._state]

    @torch.inference_mode()
    def restore(self, slot: int, turn: int, saved: list[torch.Tensor]) -> None:
        places = [ring[slot] for ring in self._rings] + [kept[2 * slot + turn] for kept in self._state]
        for place, tensor in zip(places, saved, strict=True):
            place.copy_(tensor)

    def _transform(self, x: torch.Tensor, rows: FusedRows) -> torch.Tensor:
        ops, eps = self._ops, self.config.rms_norm_eps
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        y: torch.Tensor | None = None
        scale: torch.Tensor | None = None
        for layer in self._layers:
            x, normal = ops.add_norm(x, y, scale, layer.norm1, eps)
            qkv = F.linear(normal, layer.qkv).view(*x.shape[:2], heads, self.config.head_dim)
            queries = ops.rotate(qkv, layer.keys, layer.values, rows, self._rates)
            y = ops.attend(queries, layer.keys, layer.values, rows, self.config.sliding_window)
            x, normal = ops.add_norm(x, F.linear(y.flatten(2), layer.out), layer.scale1, layer.norm2, eps)
            y, scale = F.linear(ops.swiglu(F.linear(normal, layer.gate_up)), layer.down), layer.scale2
        return ops.add_norm(x, y, scale, self._norm, eps)[1]


class _Kept:
    """Makes state tensors for all slots."""

    def __init__(self, slots: int, like: torch.Tensor) -> None:
        self._slots, self._like = slots, like
        self.tensors: list[torch.Tensor] = []
        self.rings: list[torch.Tensor] = []

    def steps(self, past: int, channels: int) -> torch.Tensor:
        self.tensors.append(self._like.new_zeros(2 * self._slots, past, channels))
        return self.tensors[-1]

    def ring(self, *shape: int) -> torch.Tensor:
        self.rings.append(self._like.new_zeros(self._slots, *shape))
        return self.rings[-1]


class _Layer:
    def __init__(self, layer: TransformerLayer, kept: _Kept, ring: int, kv_heads: int, head_dim: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm1, self.norm2 = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
        self.scale1, self.scale2 = layer.self_attn_layer_scale.scale.detach(), layer.mlp_layer_scale.scale.detach()
        self.qkv = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)).detach()
        self.gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach()
        self.out, self.down = attention.o_proj.weight.detach(), mlp.down_proj.weight.detach()
        self.keys, self.values = kept.ring(ring, kv_heads, head_dim), kept.ring(ring, kv_heads, head_dim)


class _Conv:
    """A causal convolution's weights as [taps, in, out] and, the same memory, as a matrix [taps * in, out]."""

    def __init__(self, layer: CausalConv, kept: _Kept) -> None:
        conv = layer.conv
        assert conv.bias is not None and conv.groups == 1
        self.weight = conv.weight.detach().permute(2, 1, 0).contiguous()
        self.matrix = self.weight.flatten(0, 1)
        self.bias = conv.bias.detach()
        self.taps, self.dilation = conv.kernel_size[0], conv.dilation[0]
        self.kept = kept.steps(layer.past, conv.in_channels)


class _Upsample:
    """A step's `stride` output steps side by side are one row of a matrix product; then ConvNeXt."""

    def __init__(self, stage: UpsampleStage, kept: _Kept) -> None:
        upsample, block = cast(Upsample, stage[0]), cast(ConvNeXt, stage[1])
        assert upsample.conv.bias is not None and block.dwconv.conv.bias is not None
        stride, width = upsample.conv.kernel_size[0], upsample.conv.out_channels
        self._matrix = upsample.conv.weight.detach().permute(0, 2, 1).flatten(1).contiguous()
        self._bias = upsample.conv.bias.detach().repeat(stride)
        self._width = width
        self._depthwise = block.dwconv.conv.weight.detach()[:, 0].T.contiguous()
        self._depthwise_bias = block.dwconv.conv.bias.detach()
        self._kept = kept.steps(block.dwconv.past, width)
        self._norm_weight, self._norm_bias, self._eps = block.norm.weight.detach(), block.norm.bias.detach(), block.norm.eps
        self._up, self._up_bias = block.pwconv1.weight.detach(), block.pwconv1.bias.detach()
        self._down, self._down_bias = block.pwconv2.weight.detach(), block.pwconv2.bias.detach()
        self._gamma = block.gamma.detach()

    def __call__(self, ops: Ops, x: torch.Tensor, rows: FusedRows) -> torch.Tensor:
        x = _linear(x, self._matrix, self._bias).view(x.shape[0], -1, self._width)
        joined, _ = ops.join(x, self._kept, rows, Join())
        y = ops.depthwise_norm(joined, self._depthwise, self._depthwise_bias, self._norm_weight, self._norm_bias, self._eps)
        y = F.linear(F.gelu(F.linear(y, self._up, self._up_bias)), self._down, self._down_bias)
        return torch.addcmul(x, self._gamma, y)


class _Block:
    """Returns its output as two terms, which the next `join` adds."""

    def __init__(self, block: DecoderBlock, kept: _Kept) -> None:
        snake, upsample, *units = list(block.block)
        conv = cast(LookaheadUpsample, upsample).conv
        assert conv.bias is not None
        stride, self._width = conv.stride[0], conv.out_channels
        self._snake = _scale(cast(Snake, snake))
        # out[j] = x[j + 1] w[:r] + x[j] w[r:]: rows of the matrix follow the joined (x[j], x[j + 1]).
        halves = conv.weight.detach().reshape(conv.in_channels, conv.out_channels, 2, stride).flip(2)
        self._matrix = halves.permute(2, 0, 3, 1).flatten(2).flatten(0, 1).contiguous()
        self._bias = conv.bias.detach().repeat(stride)
        self._kept = kept.steps(1, conv.in_channels)
        self._units = [_Unit(cast(ResidualUnit, unit), kept) for unit in units]

    def __call__(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor | None, rows: FusedRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        pairs, _ = ops.join(x, self._kept, rows, Join(head=not rows.fresh, taps=2), self._snake, residual)
        x, residual = _linear(pairs, self._matrix, self._bias).view(pairs.shape[0], -1, self._width), None
        for unit in self._units:
            x, residual = unit(ops, x, residual, rows)
        return x, residual


class _Unit:
    def __init__(self, unit: ResidualUnit, kept: _Kept) -> None:
        self._snake1, self._snake2 = _scale(unit.act1), _scale(unit.act2)
        self._conv, self._point = _Conv(unit.conv1, kept), _Conv(unit.conv2, kept)

    def __call__(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor | None, rows: FusedRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        conv = self._conv
        if x.shape[2] >= WIDE:
            how = Join(taps=conv.taps, dilation=conv.dilation)
            taps, x = ops.join(x, conv.kept, rows, how, self._snake1, residual)
            y, _ = ops.join(_linear(taps, conv.matrix, conv.bias), self._point.kept, rows, Join(), self._snake2)
        else:
            joined, x = ops.join(x, conv.kept, rows, Join(), self._snake1, residual)
            y = ops.conv(joined, conv.weight, conv.bias, conv.dilation, self._snake2)
        return x, _linear(y, self._point.matrix, self._point.bias)


def _scale(snake: Snake) -> SnakeScale:
    dtype = torch.promote_types(snake.alpha.dtype, torch.float32)
    return SnakeScale(snake.alpha.detach().to(dtype).exp(), 1.0 / (snake.beta.detach().to(dtype).exp() + 1e-9))


def _linear(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[rows, n, in] x [in, out] + [out]"""
    return torch.addmm(bias, x.reshape(-1, x.shape[2]), matrix).view(*x.shape[:2], -1)
