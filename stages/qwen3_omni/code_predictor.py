"""The Talker's code predictor: the 15 residual codes of a frame, for all rows of a step at once.

A frame is a sequence of its own of 16 positions: the Talker's hidden state, the embedding of code 0, then the codes one by one.
Nothing is kept from frame to frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.attention import ContiguousAttention
from omni_bus.stages.ar.sampler import sample_rows
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.config import TalkerConfig
from omni_bus.stages.qwen3_omni.weights import load_stack, load_tensor

PREFIX = "talker.code_predictor."
GREEDY = SamplingParams(temperature=0.0)
# Fixed in transformers' Talker, whatever the sampling of code 0 is.
SAMPLED = SamplingParams(temperature=1.0, top_k=50, top_p=0.8)


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
        self.cache = ContiguousAttention(self.decoder.config, rows=max_rows, capacity=self.groups, dtype=dtype, device=device)

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
        self.cache.reset(len(codes))
        inputs = torch.stack((hidden, embedded), dim=1)
        frame, vectors = [codes], [embedded]
        for table, head in zip(self.embeddings, self.heads, strict=True):
            state = self.decoder.forward_rows(inputs, self.cache)[:, -1]
            code = sample_rows(F.linear(state, head).float(), params, generators)
            frame.append(code)
            vectors.append(F.embedding(code, table))
            inputs = vectors[-1][:, None]
        return torch.stack(frame, dim=1), torch.stack(vectors, dim=1).sum(dim=1)
