"""Rows of a prompt that stand for media: encoded when they are about to be computed, part by part, each part once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from omni_bus.stages.qwen3_omni.kept_media import KeptMedia, row_contents


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """One part: rows [n, hidden] and, of pictures and videos, deepstack [taps, n, hidden]."""

    rows: torch.Tensor
    deepstack: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        return self.rows.nbytes + (0 if self.deepstack is None else self.deepstack.nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What an encoder computes by itself: its digest, and the rows of the prompt that it fills."""

    digest: bytes
    rows: int


class MediaRows:
    """One audio, picture or video of one request; `MakeRows` of its inputs.

    encode: numbers of parts → their results, in one call of the encoder. kept: what other requests have had encoded.
    """

    def __init__(
        self, parts: Sequence[Part], encode: Callable[[Sequence[int]], list[Encoded]], kept: KeptMedia[Encoded]
    ) -> None:
        self.parts = parts
        self.encoded = 0  # parts that were not found
        self._encode = encode
        self._kept = kept
        self._held: dict[int, Encoded] = {}  # parts that the next piece may need

    @property
    def count(self) -> int:
        return sum(part.rows for part in self.parts)

    def contents(self) -> list[int]:
        """What stands at each row, as Inputs.content says it."""
        return [content for part in self.parts for content in row_contents(part.digest, range(part.rows))]

    def __call__(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        wanted: dict[int, slice] = {}
        start = 0
        for number, part in enumerate(self.parts):
            if start < end and begin < start + part.rows:
                wanted[number] = slice(max(0, begin - start), min(part.rows, end - start))
            start += part.rows
        self._held = {number: held for number, held in self._held.items() if number in wanted}
        missing = []
        for number in wanted:
            found = self._held.get(number) or self._kept.find(self.parts[number].digest)
            if found is None:
                missing.append(number)
            else:
                self._held[number] = found
        if missing:
            for number, made in zip(missing, self._encode(missing), strict=True):
                assert len(made.rows) == self.parts[number].rows, "the encoder gave another number of rows than the prompt has"
                self._held[number] = made
                self._kept.keep(self.parts[number].digest, made, made.bytes)
            self.encoded += len(missing)
        rows = torch.cat([self._held[number].rows[inside] for number, inside in wanted.items()])
        taps = [(self._held[number].deepstack, inside) for number, inside in wanted.items()]
        deepstack = [tap[:, inside] for tap, inside in taps if tap is not None]
        return rows, torch.cat(deepstack, dim=1) if deepstack else None
