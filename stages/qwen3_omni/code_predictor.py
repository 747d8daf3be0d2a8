"""The Talker's code predictor: the 15 residual codes of a frame, for all rows of a step at once.

A frame is a sequence of its own of 16 positions: the Talker's hidden state, the embedding of code 0, then the codes one by one.
Nothing is kept from frame to frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F

from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.attention import ContiguousAttention
from omni_bus.stages.ar.decoder import DecoderLayer
from omni_bus.stages.ar.device_sampler import MAX_FUSED_VOCAB, sample
from omni_bus.stages.ar.mlp import DenseMLP
from omni_bus.stages.ar.ops import linear_add, norm_linear
from omni_bus.stages.ar.program import StepTensors
from omni_bus.stages.ar.sampler import sample_rows
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.config import TalkerConfig
from omni_bus.stages.qwen3_omni.weights import load_stack, load_tensor

PREFIX = "talker.code_predictor."
GREEDY = SamplingParams(temperature=0.0)
# Fixed in transformers' Talker, whatever the sampling of code 0 is.
SAMPLED = SamplingParams(temperature=1.0, top_k=50, top_p=0.8)


class FrameAttention(ContiguousAttention):
    """The residual codes' cache, with one kernel for cache and attention where a GPU is."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not query.is_cuda:
            return super().attend(layer, query, key, value)
        from omni_bus.stages.ar import triton_contiguous

        start = self.length - len(query) // self.rows
        attended: torch.Tensor = triton_contiguous.attend(
            query, key, value, self.keys[layer], self.values[layer], rows=self.rows, start=start
        )
        return attended


