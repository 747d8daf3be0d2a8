"""First-fit allocation of byte ranges with coalescing: which parts of a segment are free."""

from __future__ import annotations

import bisect


class FreeList:
    """Hands out ranges of `size` bytes. Low addresses go first, so that a segment's upper pages stay untouched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts = [0]  # of the free ranges, ascending; no two touch
        self._sizes = [size]
        self._taken: dict[int, int] = {}  # start → size

    @property
    def used(self) -> int:
        """Ranges handed out."""
        return len(self._taken)

    @property
    def free_bytes(self) -> int:
        return sum(self._sizes)

    def allocate(self, size: int) -> int | None:
        """The start of a range, or None where no free range is large enough."""
        assert size > 0
        for index, free in enumerate(self._sizes):
            if free >= size:
                start = self._starts[index]
                if free == size:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += size
                    self._sizes[index] -= size
                self._taken[start] = size
                return start
        return None

    def free(self, start: int) -> None:
        """Return a range. KeyError for one that is not out."""
        size = self._taken.pop(start)
        index = bisect.bisect(self._starts, start)
        if index < len(self._starts) and start + size == self._starts[index]:
            size += self._sizes[index]
            del self._starts[index], self._sizes[index]
        if index and self._starts[index - 1] + self._sizes[index - 1] == start:
            self._sizes[index - 1] += size
        else:
            self._starts.insert(index, start)
            self._sizes.insert(index, size)
