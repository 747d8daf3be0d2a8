"""Streaming layers: each owns the state of many streams, one slot each, and takes up where a stream's last call left off.

A call decodes the next steps of some streams, as many of each, all of them at their beginning (`Rows.fresh`) or none: a fresh stream
has nothing before it, and a transposed convolution gives it one input step less. Fresh rows never read what their slot held
before, so a slot needs no clearing between streams. Run in any pieces, a layer gives what it gives for the whole input at once.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """The streams of one call. slots, positions: int64 [rows] on the model's device; positions counts the frames decoded before."""

    slots: torch.Tensor
    positions: torch.Tensor
    fresh: bool


class StreamingLayer(nn.Module):
    """A layer with state tensors [slots, …], kept as buffers that no checkpoint holds."""

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of one slot's state."""
        raise NotImplementedError

    def allocate(self, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        for name, shape in self.state_shapes().items():
            self.register_buffer(name, torch.zeros(slots, *shape, dtype=dtype, device=device), persistent=False)

    def state(self) -> list[torch.Tensor]:
        return [self.get_buffer(name) for name in self.state_shapes()]


class CausalConv(StreamingLayer):
    """Conv1d that sees the present and the past: `(kernel - 1) * dilation` steps of it, zeros before the stream began.

    [rows, in, steps] → [rows, out, steps]
    """

    tail: torch.Tensor  # [slots, in, past]

    def __init__(self, into: int, out: int, kernel: int, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(into, out, kernel, dilation=dilation, groups=groups)
        self.past = (kernel - 1) * dilation

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"tail": (self.conv.in_channels, self.past)} if self.past else {}

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        if self.past:
            x = F.pad(x, (self.past, 0)) if rows.fresh else torch.cat((self.tail[rows.slots], x), -1)
            self.tail[rows.slots] = x[..., -self.past :]
        out: torch.Tensor = self.conv(x)
        return out


class Upsample(nn.Module):
    """ConvTranspose1d with kernel == stride: every step becomes `stride` steps on its own. [rows, in, n] → [rows, out, stride * n]"""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(into, out, stride, stride=stride)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        out: torch.Tensor = self.conv(x)
        return out


class LookaheadUpsample(StreamingLayer):
    """ConvTranspose1d with kernel 2r and stride r, cropped by r on both sides: out[j] = x[j + 1] w[:r] + x[j] w[r:].

    Step j comes out when step j + 1 is known: n steps of a fresh stream give (n - 1) * r, n later steps n * r.
    """

    newest: torch.Tensor  # [slots, in, 1]

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(into, out, 2 * stride, stride=stride, padding=stride)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"newest": (self.conv.in_channels, 1)}

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        if not rows.fresh:
            x = torch.cat((self.newest[rows.slots], x), -1)
        self.newest[rows.slots] = x[..., -1:]
        if x.shape[-1] == 1:
            return x.new_zeros(x.shape[0], self.conv.out_channels, 0)
        out: torch.Tensor = self.conv(x)
        return out


class Snake(nn.Module):
    """x + sin²(x e^alpha) / (e^beta + 1e-9) per channel: Snake (arXiv 2006.08195) with a magnitude of its own. [rows, channels, n]"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequency, magnitude = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x + (1.0 / (magnitude + 1e-9)) * torch.sin(x * frequency).square()


class ConvNeXt(nn.Module):
    """Depthwise causal convolution, LayerNorm, 4x MLP, scaled residual. [rows, width, n] → the same"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.dwconv(x, rows).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.transpose(1, 2)


class UpsampleStage(nn.ModuleList):
    """[rows, width, n] → [rows, width, stride * n]"""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__([Upsample(width, width, stride), ConvNeXt(width)])

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        for layer in self:
            x = layer(x, rows)
        return x


class ResidualUnit(nn.Module):
    """Snake, dilated causal convolution, Snake, pointwise convolution, residual. [rows, width, n] → the same"""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.act1 = Snake(width)
        self.conv1 = CausalConv(width, width, 7, dilation=dilation)
        self.act2 = Snake(width)
        self.conv2 = CausalConv(width, width, 1)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        out: torch.Tensor = x + self.conv2(self.act2(self.conv1(self.act1(x), rows)), rows)
        return out


class DecoderBlock(nn.Module):
    """Halves the width and multiplies the steps by `stride`. [rows, width, n] → [rows, width / 2, stride * n], less one step if fresh"""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        units = [ResidualUnit(width // 2, dilation) for dilation in (1, 3, 9)]
        self.block = nn.ModuleList([Snake(width), LookaheadUpsample(width, width // 2, stride), *units])

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        x = self.block[0](x)
        for layer in list(self.block)[1:]:
            x = layer(x, rows)
        return x