class CodePredictor:
    def __init__(
        self, config: TalkerConfig, checkpoint: Checkpoint, *, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.groups = config.num_code_groups
        self.decoder, tables = load_stack(
            checkpoint, f"{PREFIX}model.", config.code_predictor, embeddings="codec_embedding.", dtype=dtype, device=device
        )
        self.embeddings = [tables[f"codec_embedding.{group}.weight"] for group in range(self.groups - 1)]
        self.heads = [
            load_tensor(checkpoint, f"{PREFIX}lm_head.{group}.weight", dtype=dtype, device=device)
            for group in range(self.groups - 1)
        ]
        self._layers = [cast(DecoderLayer, layer) for layer in self.decoder.layers]
        self.cache = FrameAttention(self.decoder.config, rows=max_rows, capacity=self.groups, dtype=dtype, device=device)
        self._numbers = torch.arange(self.groups, device=device)[:, None]
        # On a GPU each layer's attention is one kernel behind the joined projection; False = the operators of every other decoder.
        self.fused = device.type == "cuda"
        positions = torch.arange(self.groups, device=device).expand(3, -1)
        cos, sin = self.decoder.rotary(positions, dtype)
        self._angles = cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def predict(
        self,
        hidden: torch.Tensor,
        codes: torch.Tensor,
        embedded: torch.Tensor,
        generators: Sequence[torch.Generator | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual codes for code 0 of each row, and what the Talker is fed of the whole frame.

        hidden [rows, hidden]: the Talker's post-norm state that code 0 was sampled from; codes int64 [rows]; embedded [rows, hidden]:
        their codec embedding. A row with a generator is sampled, with one draw a code, in order; a row without is greedy.
        Returns codes int64 [rows, groups] and the sum of their embeddings [rows, hidden].
        """
        params = [GREEDY if generator is None else SAMPLED for generator in generators]
        return self._predict(hidden, codes, embedded, lambda group, scores: sample_rows(scores.float(), params, generators))

    def predict_on_device(
        self, hidden: torch.Tensor, codes: torch.Tensor, embedded: torch.Tensor, step: StepTensors, draws: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `predict`, in a form that a CUDA graph can hold: rows with a temperature are sampled, code g with the draw of number
        `draws[g]`."""
        if self.fused and self.heads[0].shape[0] <= MAX_FUSED_VOCAB:
            return self._predict_fused(hidden, codes, embedded, step)
        temperature = (step.temperature > 0).to(torch.float32)
        top_k = torch.full_like(step.top_k, SAMPLED.top_k or 0)
        top_p = torch.full_like(step.top_p, SAMPLED.top_p or 1.0)
        return self._predict(
            hidden,
            codes,
            embedded,
            lambda group, scores: sample(scores, step.seeds, draws[group], temperature, top_k, top_p),
        )

    def draws(self, step: StepTensors) -> torch.Tensor:
        """int64 [groups, rows]: the number of each code's draw, another one for every code of a request."""
        return step.draws * self.groups + self._numbers

    def _predict(
        self,
        hidden: torch.Tensor,
        codes: torch.Tensor,
        embedded: torch.Tensor,
        choose: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """choose: (number of the code, scores [rows, vocab]) → int64 [rows]."""
        self.cache.reset(len(codes))
        inputs = torch.stack((hidden, embedded), dim=1)
        frame, vectors = [codes], [embedded]
        for group, (table, head) in enumerate(zip(self.embeddings, self.heads, strict=True), start=1):
            code = choose(group, self._scores(inputs, head))
            frame.append(code)
            vectors.append(F.embedding(code, table))
            inputs = vectors[-1][:, None]
        return torch.stack(frame, dim=1), torch.stack(vectors, dim=1).sum(dim=1)

    def _scores(self, inputs: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """The next positions [rows, count, hidden] of every row → scores [rows, vocab] of the last one."""
        if self.fused:
            return self._fused_scores(inputs, head)
        return F.linear(self.decoder.forward_rows(inputs, self.cache)[:, -1], head)

    def _fused_scores(self, inputs: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        rows, count, width = inputs.shape
        last = self._fused_layers(inputs.reshape(rows * count, width), count).view(rows, count, width)[:, -1]
        return self._fused_head(last.contiguous(), head)

    def _predict_fused(
        self, hidden: torch.Tensor, codes: torch.Tensor, embedded: torch.Tensor, step: StepTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_predict` with a kernel for all that stands between two passes."""
        from omni_bus.stages.qwen3_omni import triton_frames

        rows = len(codes)
        self.cache.reset(rows)
        frames = triton_frames.Frames(codes, embedded, self.groups)
        x = self._fused_layers(torch.stack((hidden, embedded), dim=1).view(2 * rows, -1), 2)[1::2].contiguous()
        top_k, top_p = SAMPLED.top_k or 0, SAMPLED.top_p or 1.0
        for group, (table, head) in enumerate(zip(self.embeddings, self.heads, strict=True), start=1):
            if group > 1:
                x = self._fused_layers(x, 1)
            x = frames.choose(group, self._fused_head(x, head), table, step, top_k=top_k, top_p=top_p)
        return frames.frame, frames.total

    def _fused_layers(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """The next `count` positions of every row, [rows * count, hidden] → what the last layer gives, before the norm."""
        from omni_bus.stages.qwen3_omni import triton_frames

        rows = len(x) // count
        start, kernels = self.cache.extend(count), self.decoder.kernels
        for index, layer in enumerate(self._layers):
            own, norm, mlp = layer.self_attn, layer.input_layernorm, layer.mlp
            assert own.q_norm is not None and own.k_norm is not None and isinstance(mlp, DenseMLP)
            attended = triton_frames.attend(
                norm_linear(x, norm.weight, norm.eps, own.joined, kernels=kernels),
                own.q_norm.weight,
                own.k_norm.weight,
                *self._angles,
                self.cache.keys[index],
                self.cache.values[index],
                norm.eps,
                rows=rows,
                start=start,
            )
            x = linear_add(attended, own.o_proj.weight, None, x, kernels)
            x = mlp.step(x, layer.post_attention_layernorm, kernels)
        return x

    def _fused_head(self, x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        norm = self.decoder.norm
        return norm_linear(x, norm.weight, norm.eps, head, kernels=self.decoder.kernels)
