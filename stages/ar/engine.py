"""One step of a batch: gather inputs → decoder → logits → sample → hand the tokens to the program. Each row's errors stay its own.

Rows are computed in one of two forms. Freely: any number of positions, with Python per row. Or, where the engine has StepGraphs, one
position a row as a step of fixed size; then the token of a prompt computed freely is drawn by such a step too. A step of fixed size
can be begun before its results are wanted: the device then works while the host sends what the step before gave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch

from omni_bus.errors import StageFailed
from omni_bus.stages import failures
from omni_bus.stages.ar.attention import PagedAttention, Span, upload
from omni_bus.stages.ar.blocks import BlockManager
from omni_bus.stages.ar.capture import Capture
from omni_bus.stages.ar.graphs import Drawn, Flight, StepGraphs
from omni_bus.stages.ar.program import Inputs, Program, Row, fail_row, isolated
from omni_bus.stages.ar.prompt_graphs import PromptGraphs
from omni_bus.stages.ar.sampler import Sampler, sample_rows
from omni_bus.stages.ar.scheduler import Piece

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """What a pass found, before anything of a row is changed. Tokens are `drawn`, or to be sampled from `scores`."""

    ready: list[int]  # pieces behind whose last position a token comes
    captured: torch.Tensor | None = None  # [tokens, hidden]
    hidden: torch.Tensor | None = None  # [ready, hidden], post-norm
    scores: torch.Tensor | None = None  # float32 [ready, vocab]
    drawn: Drawn | None = None


class Engine:
    def __init__(
        self,
        program: Program,
        attention: PagedAttention,
        sampler: Sampler,
        blocks: BlockManager,
        *,
        max_length: int,
    ) -> None:
        self.program = program
        self.attention = attention
        self.sampler = sampler
        self.blocks = blocks
        self.prompt_computed = 0  # prompt positions, in total
        self.prompt_cached = 0  # those that were taken from kept blocks instead
        self.max_length = max_length
        self.graphs: StepGraphs | None = None
        self.prompts: PromptGraphs | None = None
        parameter = next(program.decoder.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._step_was_last = False
        self._begun: tuple[Sequence[Piece], Flight] | None = None

    def use(
        self, graphs: StepGraphs, prompts: PromptGraphs | None, capture: Capture, progress: Callable[[float, str], None]
    ) -> None:
        """Compute steps, and prompts if wanted, with graphs, which are prepared here."""
        with self._on_device():
            if prompts is not None:
                prompts.prepare(capture, lambda fraction, what: progress(fraction / 2, what))
            graphs.prepare(capture, lambda fraction, what: progress(0.5 + fraction / 2, what))
        self.graphs, self.prompts = graphs, prompts

    @torch.no_grad()
    def admit(self, row: Row) -> None:
        """The row has got its slot and its blocks, of which those of its first `cached` positions are filled."""
        with self._on_device(), isolated(row):
            if self.graphs is not None:
                self.graphs.admit(row)
            if row.cached:
                self._take_kept(row)

    def _take_kept(self, row: Row) -> None:
        _drop_inputs(Piece(row, row.cached))
        self.prompt_cached += row.cached
        cache = self.attention.cache
        if cache.captured is not None:
            (slots,) = upload((cache.slots(row.blocks, row.cached),), self.device)
            self.program.computed(row, 0, cache.captured.index_select(0, slots))

    @torch.no_grad()
    def run(self, pieces: Sequence[Piece]) -> int:
        """Compute `pieces`, or those of one form: where some are rows of a step and some are not, the two forms take turns, so that
        what a step emits does not wait for a long prompt. Returns how many were computed."""
        with self._on_device():
            if self.graphs is None:
                self._run(pieces, self._forward)
                return len(pieces)
            steps: list[Piece] = []
            rest: list[Piece] = []
            for piece in pieces:
                (steps if self._is_step(piece) else rest).append(piece)
            self._step_was_last = bool(steps) and not (rest and self._step_was_last)
            if not self._step_was_last:
                self._run(rest, self._forward)
                return len(rest)
            for begin in range(0, len(steps), self.graphs.max_rows):
                self._run(steps[begin : begin + self.graphs.max_rows], self._step)
            return len(steps)

    @property
    def has_begun(self) -> bool:
        return self._begun is not None

    @torch.no_grad()
    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begin a step of `pieces`, if all are rows of one; `finish` gives what came of it, and is called before anything else here."""
        assert self._begun is None
        if self.graphs is None or len(pieces) > self.graphs.max_rows or not all(map(self._is_step, pieces)):
            return
        rows = [piece.row for piece in pieces]
        try:
            with self._on_device():
                self._begun = pieces, self.graphs.launch(rows, [row.pending[0] for row in rows])
        except Exception as error:
            failures.raise_if_device_is_lost(error)
            logger.warning(
                "a step of %d rows could not be begun (%s); it is tried in its turn", len(rows), type(error).__name__
            )
        self._step_was_last = True

    @torch.no_grad()
    def finish(self) -> int:
        """Wait for the step that was begun → how many rows it had that are still there."""
        assert self._begun is not None and self.graphs is not None
        pieces, flight = self._begun
        self._begun = None
        there = [index for index, piece in enumerate(pieces) if piece.row.slot]  # who has left meanwhile has none
        alive = [pieces[index] for index in there]
        with self._on_device():
            try:
                drawn = self.graphs.land(flight).of(there)
            except Exception as error:
                failures.raise_if_device_is_lost(error)
                self._each_alone(alive, self._step, error)
            else:
                self._commit(alive, _Outcome(list(range(len(alive))), drawn=drawn))
        return len(alive)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Kernels of ours are launched on the device that is current."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return contextlib.nullcontext()

    def _run(self, pieces: Sequence[Piece], form: Callable[[Sequence[Piece]], _Outcome]) -> None:
        """Where the batch fails, each row is tried alone: what a failed pass wrote into the cache is written again, and no generator
        has moved yet."""
        try:
            outcome = form(pieces)
        except Exception as error:
            failure = error
        else:
            self._commit(pieces, outcome)
            return
        if len(pieces) == 1:
            fail_row(pieces[0].row, failure)
            return
        self._each_alone(pieces, form, failure)

    def _each_alone(self, pieces: Sequence[Piece], form: Callable[[Sequence[Piece]], _Outcome], failure: Exception) -> None:
        logger.warning("a batch of %d rows failed (%s); trying each row alone", len(pieces), type(failure).__name__)
        for piece in pieces:
            self._run([piece], form)

    def _is_step(self, piece: Piece) -> bool:
        assert self.graphs is not None
        return piece.count == 1 and _is_ready(piece) and self.graphs.takes(piece.row, piece.row.pending[0])

    def _step(self, pieces: Sequence[Piece]) -> _Outcome:
        assert self.graphs is not None
        flight = self.graphs.launch([piece.row for piece in pieces], [piece.row.pending[0] for piece in pieces])
        return _Outcome(list(range(len(pieces))), drawn=self.graphs.land(flight))

    def _forward(self, pieces: Sequence[Piece]) -> _Outcome:
        inputs = [_next_inputs(piece) for piece in pieces]
        flat = [one for part in inputs for one in part]
        ready, last, end = [], [], 0
        for index, piece in enumerate(pieces):
            end += piece.count
            if _is_ready(piece):
                ready.append(index)
                last.append(end - 1)
        token_ids = [token for one in flat for token in one.token_ids or ()]
        tokens, where = upload((torch.tensor(token_ids, dtype=torch.int64), torch.tensor(last, dtype=torch.int64)), self.device)
        hidden, captured = self._decode(
            self._embeds(flat, tokens),
            torch.cat([one.positions for one in flat], dim=1),
            [Span(piece.row.blocks, piece.row.computed, piece.count, piece.row.slot) for piece in pieces],
            self._deepstack(flat),
        )
        if not ready:
            return _Outcome(ready, captured)
        newest, rows = hidden[where], [pieces[index].row for index in ready]
        if self.graphs is not None:
            return _Outcome(ready, captured, drawn=self.graphs.tail(rows, newest))
        return _Outcome(ready, captured, newest, self.sampler.process(self.program.logits(newest), rows))

    def _decode(
        self, embeds: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span], deepstack: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States, post-norm and captured, of packed spans: embeds [N, hidden] on the device, positions int64 [3, N] on the CPU."""
        if self.prompts is not None and self.prompts.takes(spans, deepstack):
            return self.prompts.run(embeds, positions, spans, deepstack)
        self.attention.plan(spans)
        (places,) = upload((positions.reshape(-1),), self.device)
        states: tuple[torch.Tensor, torch.Tensor | None] = self.program.decoder(
            embeds, places.view(3, -1), self.attention, deepstack=deepstack, capture_layer=self.program.capture_layer
        )
        self.attention.cache.capture(self.attention.slots, states[1])
        return states

    def _embeds(self, inputs: Sequence[Inputs], token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] of all inputs; the token ids among them, int64 [n], are embedded in one call."""
        if not len(token_ids):
            return torch.cat([one.embeds for one in inputs if one.embeds is not None]).to(self.device, self.dtype)
        embedded = self.program.embed(token_ids)
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
            row, start = piece.row, piece.row.computed
            _drop_inputs(piece)
            self._keep(row, start)
            if not row.output_ids:
                self.prompt_computed += piece.count
                with isolated(row):
                    if outcome.captured is not None:
                        self.program.computed(row, start, outcome.captured[begin : begin + piece.count])
                    if row.prompt_only and row.prompt_closed and row.computed == row.length:
                        self.program.prepared(row)
            begin += piece.count
        rows = [pieces[index].row for index in outcome.ready]
        if outcome.drawn is not None:
            self._take_drawn(rows, outcome.drawn)
        elif outcome.scores is not None and outcome.hidden is not None:
            good = self._finite(rows, outcome.scores.amax(dim=-1).isfinite().tolist())
            if len(good) == len(rows):
                self._sample(rows, outcome.scores, outcome.hidden)
            elif good:
                self._sample([rows[index] for index in good], outcome.scores[good], outcome.hidden[good])

    def _keep(self, row: Row, start: int) -> None:
        """Let others find the blocks that the positions from `start` on have filled."""
        if row.keys is not None:
            size = self.blocks.block_size
            for index in range(start // size, min(row.computed // size, len(row.keys.keys))):
                self.blocks.keep(row.blocks[index], row.keys.keys[index])

    def _finite(self, rows: Sequence[Row], finite: Sequence[bool]) -> list[int]:
        """Which rows go on: a row whose scores are not finite fails, and nobody shall find what they came from."""
        good = []
        for index, (row, is_finite) in enumerate(zip(rows, finite, strict=True)):
            if not is_finite and not row.ended:
                logger.error("request %d: scores are not finite", row.request.id)
                row.fail(StageFailed("the model computed no finite scores for this request").info())
                self.blocks.forget(row.blocks)
            if not row.ended:
                good.append(index)
        return good

    def _sample(self, rows: Sequence[Row], scores: torch.Tensor, hidden: torch.Tensor) -> None:
        tokens = sample_rows(scores, [row.request.sampling for row in rows], [row.generator for row in rows]).tolist()
        self._append(rows, tokens)
        self._hand_over(rows, tokens, hidden)

    def _take_drawn(self, rows: Sequence[Row], drawn: Drawn) -> None:
        """The tokens that a step drew; those of rows that must not end yet by an id of their own are sampled here."""
        good = self._finite(rows, drawn.finite)
        output = drawn.output
        if drawn.scores is not None:
            open_rows = [index for index in good if self._needs_scores(rows[index])]
            if open_rows:
                (where,) = upload((torch.tensor(open_rows, dtype=torch.int64),), self.device)
                some = [rows[index] for index in open_rows]
                scores = self.sampler.process(drawn.scores[where], some)
                fine = self._finite(some, scores.amax(dim=-1).isfinite().tolist())
                if fine:
                    some = [some[index] for index in fine]
                    params, generators = [row.request.sampling for row in some], [row.generator for row in some]
                    output[[open_rows[index] for index in fine], 0] = sample_rows(scores[fine], params, generators).cpu()
                good = [index for index in good if not rows[index].ended]
        if not good:
            return
        rows = [rows[index] for index in good]
        output = output if len(good) == len(output) else output[good]
        self._append(rows, output[:, 0].tolist())
        self._hand_over_drawn(rows, output)

    def _needs_scores(self, row: Row) -> bool:
        """The device knows the program's end tokens, not the request's."""
        params = row.request.sampling
        return bool(params.stop_token_ids and params.min_tokens and len(row.output_ids) < params.min_tokens)

    def _append(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        for row, token in zip(rows, tokens, strict=True):
            row.output_ids.append(token)
            max_tokens = row.request.sampling.max_tokens
            if token in self.sampler.ending_ids(row):
                row.finish_reason = "stop"
            elif len(row.output_ids) == max_tokens or row.length + 1 >= self.max_length:
                row.finish_reason = "length"

    def _hand_over(self, rows: Sequence[Row], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        states = [None if row.generator is None else row.generator.get_state() for row in rows]

        def again(index: int) -> None:
            row, state = rows[index], states[index]
            if row.generator is not None and state is not None:
                row.generator.set_state(state)
            self._hand_over([row], [tokens[index]], hidden[index : index + 1])

        _untouched_again(rows, lambda: self.program.sampled(rows, tokens, hidden), again)

    def _hand_over_drawn(self, rows: Sequence[Row], output: torch.Tensor) -> None:
        assert self.graphs is not None
        program = self.graphs.program
        _untouched_again(
            rows,
            lambda: program.graph_sampled(rows, output),
            lambda index: self._hand_over_drawn([rows[index]], output[index : index + 1]),
        )


def _untouched_again(rows: Sequence[Row], hand_over: Callable[[], None], again: Callable[[int], None]) -> None:
    """Hand over to the program; where that fails, `again` for each row alone that it has not touched, and fail the others."""
    marks = [_mark(row) for row in rows]
    try:
        hand_over()
    except Exception as error:
        failure = error
    else:
        return
    logger.warning("the program failed on the tokens of %d rows (%s)", len(rows), type(failure).__name__)
    for index, row in enumerate(rows):
        if len(rows) == 1 or _mark(row) != marks[index]:
            fail_row(row, failure)
        else:
            again(index)


def _is_ready(piece: Piece) -> bool:
    """Whether a token comes behind the piece."""
    row = piece.row
    return row.prompt_closed and row.computed + piece.count == row.length and not row.prompt_only


def _next_inputs(piece: Piece) -> list[Inputs]:
    """The row's next `count` pending positions, made where they are not there yet; nothing is taken out."""
    out, left = [], piece.count
    for inputs in piece.row.pending:
        if left <= 0:
            break
        out.append(_made(_slice(inputs, 0, left)))
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


def _made(inputs: Inputs) -> Inputs:
    if inputs.lazy is None:
        return inputs
    embeds, deepstack = inputs.lazy(inputs.first, inputs.first + inputs.positions.shape[1])
    return Inputs(positions=inputs.positions, embeds=embeds, deepstack=deepstack)


def _slice(inputs: Inputs, begin: int, end: int) -> Inputs:
    return Inputs(
        positions=inputs.positions[:, begin:end],
        token_ids=None if inputs.token_ids is None else inputs.token_ids[begin:end],
        embeds=None if inputs.embeds is None else inputs.embeds[begin:end],
        deepstack=None if inputs.deepstack is None else inputs.deepstack[:, begin:end],
        lazy=inputs.lazy,
        first=inputs.first + begin,
    )


def _mark(row: Row) -> tuple[int, int, bool]:
    """Changes when a program has emitted for the row, appended to it or ended it."""
    return len(row.outbox), row.length, row.ended
