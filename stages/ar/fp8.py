"""Matrices in FP8 (e4m3) with one float32 scale an output channel: made of weights at load, and back to weights for a product.

A weight is code * scale, its channel's scale being the channel's largest magnitude / 448, the largest e4m3 number: the largest weight
keeps its value up to rounding in float32. A code has three bits behind its leading one, so a weight is off by at most 2^-4 of itself,
or, below 2^-6 scales, where codes are evenly spaced, by at most 2^-10 scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SCALE_BYTES = 4  # of a channel
SCALE_SUFFIX = "_scale"  # behind the name of the tensor with the codes


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """Where a matrix's codes [outputs, inputs] and scales [outputs] lie; it is filled as a tensor is, by `copy_`."""

    codes: torch.Tensor
    scales: torch.Tensor

    def copy_(self, source: torch.Tensor) -> None:
        """Quantise [outputs, inputs], on the device of either."""
        codes, scales = quantise(source)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def is_contiguous(self) -> bool:
        return self.codes.is_contiguous() and self.scales.is_contiguous()


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., outputs, inputs] → codes of the same shape, scales float32 [..., outputs]. A channel of zeros stays one."""
    wide = weight.float()
    # No smaller than the least normal number: below it a division by the scale would overflow.
    # A product and not a quotient: torch divides by a number on a GPU by multiplying with its inverse, and on a CPU it does not.
    scales = (wide.abs().amax(-1) * (1.0 / LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (wide / scales[..., None]).clamp(-LARGEST, LARGEST)  # rounding must not lead above what e4m3 holds: that is NaN
    return codes.to(FP8), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights: float32 products of code and scale, rounded to `dtype` (16 bits or more, which hold every code as it is)."""
    return codes.to(dtype).mul_(scales[..., None])


def quantised_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A decoder's tensors with its fused experts in FP8 and their scales beside them, as mlp.Experts holds them."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_expert_tensor(name):
            out[name], out[name + SCALE_SUFFIX] = quantise(tensor)
        else:
            out[name] = tensor
    return out


def is_expert_tensor(name: str) -> bool:
    """Whether that tensor of a decoder has all experts of a layer."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def keeps_dtype(name: str, tensor: torch.Tensor) -> bool:
    """Codes and scales stay what they are, whatever dtype a model is to have."""
    return tensor.dtype == FP8 or name.endswith(SCALE_SUFFIX)
