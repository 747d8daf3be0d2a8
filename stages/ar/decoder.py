"""One decoder for every autoregressive model here: Llama, the Qwen3-MoE Thinker and Talker, the Talker's code predictor.

Tokens of all rows come packed, [N, hidden]; what belongs to which row only the Attention knows. Parameter names are those of a
Hugging Face checkpoint below `model.` (`layers.0.self_attn.q_proj.weight`, `norm.weight`), experts fused as in mlp.Experts.
Embeddings and heads belong to the Program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from omni_bus.errors import CheckpointError
from omni_bus.stages.ar.attention import Attention, ContiguousAttention
from omni_bus.stages.ar.fp8 import keeps_dtype
from omni_bus.stages.ar.mlp import DenseConfig, DenseMLP, MoE, MoEConfig, join
from omni_bus.stages.ar.norm import RMSNorm
from omni_bus.stages.ar.ops import Kernels, linear_add, norm_linear, qk_norm_rope, rotate, use_step_form


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: DenseConfig | MoEConfig
    max_positions: int
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    mrope_section: tuple[int, int, int] | None = None  # frequencies of the axes t, h, w, interleaved; None = axis t alone
    qk_norm: bool = False  # RMS norm over head_dim of each query and key
    attention_bias: bool = False

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0 and self.head_dim % 2 == 0
        assert self.mrope_section is None or sum(self.mrope_section) == self.head_dim // 2


class Rotary:
    """Rotary angles. Interleaved multimodal RoPE: frequency i follows axis h where i % 3 == 1 and i < 3 * section[1], axis w
    where i % 3 == 2 and i < 3 * section[2], and axis t elsewhere. Not a module: it has no weights, and no dtype to be cast to."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [3, N] → cos and sin, [N, 1, head_dim] each."""
        if positions.device not in self._tables:
            self._tables[positions.device] = self._table(positions.device)
        frequencies, axes = self._tables[positions.device]
        if self.config.mrope_section is None:
            angles = positions[0].float()[:, None] * frequencies
        else:
            angles = positions.float()[axes].T * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _table(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        dim = self.config.head_dim
        frequencies = 1.0 / (self.config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        axes = torch.zeros(dim // 2, dtype=torch.int64)
        if self.config.mrope_section is not None:
            for axis in (1, 2):
                axes[axis : 3 * self.config.mrope_section[axis] : 3] = axis
        return frequencies.to(device), axes.to(device)


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.eps = config.rms_eps
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None
        self._qkv: torch.Tensor | None = None
        self._qkv_bias: torch.Tensor | None = None

    def pack(self) -> None:
        """Join the projections of queries, keys and values; their weights become parts of the joined tensor."""
        projections = [self.q_proj, self.k_proj, self.v_proj]
        self._qkv = join(projections)
        if self.q_proj.bias is not None:
            self._qkv_bias = torch.cat([projection.bias.data for projection in projections])

    @property
    def joined(self) -> torch.Tensor:
        """[(heads + 2 kv_heads) * head_dim, hidden], behind `pack`."""
        assert self._qkv is not None, "pack comes first"
        return self._qkv

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attention: Attention, kernels: Kernels
    ) -> torch.Tensor:
        tokens = len(x)
        if self._qkv is not None:
            query, key, value = self._split(F.linear(x, self._qkv, self._qkv_bias), rotary, kernels)
        else:
            query = self.q_proj(x).view(tokens, -1, self.head_dim)
            key = self.k_proj(x).view(tokens, -1, self.head_dim)
            value = self.v_proj(x).view(tokens, -1, self.head_dim)
            if self.q_norm is not None and self.k_norm is not None:
                query, key = self.q_norm(query, kernels), self.k_norm(key, kernels)
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        out: torch.Tensor = self.o_proj(attention.attend(self.layer, query, key, value).reshape(tokens, -1))
        return out

    def step(
        self,
        residual: torch.Tensor,
        norm: RMSNorm,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
        kernels: Kernels,
    ) -> torch.Tensor:
        """Few rows [N, hidden] → residual + self(norm(residual)). After `pack`."""
        assert self._qkv is not None
        qkv = norm_linear(residual, norm.weight, norm.eps, self._qkv, self._qkv_bias, kernels=kernels)
        attended = attention.attend(self.layer, *self._split(qkv, rotary, kernels)).reshape(len(residual), -1)
        return linear_add(attended, self.o_proj.weight, self.o_proj.bias, residual, kernels)

    def _split(
        self, qkv: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return qk_norm_rope(
            qkv,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            rotary,
            heads=self.heads,
            kv_heads=self.kv_heads,
            eps=self.eps,
            kernels=kernels,
        )


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp: DenseMLP | MoE
        if isinstance(config.mlp, MoEConfig):
            self.mlp = MoE(config.hidden, config.mlp)
        else:
            self.mlp = DenseMLP(config.hidden, config.mlp.intermediate)
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        following: RMSNorm,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
        kernels: Kernels,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: input_layernorm(residual) → (following(out), out), where out is what transformers calls the layer's hidden states."""
        attended = self.self_attn(x, rotary, attention, kernels)
        x, residual = self.post_attention_layernorm.add(attended, residual, kernels)
        return self.mlp.add_norm(x, residual, following, kernels)

    def step(
        self, residual: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attention: Attention, kernels: Kernels
    ) -> torch.Tensor:
        """The layer for one row on a GPU, from hidden states to hidden states."""
        residual = self.self_attn.step(residual, self.input_layernorm, rotary, attention, kernels)
        return self.mlp.step(residual, self.post_attention_layernorm, kernels)


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps)
        self._rows_made: dict[tuple[object, ...], tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]] = {}
        self.kernels: Kernels = "auto"  # which form of ops.py's operators this decoder takes where a GPU is

    @classmethod
    def from_tensors(
        cls, config: DecoderConfig, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device | str
    ) -> Decoder:
        """A decoder that holds `tensors` (names as above). CheckpointError says which are missing, not wanted or of another shape."""
        with torch.device("meta"):
            decoder = cls(config)
        wanted = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
        wrong = sorted(wanted.keys() ^ tensors.keys()) or sorted(
            name for name, shape in wanted.items() if tuple(tensors[name].shape) != shape
        )
        if wrong:
            raise CheckpointError(
                f"the checkpoint does not hold the decoder its config describes: {len(wrong)} tensors are missing, not expected or "
                f"of another shape, the first is {wrong[0]!r}"
            )
        kept = {name: tensor.dtype if keeps_dtype(name, tensor) else dtype for name, tensor in tensors.items()}
        decoder.load_state_dict(
            {name: tensor.to(device=device, dtype=kept[name]) for name, tensor in tensors.items()}, assign=True
        )
        decoder.eval().requires_grad_(False)
        if torch.device(device).type == "cuda":
            decoder.pack()
        return decoder

    def pack(self) -> None:
        """Join the weights that one product can serve. On a GPU only: a joined product on the CPU rounds otherwise than its parts."""
        for layer in self.layers:
            cast(DecoderLayer, layer).self_attn.pack()
            cast(DecoderLayer, layer).mlp.pack()

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        *,
        deepstack: torch.Tensor | None = None,
        capture_layer: int | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Packed tokens [N, hidden] at positions int64 [3, N] → (post-norm hidden [N, hidden], captured [N, hidden] or None).

        deepstack [taps, N, hidden] is added behind the first `taps` layers. `capture_layer` k gives what transformers calls
        hidden_states[k]: the output of layer k-1 before deepstack is added (k = 0: the input; k = layers: post-norm).
        `rotary`: what self.rotary gives for the positions, where the caller has it already.
        """
        rotary = rotary or self.rotary(positions, inputs_embeds.dtype)
        taps = 0 if deepstack is None else len(deepstack)
        residual = inputs_embeds
        captured = residual if capture_layer == 0 else None
        layers = [cast(DecoderLayer, layer) for layer in self.layers]
        norms = [*(layer.input_layernorm for layer in layers), self.norm]
        step = use_step_form(residual, self.kernels)
        x = residual if step else norms[0](residual, self.kernels)
        for index, layer in enumerate(layers):
            if step:
                residual = layer.step(residual, rotary, attention, self.kernels)
            else:
                x, residual = layer(x, residual, norms[index + 1], rotary, attention, self.kernels)
            if capture_layer == index + 1:
                captured = residual
            if deepstack is not None and index < taps:
                if step:
                    residual = residual + deepstack[index]
                else:
                    x, residual = norms[index + 1].add(deepstack[index], residual, self.kernels)
        hidden = self.norm(residual, self.kernels) if step else x
        return hidden, hidden if capture_layer == len(self.layers) else captured

    def forward_rows(self, inputs_embeds: torch.Tensor, cache: ContiguousAttention) -> torch.Tensor:
        """The next n positions of every row of a plain cache: [rows, n, hidden] → post-norm hidden [rows, n, hidden].

        The rows are those of `cache.reset(rows)`; positions count from 0 after it.
        """
        rows, count, width = inputs_embeds.shape
        assert rows == cache.rows
        start = cache.extend(count)
        positions, rotary = self._row_rotary(rows, start, count, inputs_embeds)
        hidden, _ = self(inputs_embeds.reshape(rows * count, width), positions, cache, rotary=rotary)
        out: torch.Tensor = hidden.view(rows, count, width)
        return out

    def _row_rotary(
        self, rows: int, start: int, count: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Positions and angles of `forward_rows`, made once for each shape: a step of few rows has no kernels to spare."""
        key = (rows, start, count, like.dtype, like.device)
        if key not in self._rows_made:
            positions = torch.arange(start, start + count, device=like.device).repeat(rows).expand(3, -1)
            self._rows_made[key] = positions, self.rotary(positions, like.dtype)
        return self._rows_made[key]
