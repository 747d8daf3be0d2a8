"""Which KV blocks are free, and which hold what. Numbers only; the tensors are in kv_cache.py."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockManager:
    """Hands out blocks 1 … total; block 0 is the cache's null block.

    A full block may be named by the key of its content (`keep`). Whoever holds it, and after its last holder has gone, other rows
    find it by that key and share it, until it is handed out to be written again. Free blocks without a key are handed out first: the
    one used last before the others, and of a freed row its first block, so that blocks no row ever filled stay untouched memory.
    Then kept ones, least recently used first, and of a row its last block first, for what stands behind it is of no use without it.
    """

    def __init__(self, total: int, block_size: int) -> None:
        assert total > 0 and block_size > 0
        self.total = total
        self.block_size = block_size
        self._free = list(range(total, 0, -1))  # without a key
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, with a key; the next to go comes first
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def used(self) -> int:
        """Blocks that rows hold. A kept block that nobody holds is free."""
        return len(self._holders)

    def needed(self, positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-positions // self.block_size)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks that hold the contents of `keys`, up to the first one that none holds."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Whether there are `count` blocks, of which `shared` were found by their keys."""
        taken = sum(block not in self._holders for block in shared)
        return count - len(shared) <= len(self._free) + len(self._kept) - taken

    def allocate(self, count: int, shared: Sequence[int] = ()) -> list[int]:
        """`shared` and as many new ones as make `count`. What is shared may be read only."""
        assert self.can_allocate(count, shared)
        for block in shared:
            self._kept.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
        blocks = [self._next() for _ in range(count - len(shared))]
        self._holders.update(dict.fromkeys(blocks, 1))
        return [*shared, *blocks]

    def keep(self, block: int, key: bytes) -> None:
        """A block that is held now holds the content of `key`, and is not written any more. If another one does already, that one
        stays the one that is found, and counts as used just now."""
        assert block in self._holders, "a block that nobody holds"
        other = self._block_of.setdefault(key, block)
        if other == block:
            assert self._key_of.setdefault(block, key) == key, "a block with another content"
        elif other in self._kept:
            self._kept.move_to_end(other)

    def forget(self, blocks: Sequence[int]) -> None:
        """Nobody finds these any more; who holds them goes on."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                if block in self._kept:
                    del self._kept[block]
                    self._free.append(block)

    def free(self, blocks: list[int]) -> None:
        """One holder gives `blocks` back, and the list is emptied."""
        assert self._holders.keys() >= set(blocks), "a block that nobody holds"
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._free.append(block)
        blocks.clear()

    def _next(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._kept.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
