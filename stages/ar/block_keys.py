"""Keys of a row's full KV blocks: equal keys mean equal contents, from the row's first position on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch

CONTENT_BYTES = 32  # of one position's content: a token id, or a digest
_POSITION_BYTES = 3 * 8 + CONTENT_BYTES


class BlockKeys:
    """The chain of one row: a block's key is the digest of its parent's key and of what stands at each of its positions. A
    cryptographic digest, since what is hashed comes from clients: nobody can make two contents with one key.

    Rotary positions are hashed too: the same pictures behind pictures of another size lie elsewhere.
    """

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * _POSITION_BYTES
        self._rest = bytearray()  # positions behind the last full block
        self._parent = b""
        self._ended = False
        self.keys: list[bytes] = []  # of the full blocks so far

    @property
    def empty(self) -> bool:
        """Whether no position's content is known."""
        return not self.keys and not self._rest

    def extend(self, positions: torch.Tensor, content: Sequence[int] | None) -> None:
        """The next positions: int64 [3, n] on the CPU, and n ints of 0 … 2**256 - 1, or None: no block from here on has a key."""
        if self._ended or content is None:
            self._ended = True
            return
        count = len(content)
        assert positions.shape == (3, count), "one content for each position"
        packed = np.empty((count, _POSITION_BYTES), np.uint8)
        packed[:, :24] = np.ascontiguousarray(positions.numpy().T, "<i8").view(np.uint8)
        joined = b"".join([one.to_bytes(CONTENT_BYTES, "little") for one in content])
        packed[:, 24:] = np.frombuffer(joined, np.uint8).reshape(count, CONTENT_BYTES)
        self._rest += packed.tobytes()
        self._hash()

    def extend_one(self, position: int, content: int) -> None:
        """The same for one position that is equal on all three axes."""
        if not self._ended:
            self._rest += struct.pack("<3q", position, position, position)
            self._rest += content.to_bytes(CONTENT_BYTES, "little")
            self._hash()

    def _hash(self) -> None:
        size, begin = self._block_bytes, 0
        while len(self._rest) - begin >= size:
            self._parent = hashlib.blake2b(self._parent + self._rest[begin : begin + size], digest_size=32).digest()
            self.keys.append(self._parent)
            begin += size
        del self._rest[:begin]
