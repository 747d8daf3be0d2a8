"""The seam between the engine and a model family: Row (one request in the engine) and Program (what the family adds).

A row is a growing list of input positions. The engine computes positions that are there and not yet computed (prefill in
bounded pieces, decode is a piece of one), and samples a token whenever a row whose prompt is closed has no uncomputed position
left. The program then appends the next input position: at once (a text model), or when a chunk brings what is missing (the
Talker waits for the Thinker's next token). A row with nothing to compute is simply not in the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch

from omni_bus.errors import ErrorInfo, OmniBusError
from omni_bus.stages import failures
from omni_bus.stages.contract import Chunk, Consumed, Emission, Finished, Output, StageContext, StageError, StageRequest

if TYPE_CHECKING:
    import msgspec

    from omni_bus.stages.ar.block_keys import BlockKeys
    from omni_bus.stages.ar.decoder import Decoder

logger = logging.getLogger(__name__)


class MakeRows(Protocol):
    """Rows of inputs that are made when they are about to be computed: what is found in kept blocks is never made."""

    def __call__(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`embeds` and `deepstack` of rows begin … end-1, as in Inputs. May be called again for the same rows, where a step failed.
        An exception fails the row's request."""


@dataclasses.dataclass(slots=True)
class Inputs:
    """Input positions not yet computed. Exactly one of token_ids, embeds and lazy is given.

    token_ids: [n] python ints; embeds: [n, hidden]; positions: int64 [3, n] (t, h, w; all equal for text);
    deepstack: [taps, n, hidden] added to the hidden states behind the first `taps` layers, or None.
    content: [n] python ints, 0 … 2**256 - 1, that stand for what is computed from, embeds and deepstack included: rows that begin
    with equal contents at equal positions share KV blocks. A token's is its id, which is also what token_ids without content
    mean; a media row's is a digest of the media's features (128 bits or more) and of the row's number. Embeds without content:
    this row shares nothing from here on. lazy: makes embeds and deepstack piece by piece; `first` is the number of its row that the
    first position takes. A program whose `graph_embed` gives one id different meanings must not begin with ids.
    """

    positions: torch.Tensor
    token_ids: Sequence[int] | None = None
    embeds: torch.Tensor | None = None
    deepstack: torch.Tensor | None = None
    content: Sequence[int] | None = None  # read when the inputs are appended
    lazy: MakeRows | None = None
    first: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """One request in the engine. The program reads and writes `data`, appends inputs and emits; the engine does the rest."""

    request: StageRequest
    generator: torch.Generator | None  # None = greedy; one per request and stage, seeded by sampling.seed or options.seed
    data: Any = None  # the program's own state of this request
    pending: list[Inputs] = dataclasses.field(default_factory=list)
    length: int = 0  # positions appended so far
    computed: int = 0  # positions in the KV cache
    next_position: int = 0  # the highest position on any axis + 1
    prompt_closed: bool = False
    prompt_only: bool = (
        False  # nothing is sampled behind the prompt: Program.prepared ends the row. Set before its prompt is closed
    )
    prompt_length: int | None = None  # of a prompt still open: the positions it will have, where that is known already
    penalty_ids: list[int] = dataclasses.field(default_factory=list)  # repetition penalty sees these and output_ids
    output_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None  # set by the engine before Program.sampled sees the last token
    outbox: list[Emission] = dataclasses.field(default_factory=list)
    ended: bool = False
    paused: bool = False
    blocks: list[int] = dataclasses.field(default_factory=list)  # KV block table
    keys: BlockKeys | None = None  # of the blocks' contents; None = the row neither takes kept blocks nor leaves any
    cached: int = 0  # positions at the row's beginning that were taken from kept blocks
    slot: int = 0  # 1 … max_batch while the row is admitted, its place in what a program keeps on the device; 0 = none
    seed: int = 0  # of draws that are made on the device, 0 … 2**63 - 1

    def append(self, inputs: Inputs) -> None:
        """More input positions, behind those already there."""
        if self.keys is not None:
            self.keys.extend(inputs.positions, inputs.token_ids if inputs.content is None else inputs.content)
        self._append(inputs, int(inputs.positions.max()) + 1)

    def append_text(self, *, token_ids: Sequence[int] | None = None, embeds: torch.Tensor | None = None) -> None:
        """The same with ordinary positions: one more than the last on all three axes."""
        count = len(token_ids) if token_ids is not None else int(embeds.shape[0])  # type: ignore[union-attr]
        begin, end = self.next_position, self.next_position + count
        positions = torch.full((3, 1), begin) if count == 1 else torch.arange(begin, end).expand(3, count)
        if self.keys is not None:
            if count == 1 and token_ids is not None:
                self.keys.extend_one(begin, token_ids[0])
            else:
                self.keys.extend(positions, token_ids)
        self._append(Inputs(positions=positions, token_ids=token_ids, embeds=embeds), end)

    def _append(self, inputs: Inputs, next_position: int) -> None:
        count = inputs.positions.shape[1]
        assert not self.ended and count > 0
        self.pending.append(inputs)
        self.length += count
        self.next_position = next_position

    def close_prompt(self) -> None:
        """The prompt is complete: from its last position on, tokens are sampled."""
        self.prompt_closed = True

    def emit(
        self, edge: str, payload: msgspec.Struct, tensors: Mapping[str, torch.Tensor] | None = None, *, last: bool = False
    ) -> None:
        """Send a chunk, if that output edge is open for this request."""
        if edge in self.request.outputs:
            self.outbox.append(Output(self.request.id, edge, payload, tensors or {}, last))

    def consume(self, edge: str, count: int = 1) -> None:
        """`count` chunks of an input edge have been used up."""
        self.outbox.append(Consumed(self.request.id, edge, count))

    def usage(self, figures: Mapping[str, int]) -> dict[str, int]:
        """The figures, and `cached_tokens` of a row that could share."""
        shares = self.keys is not None and not self.keys.empty
        return {**figures, "cached_tokens": self.cached} if shares else dict(figures)

    def finish(self, figures: Mapping[str, int]) -> None:
        """The request is done in this stage, and its usage are these figures; the engine frees its blocks."""
        self.outbox.append(Finished(self.request.id, self.usage(figures)))
        self.ended = True

    def fail(self, error: ErrorInfo) -> None:
        self.outbox.append(StageError(self.request.id, error))
        self.ended = True


