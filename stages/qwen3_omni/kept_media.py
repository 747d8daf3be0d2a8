"""What was made of media lately, by content and within a number of bytes: the one used longest ago goes first."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable
from typing import Generic, TypeVar

DIGEST_BYTES = 24  # 192 bits: nobody finds two media with one digest

MadeT = TypeVar("MadeT")


class KeptMedia(Generic[MadeT]):
    """Results that may be used again and are not written to. One that is larger than the whole is not kept."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._made: collections.OrderedDict[bytes, tuple[MadeT, int]] = collections.OrderedDict()

    def find(self, key: bytes) -> MadeT | None:
        if key not in self._made:
            return None
        self._made.move_to_end(key)
        return self._made[key][0]

    def keep(self, key: bytes, made: MadeT, size: int) -> None:
        """`size`: bytes that `made` holds."""
        if size > self.most_bytes or key in self._made:
            return
        self._made[key] = (made, size)
        self.bytes += size
        while self.bytes > self.most_bytes:
            self.bytes -= self._made.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._made)


def digest(kind: str, *parts: bytes | memoryview) -> bytes:
    """Of one kind of thing (up to 16 bytes), made of these parts. A cryptographic one: clients choose what is hashed."""
    made = hashlib.blake2b(digest_size=DIGEST_BYTES, person=kind.encode())
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


def row_contents(unit: bytes, rows: Iterable[int]) -> list[int]:
    """Below 2**256, and above every token id: what stands at the unit's rows, where `unit` is its digest."""
    base = int.from_bytes(unit, "big") << 32
    return [base | row for row in rows]
