"""Which KV blocks are free. Numbers only; the tensors are in kv_cache.py."""

from __future__ import annotations


class BlockManager:
    """Hands out blocks 1 … total; block 0 is the cache's null block. The block used last is handed out first, and of a freed row
    its first block, so that blocks no row ever filled stay untouched memory."""

    def __init__(self, total: int, block_size: int) -> None:
        assert total > 0 and block_size > 0
        self.total = total
        self.block_size = block_size
        self._free = list(range(total, 0, -1))
        self._used: set[int] = set()

    @property
    def used(self) -> int:
        return len(self._used)

    def needed(self, positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-positions // self.block_size)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        assert self.can_allocate(count)
        blocks = [self._free.pop() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Take back `blocks`, and empty the list."""
        assert self._used.issuperset(blocks), "a block that nobody holds"
        self._used.difference_update(blocks)
        self._free.extend(reversed(blocks))
        blocks.clear()
