"""The batch and chunk sizes that Code2Wav decodes. Imports no torch: the memory plan asks how much one step may hold."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

FRAMES = (1, 2, 4, 8, 12, 16, 25)
ROWS = (1, 2, 4, 8, 16, 32, 64)
# Rows times frames of one step on a GPU: as much as a few milliseconds take, so that a stream that has not begun to speak never
# waits long behind others that are far ahead; and few enough sizes to capture them all.
STEP_FRAMES = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Shapes:
    """frames: the sizes of a chunk; rows: the sizes of a batch, which is filled up to one of them. Both ascend, frames from 1."""

    frames: tuple[int, ...]
    rows: tuple[int, ...]
    first_frames: int  # the most that a stream's first chunk has; one of `frames`
    step_frames: int

    @classmethod
    def any_size(cls, *, max_batch: int, first_frames: int, max_frames: int) -> Shapes:
        """Where nothing is captured: every size up to the largest."""
        sizes = tuple(range(1, max_frames + 1))
        return cls(sizes, tuple(range(1, max_batch + 1)), first_frames, max_batch * max_frames)

    @classmethod
    def captured(cls, *, max_batch: int, first_frames: int, max_frames: int) -> Shapes:
        """A few dozen."""
        frames = {size for size in FRAMES if size < max_frames} | {first_frames, max_frames}
        most = min(max_batch, ROWS[-1])
        rows = {size for size in ROWS if size < most} | {most}
        return cls(tuple(sorted(frames)), tuple(sorted(rows)), first_frames, max(STEP_FRAMES, max_frames))

    def max_rows(self, frames: int) -> int:
        """Rows that a step of `frames` a row may have."""
        fitting = bisect.bisect_right(self.rows, self.step_frames // frames)
        return self.rows[max(0, fitting - 1)]

    def rows_for(self, count: int) -> int:
        """The batch that `count` rows run in."""
        return self.rows[bisect.bisect_left(self.rows, count)]

    def all(self) -> Iterator[tuple[int, int, bool]]:
        """(rows, frames, fresh) of every step there may be, the largest first."""
        for frames in reversed(self.frames):
            for rows in reversed(self.rows):
                if rows <= self.max_rows(frames):
                    yield rows, frames, False
                    if frames <= self.first_frames:
                        yield rows, frames, True