def fail_row(row: Row, error: Exception) -> None:
    """Fail this row with `error`. What is not one of our own errors is logged with its traceback, and sent without its words.

    Raises `error` where no row can go on: the device is lost.
    """
    failures.raise_if_device_is_lost(error)
    if not isinstance(error, OmniBusError):
        logger.error("request %d failed in the model", row.request.id, exc_info=error)
    if not row.ended:
        row.fail(failures.for_client(error, "the model failed on this request; the server's log says why").info())


@contextlib.contextmanager
def isolated(row: Row) -> Iterator[None]:
    """What goes wrong inside fails this row and nothing else."""
    try:
        yield
    except Exception as error:
        fail_row(row, error)


class Program(Protocol):
    """What a model family adds to the engine. One instance per stage replica."""

    decoder: Decoder
    eos_ids: frozenset[int]
    suppressed_ids: torch.Tensor | None  # int64 [k]: ids whose logits become -inf
    capture_layer: int | None  # hand `computed` the hidden states before this layer's successor (HF's hidden_states[k])
    max_length: int  # positions a row may have, prompt and output

    def load(self, ctx: StageContext) -> None: ...

    def start(self, row: Row) -> None:
        """A request was opened. OmniBusError refuses it."""

    def feed(self, row: Row, chunk: Chunk) -> None:
        """A chunk came. Append inputs, close the prompt, `row.consume` what is used up. OmniBusError fails the request."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [n] → [n, hidden], for inputs given as token ids."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], post-norm → float32 [rows, vocab]."""

    def computed(self, row: Row, start: int, captured: torch.Tensor) -> None:
        """Prompt positions start … start+n-1 were computed, or taken from kept blocks; captured: [n, hidden] of `capture_layer`,
        valid during the call. Only called where that is set, and only for positions of the prompt."""

    def sampled(self, rows: Sequence[Row], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """One token each was sampled (already in row.output_ids; row.finish_reason says whether it was the last).

        hidden: [rows, hidden], post-norm, of the position it was sampled from. Emit, then append the next input or finish.
        Do what is batched first and touch each row inside `isolated(row)`: an exception that leaves this method makes the engine
        call it again for each untouched row alone, with the row's generator as it was, and fails the rows already touched.
        """

    def prepared(self, row: Row) -> None:
        """The prompt of a row with `prompt_only` is computed, and no token is sampled. Close every output edge that is open, with
        an empty last chunk for a request with options.prepare, and finish."""

    def release(self, row: Row) -> None:
        """The row is gone (done, failed or cancelled): free what the program holds for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What one step of B rows needs of each row, on the device, at the same addresses in every step.

    Rows that only fill the batch up have slot 0, which no request ever gets: what is written there is never used.
    """

    slots: torch.Tensor  # int64 [B]
    positions: torch.Tensor  # int64 [3, B]
    tokens: torch.Tensor  # int64 [B]: the row's next input id
    seeds: torch.Tensor  # int64 [B]
    draws: torch.Tensor  # int64 [B]: number of the row's next draw, that is of its output ids so far
    top_k: torch.Tensor  # int64 [B]; 0 = all
    temperature: torch.Tensor  # float32 [B]; 0 = greedy
    top_p: torch.Tensor  # float32 [B]
    penalty: torch.Tensor  # float32 [B]: repetition penalty, 1 = none
    no_eos: torch.Tensor  # bool [B]: too few output ids yet for an end token


@runtime_checkable
class GraphedProgram(Program, Protocol):
    """A program that also has a form without Python per row, which a CUDA graph can hold.

    Where the engine uses it, `graph_prepare` is called once, behind `load`. From then on `sampled` is not called but
    `graph_sampled`, and the row's next input after a token is one token id, whatever that is to `graph_embed`. The methods marked
    "captured" may not read anything back, nor depend on any value that is not in a tensor.
    """

    deepstack_taps: int  # of its inputs, at most; 0 = they have none

    def graph_prepare(self, max_batch: int) -> None:
        """Allocate what is kept on the device for slots 0 … max_batch."""

    def graph_reset(self, row: Row) -> None:
        """The row got its slot: clear what was kept there for another."""

    def graph_embed(self, step: StepTensors) -> torch.Tensor:
        """Captured: the inputs of step.tokens → [B, hidden]."""

    def graph_output(self, hidden: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Captured: [B, hidden], post-norm → (int64 [B, M], of which column 0 is the sampled token, and scores or None).

        Column 0 is then the highest score's, and the scores, float [B, vocab], are what the engine draws the rows from that want
        more than that (drawing.py). None = all rows are sampled, as `step` says.
        """

    def graph_sampled(self, rows: Sequence[Row], output: torch.Tensor) -> None:
        """As `sampled`; output: int64 [rows, M] on the host, what graph_output gave for each row."""
