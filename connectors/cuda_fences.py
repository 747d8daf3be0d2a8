"""What cuda_ipc.py asks of its fences: a point on one process's stream for which another's, or either host, can look or wait."""

from __future__ import annotations

from typing import Protocol

HANDLE_BYTES = 64  # of a memory or event handle


class Fence(Protocol):
    """An event of one device that several processes may record and wait for. None of the calls blocks the host."""

    def record(self) -> None:
        """On the device's current stream. From here on `wait` and `over`, in every process, are about this record."""

    def wait(self) -> None:
        """What is put on the device's current stream from here on runs after the latest record."""

    def over(self) -> bool:
        """Whether the latest record has been reached, or there is none."""

    def handle(self) -> bytes:
        """With which another process opens it."""

    def force(self) -> None:
        """Record it on a stream on which nothing waits: sets free who waits for a record of a process that is dead."""


class Fences(Protocol):
    """The fences behind one control page, as one process has them."""

    def new(self) -> Fence:
        """By the page's owner. Raises Overloaded where there is none left."""

    def open(self, handle: bytes) -> Fence:
        """By a reader, whose owner has made it."""

    def retire(self, fence: Fence) -> None:
        """By the owner: whoever has recorded it is through, or dead, and nobody will record it again."""

    def close(self) -> None: ...
