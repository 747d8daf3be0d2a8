"""Which rows compute what in the next step.

A row waits until its worst case fits into the free KV blocks, which are then its own until it is gone: an admitted row always
runs to its end, so that rows can never block each other half way. Rows that are not ready are simply passed over. Blocks that hold
the beginning of its prompt already are shared, and take no room that another row does not hold.
"""

from __future__ import annotations

import dataclasses

from omni_bus.stages.ar.blocks import BlockManager
from omni_bus.stages.ar.program import Row


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The next `count` uncomputed positions of a row."""

    row: Row
    count: int


def _only_prepares(row: Row) -> bool:
    return row.request.options.prepare


def computable(row: Row) -> int:
    """Positions that can be computed now. The last one of a prompt is kept back while the prompt is open: what is sampled from it
    needs the prompt to be closed. Which one is the last is known of a prompt whose length is; else it may be the newest."""
    if row.paused or row.ended:
        return 0
    is_whole = row.prompt_length is None or row.length >= row.prompt_length
    kept_back = is_whole and not row.prompt_closed
    return max(0, row.length - row.computed - kept_back)


class Scheduler:
    """Two tables in order of arrival: `waiting` rows hold no blocks, `running` rows hold all they can ever need.

    Rows that only prepare (options.prepare) are nobody's answer: one is admitted, and computed, only where no other row has anything
    to compute. The exception is one that holds what another row waits for: to compute it is the quickest way to free that.

    With `whole_prompts` a prompt is cut only if it is longer than a step, not where it does not fit beside others: the next step
    begins with it.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch: int,
        max_prefill_tokens: int,
        max_length: int,
        whole_prompts: bool = False,
    ) -> None:
        assert blocks.needed(max_length) <= blocks.total
        self.blocks = blocks
        self.max_batch = max_batch
        self.max_prefill_tokens = max_prefill_tokens
        self.max_length = max_length
        self.whole_prompts = whole_prompts
        self.waiting: dict[int, Row] = {}
        self.running: dict[int, Row] = {}
        self._slots = list(range(max_batch, 0, -1))

    def add(self, row: Row) -> None:
        assert not row.blocks
        self.waiting[row.request.id] = row

    def remove(self, row: Row) -> None:
        """The row is gone; its blocks and its slot are free at once."""
        self.waiting.pop(row.request.id, None)
        self.running.pop(row.request.id, None)
        self.blocks.free(row.blocks)  # full ones are kept for others
        if row.slot:
            self._slots.append(row.slot)
            row.slot = 0

    def has_work(self) -> bool:
        """Whether `schedule` would find something."""
        return any(computable(row) for row in self.running.values()) or self.can_admit()

    def can_admit(self) -> bool:
        """Whether `admit` would find a row."""
        first = self._next_waiting()
        return first is not None and self._can_admit(first)

    @property
    def queued(self) -> int:
        """Positions of prompts that are still to be computed, those included that are known to come."""
        rows = (row for table in (self.waiting, self.running) for row in table.values() if not row.output_ids)
        return sum(max(row.length, row.prompt_length or 0) - row.computed for row in rows)

    def admit(self) -> list[Row]:
        """The waiting rows that fit now become running ones."""
        admitted = []
        while (row := self._next_waiting()) is not None and self._can_admit(row):
            self._admit(row)
            admitted.append(row)
        return admitted

    def schedule(self) -> list[Piece]:
        """Every decoding row, then prompts in pieces up to `max_prefill_tokens` together, oldest row first."""
        counts = [(row, count) for row in self.running.values() if (count := computable(row))]
        answers = [(row, count) for row, count in counts if not _only_prepares(row)]
        if 0 < len(answers) < len(counts) and not self._is_blocked():
            counts = answers
        pieces = [Piece(row, 1) for row, _ in counts if row.output_ids]
        budget = self.max_prefill_tokens
        for row, count in counts:
            if not row.output_ids and budget:
                if self.whole_prompts and budget < count <= self.max_prefill_tokens:
                    break
                pieces.append(Piece(row, min(count, budget)))
                budget -= pieces[-1].count
        return pieces

    def positions_needed(self, row: Row) -> int:
        """The most positions the row can come to; the last token of its output is never computed."""
        max_tokens = 1 if row.prompt_only else row.request.sampling.max_tokens
        prompt = row.length if row.prompt_closed else row.prompt_length
        if prompt is None or max_tokens is None:
            return self.max_length
        return min(self.max_length, prompt + max_tokens - 1)

    def _next_waiting(self) -> Row | None:
        first = None
        for row in self.waiting.values():
            if not computable(row):
                continue
            if not _only_prepares(row):
                return row
            first = first or row
        answers = (row for row in self.running.values() if not _only_prepares(row))
        return None if first is None or any(map(computable, answers)) else first

    def _is_blocked(self) -> bool:
        """Whether a row waits that may be waiting for one that only prepares."""
        first = self._next_waiting()
        return first is not None and not self._can_admit(first)

    def _can_admit(self, row: Row) -> bool:
        if len(self.running) >= self.max_batch:
            return False
        needed = self.blocks.needed(self.positions_needed(row))
        return self.blocks.can_allocate(needed) or self.blocks.can_allocate(needed, self._kept(row))

    def _kept(self, row: Row) -> list[int]:
        """Blocks that hold the beginning of the row, without its last position: what is sampled needs one that is computed. Behind
        a whole prompt that is only prepared nothing is sampled."""
        if row.keys is None or row.computed:
            return []
        end = row.length if _only_prepares(row) and row.prompt_closed else row.length - 1
        return self.blocks.find(row.keys.keys[: end // self.blocks.block_size])

    def _admit(self, row: Row) -> None:
        del self.waiting[row.request.id]
        self.running[row.request.id] = row
        kept = self._kept(row)
        row.blocks = self.blocks.allocate(self.blocks.needed(self.positions_needed(row)), kept)
        row.cached = len(kept) * self.blocks.block_size
        row.slot = self._slots.pop()
