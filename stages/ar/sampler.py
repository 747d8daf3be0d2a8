"""From logits to one token per row, draw for draw as transformers' `generate` does it for a single sequence.

Order: repetition penalty, min_tokens, suppressed ids, temperature, top_k, top_p, softmax, one `torch.multinomial` with the row's
own generator. Without a temperature, or at 0, the highest score is taken (transformers' do_sample=False) and nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.program import Row


def is_greedy(params: SamplingParams) -> bool:
    return not params.temperature


def sample_rows(
    scores: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> torch.Tensor:
    """float32 [rows, vocab] → int64 [rows]. A row that is not greedy needs a generator, and advances it by one draw."""
    assert len(scores) == len(params) == len(generators)
    groups: dict[tuple[float, int, float], list[int]] = {}
    for row, one in enumerate(params):
        key = (0.0, 0, 1.0)
        if not is_greedy(one):
            top_p = 1.0 if one.top_p is None else one.top_p
            key = (one.temperature or 0.0, max(one.top_k or 0, 0), top_p)
        groups.setdefault(key, []).append(row)
    tokens = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    for (temperature, top_k, top_p), rows in groups.items():
        chosen = scores if len(groups) == 1 else scores[rows]
        if temperature == 0.0:
            tokens[rows] = chosen.argmax(dim=-1)
            continue
        probs = _warp(chosen, temperature, top_k, top_p).softmax(dim=-1)
        for index, row in enumerate(rows):
            generator = generators[row]
            assert generator is not None, "sampling needs a generator"
            tokens[row] = torch.multinomial(probs[index : index + 1], num_samples=1, generator=generator)[0, 0]
    return tokens


def _warp(scores: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Scores with all that top_k and top_p leave out at -inf. top_p keeps the fewest tokens whose probability reaches it, found
    from the unlikely end, so that at least one stays."""
    scores = scores / temperature
    if top_k:
        least = torch.topk(scores, min(top_k, scores.shape[-1]), dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p < 1.0:
        ordered, ids = torch.sort(scores, dim=-1)
        left_out = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        left_out[:, -1] = False
        scores = scores.masked_fill(left_out.scatter(1, ids, left_out), -torch.inf)
    return scores


class Sampler:
    """What of sampling needs a row's history: which ids were seen (kept as a mask that grows with the output)."""

    def __init__(self, eos_ids: frozenset[int], suppressed_ids: torch.Tensor | None) -> None:
        self.eos_ids = eos_ids
        self.suppressed_ids = suppressed_ids
        self._seen: dict[int, tuple[torch.Tensor, int, int]] = {}  # mask, number of penalty_ids and of output_ids in it

    def process(self, logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """float32 [rows, vocab] with penalty, min_tokens and suppressed ids applied; `logits` is left as it is."""
        scores = logits.to(torch.float32, copy=True)
        for index, row in enumerate(rows):
            params = row.request.sampling
            penalty = params.repetition_penalty
            if penalty is not None and penalty != 1.0:
                score = scores[index]
                score = torch.where(score < 0, score * penalty, score / penalty)
                scores[index] = torch.where(self._mask(row, scores), score, scores[index])
            if params.min_tokens and len(row.output_ids) < params.min_tokens:
                ending = [token for token in self.ending_ids(row) if token < scores.shape[1]]
                scores[index, ending] = -torch.inf
        if self.suppressed_ids is not None:
            scores[:, self.suppressed_ids.to(scores.device)] = -torch.inf
        return scores

    def ending_ids(self, row: Row) -> frozenset[int]:
        """The ids that end this row's output."""
        params = row.request.sampling
        return (frozenset() if params.ignore_eos else self.eos_ids) | frozenset(params.stop_token_ids or ())

    def release(self, row: Row) -> None:
        self._seen.pop(row.request.id, None)

    def _mask(self, row: Row, scores: torch.Tensor) -> torch.Tensor:
        vocab = scores.shape[1]
        mask, prompt, output = self._seen.get(
            row.request.id, (torch.zeros(vocab, dtype=torch.bool, device=scores.device), 0, 0)
        )
        new = [token for token in (*row.penalty_ids[prompt:], *row.output_ids[output:]) if token < vocab]
        if new:
            mask[torch.tensor(new, device=scores.device)] = True
        self._seen[row.request.id] = (mask, len(row.penalty_ids), len(row.output_ids))
        return mask
