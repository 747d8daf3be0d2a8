"""What the Talker is prefilled with: the user turns and nine rows that open the answer (qwen3-omni's `_get_talker_*_parts`).

Every row is a vector of the Talker's width: text through `text_projection` of the Thinker's embedding, media through
`hidden_projection` of the Thinker's accept-layer state, and in the opening a codec embedding added to the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from omni_bus.stages.ar.transfer import ids_to_device, to_device
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.config import OmniConfig
from omni_bus.stages.qwen3_omni.payloads import TalkerPrompt
from omni_bus.stages.qwen3_omni.rope_index import rope_index
from omni_bus.stages.qwen3_omni.weights import load_tensor

OPENING_ROWS = 9  # the last of them holds the first spoken token
TABLE_STEP = 8192  # rows of the embedding table projected at once


class Projection:
    """fc2(silu(fc1(x))) from the Thinker's width to the Talker's."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, *, dtype: torch.dtype, device: torch.device) -> None:
        tensors = checkpoint.tensors(prefix, dtype=dtype, device=device)
        self.weight1, self.bias1 = tensors["linear_fc1.weight"], tensors["linear_fc1.bias"]
        self.weight2, self.bias2 = tensors["linear_fc2.weight"], tensors["linear_fc2.bias"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, self.weight1, self.bias1)), self.weight2, self.bias2)


class TalkerPrompts:
    """Builds prompt rows. Every text token's projected embedding is computed once, at load: [vocab, hidden]."""

    def __init__(
        self,
        config: OmniConfig,
        checkpoint: Checkpoint,
        codec_embedding: torch.Tensor,
        *,
        line_end: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`line_end`: the id of the line end between the role and the answer."""
        self.config = config
        self.device = device
        self.codec_embedding = codec_embedding
        self.project_media = Projection(checkpoint, "talker.hidden_projection.", dtype=dtype, device=device)
        project_text = Projection(checkpoint, "talker.text_projection.", dtype=dtype, device=device)
        table = load_tensor(checkpoint, "thinker.model.embed_tokens.weight", dtype=dtype, device=device)
        self.text_table = torch.cat([project_text(rows) for rows in torch.split(table, TABLE_STEP)])
        ids, talker = config.ids, config.talker
        opening = self.text([ids.im_start, ids.assistant, line_end, *[ids.tts_pad] * 4, ids.tts_bos])
        self._openings: dict[int, torch.Tensor] = {}  # by speaker [8, hidden]
        for speaker in set(talker.speaker_ids.values()):
            specials = (talker.codec_nothink, talker.codec_think_bos, talker.codec_think_eos, speaker, talker.codec_pad)
            rows = opening.clone()
            rows[3:] += self.codec(ids_to_device(specials, device))
            self._openings[speaker] = rows
        self._codec_bos = codec_embedding[talker.codec_bos]

    def text(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[n, hidden] of text tokens."""
        return F.embedding(ids_to_device(token_ids, self.device), self.text_table)

    def codec(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [n] → [n, hidden] of codes of codebook 0 and the codec's special ids."""
        return F.embedding(codes, self.codec_embedding)

    def placeholders(self, prompt: TalkerPrompt) -> int:
        """How many rows of the Thinker the prompt needs."""
        wanted = self.config.talker.media.placeholders
        return sum(token in wanted for token in prompt.token_ids)

    def positions(self, prompt: TalkerPrompt) -> torch.Tensor:
        """int64 [3, user tokens + 9]. Text tokens count alike, whichever they are."""
        token_ids = [*prompt.token_ids, *[self.config.ids.tts_pad] * OPENING_ROWS]
        return rope_index(token_ids, prompt.media, self.config.talker.media)

    def before_speech(self, prompt: TalkerPrompt, placeholder_rows: torch.Tensor | None, speaker: int) -> torch.Tensor:
        """All rows but the last [user tokens + 8, hidden]: what can be computed before the first spoken token is known."""
        user = self.text(prompt.token_ids)
        if placeholder_rows is not None:
            wanted = self.config.talker.media.placeholders
            places = ids_to_device([at for at, token in enumerate(prompt.token_ids) if token in wanted], self.device)
            user[places] = self.project_media(to_device(placeholder_rows, self.device, user.dtype))
        return torch.cat((user, self._openings[speaker]))

    def first_speech(self, token: int) -> torch.Tensor:
        """The last row [1, hidden]: the first spoken token on the codec's begin mark."""
        return (self.text_table[token] + self._codec_bos)[None]
