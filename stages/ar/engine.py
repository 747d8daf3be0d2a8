"""One step of a batch: gather inputs → decoder → logits → sample → hand the tokens to the program. Each row's errors stay its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch

from omni_bus.errors import StageFailed
from omni_bus.stages.ar.attention import PagedAttention, Span
from omni_bus.stages.ar.program import Inputs, Program, Row, fail_row, isolated
from omni_bus.stages.ar.sampler import Sampler, sample_rows
from omni_bus.stages.ar.scheduler import Piece

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """What a forward pass found, before anything of a row is changed."""

    ready: list[int]  # pieces from whose last position a token is sampled
    hidden: torch.Tensor  # [ready, hidden], post-norm
    scores: torch.Tensor  # float32 [ready, vocab]
    captured: torch.Tensor | None  # [tokens, hidden]


class Engine:
    def __init__(self, program: Program, attention: PagedAttention, sampler: Sampler, *, max_length: int) -> None:
        self.program = program
        self.attention = attention
        self.sampler = sampler
        self.max_length = max_length
        parameter = next(program.decoder.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    @torch.no_grad()
    def run(self, pieces: Sequence[Piece]) -> None:
        """Compute `pieces`. Where the batch fails, each row is tried alone: what a failed pass wrote into the cache is written
        again, and no generator has moved yet."""
        try:
            outcome = self._forward(pieces)
        except Exception as error:
            failure = error
        else:
            self._commit(pieces, outcome)
            return
        if len(pieces) == 1:
            fail_row(pieces[0].row, failure)
            return
        logger.warning("a batch of %d rows failed (%s); trying each row alone", len(pieces), type(failure).__name__)
        for piece in pieces:
            self.run([piece])

    def _forward(self, pieces: Sequence[Piece]) -> _Outcome:
        inputs = [_next_inputs(piece) for piece in pieces]
        flat = [one for part in inputs for one in part]
        self.attention.plan([Span(piece.row.blocks, piece.row.computed, piece.count) for piece in pieces])
        program = self.program
        hidden, captured = program.decoder(
            self._embeds(flat),
            torch.cat([one.positions for one in flat], dim=1).to(self.device),
            self.attention,
            deepstack=self._deepstack(flat),
            capture_layer=program.capture_layer,
        )
        ready, last, end = [], [], 0
        for index, piece in enumerate(pieces):
            end += piece.count
            if piece.row.prompt_closed and piece.row.computed + piece.count == piece.row.length:
                ready.append(index)
                last.append(end - 1)
        newest = hidden[torch.tensor(last, dtype=torch.int64, device=self.device)]
        scores = self.sampler.process(program.logits(newest), [pieces[index].row for index in ready]) if ready else newest
        return _Outcome(ready, newest, scores, captured)

    def _embeds(self, inputs: Sequence[Inputs]) -> torch.Tensor:
        """[tokens, hidden] of all inputs; the token ids among them are embedded in one call."""
        token_ids = [token for one in inputs for token in one.token_ids or ()]
        if not token_ids:
            return torch.cat([one.embeds for one in inputs if one.embeds is not None]).to(self.device, self.dtype)
        embedded = self.program.embed(torch.tensor(token_ids, dtype=torch.int64, device=self.device))
        if all(one.embeds is None for one in inputs):
            return embedded
        parts, begin = [], 0
        for one in inputs:
            if one.embeds is not None:
                parts.append(one.embeds.to(self.device, self.dtype))
            else:
                count = one.positions.shape[1]
                parts.append(embedded[begin : begin + count])
                begin += count
        return torch.cat(parts)

    def _deepstack(self, inputs: Sequence[Inputs]) -> torch.Tensor | None:
        """[taps, tokens, hidden], zero for the inputs that have none."""
        taps = max((len(one.deepstack) for one in inputs if one.deepstack is not None), default=0)
        if not taps:
            return None
        tokens = sum(one.positions.shape[1] for one in inputs)
        out = torch.zeros(taps, tokens, self.program.decoder.config.hidden, dtype=self.dtype, device=self.device)
        begin = 0
        for one in inputs:
            end = begin + one.positions.shape[1]
            if one.deepstack is not None:
                out[: len(one.deepstack), begin:end] = one.deepstack.to(self.device, self.dtype)
            begin = end
        return out

    def _commit(self, pieces: Sequence[Piece], outcome: _Outcome) -> None:
        begin = 0
        for piece in pieces:
            start = piece.row.computed
            _drop_inputs(piece)
            if outcome.captured is not None and not piece.row.output_ids:
                with isolated(piece.row):
                    self.program.computed(piece.row, start, outcome.captured[begin : begin + piece.count])
            begin += piece.count
        if not outcome.ready:
            return
        finite = outcome.scores.amax(dim=-1).isfinite().tolist()
        good = []
        for index, (number, is_finite) in enumerate(zip(outcome.ready, finite, strict=True)):
            row = pieces[number].row
            if not is_finite and not row.ended:
                logger.error("request %d: scores are not finite", row.request.id)
                row.fail(StageFailed("the model computed no finite scores for this request").info())
            if not row.ended:
                good.append(index)
        rows = [pieces[outcome.ready[index]].row for index in good]
        if len(good) == len(outcome.ready):
            self._sample(rows, outcome.scores, outcome.hidden)
        elif good:
            self._sample(rows, outcome.scores[good], outcome.hidden[good])

    def _sample(self, rows: Sequence[Row], scores: torch.Tensor, hidden: torch.Tensor) -> None:
        tokens = sample_rows(scores, [row.request.sampling for row in rows], [row.generator for row in rows]).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.output_ids.append(token)
            max_tokens = row.request.sampling.max_tokens
            if token in self.sampler.ending_ids(row):
                row.finish_reason = "stop"
            elif len(row.output_ids) == max_tokens or row.length + 1 >= self.max_length:
                row.finish_reason = "length"
        self._hand_over(rows, tokens, hidden)

    def _hand_over(self, rows: Sequence[Row], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        marks = [_mark(row) for row in rows]
        states = [None if row.generator is None else row.generator.get_state() for row in rows]
        try:
            self.program.sampled(rows, tokens, hidden)
        except Exception as error:
            failure = error
        else:
            return
        logger.warning("sampled() failed for %d rows (%s)", len(rows), type(failure).__name__)
        for index, row in enumerate(rows):
            if len(rows) == 1 or _mark(row) != marks[index]:
                fail_row(row, failure)
                continue
            state = states[index]
            if row.generator is not None and state is not None:
                row.generator.set_state(state)
            self._hand_over([row], [tokens[index]], hidden[index : index + 1])


def _next_inputs(piece: Piece) -> list[Inputs]:
    """The row's next `count` pending positions; nothing is taken out yet."""
    out, left = [], piece.count
    for inputs in piece.row.pending:
        if left <= 0:
            break
        out.append(_slice(inputs, 0, left))
        left -= out[-1].positions.shape[1]
    assert left == 0, "fewer pending positions than the row's length says"
    return out


def _drop_inputs(piece: Piece) -> None:
    """The row's next `count` pending positions are computed."""
    row, left = piece.row, piece.count
    row.computed += left
    while left:
        count = row.pending[0].positions.shape[1]
        if count > left:
            row.pending[0] = _slice(row.pending[0], left, count)
            return
        row.pending.pop(0)
        left -= count


def _slice(inputs: Inputs, begin: int, end: int) -> Inputs:
    return Inputs(
        positions=inputs.positions[:, begin:end],
        token_ids=None if inputs.token_ids is None else inputs.token_ids[begin:end],
        embeds=None if inputs.embeds is None else inputs.embeds[begin:end],
        deepstack=None if inputs.deepstack is None else inputs.deepstack[:, begin:end],
    )


def _mark(row: Row) -> tuple[int, int, bool]:
    """Changes when a program has emitted for the row, appended to it or ended it."""
    return len(row.outbox), row.length, row.ended
