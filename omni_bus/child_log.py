"""What one child process writes to stdout and stderr: the newest of it, in two files of bounded size."""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import BinaryIO

LIMIT = 4 << 20  # bytes that one of the two files may hold
CHECK_S = 2.0
BLOCK = 512  # bytes, of st_blocks


class ChildLog:
    """`path` takes what is written now, and `older` what was there before it grew beyond `limit` bytes.

    The process holds the file itself and not a pipe to its parent: a parent that is stopped must not stop its children. So nothing
    but `bound`, called every CHECK_S, holds the file to its size.
    """

    def __init__(self, path: pathlib.Path, limit: int = LIMIT) -> None:
        self.path = path
        self.older = path.with_name(f"{path.stem}.older{path.suffix}")
        self._limit = limit

    def open(self) -> BinaryIO:
        """For the process to write to. It appends, so that it goes on at the new end of a file that has been cut."""
        return self.path.open("ab")

    def bound(self) -> None:
        """Where `path` is beyond its limit, empty it; its last `limit` bytes are then `older`, instead of what that was.

        A line that is written in this moment may be lost, and on a disk that is full what was kept, too. Never raises for a disk that is full or a file that somebody has removed:
        a log is no reason to end a server.
        """
        with contextlib.suppress(OSError):
            found = os.stat(self.path)
            # What is written by a descriptor that does not append goes on where it was, behind a hole, which takes no room.
            if min(found.st_size, found.st_blocks * BLOCK) <= self._limit:
                return
            with self.path.open("r+b") as log:
                log.seek(-self._limit, os.SEEK_END)
                kept = log.read(self._limit)  # the process goes on writing
                log.truncate(0)  # first of all: it makes the room for `older` on a disk that is full
            self.older.write_bytes(kept)

    def tail(self, size: int) -> bytes:
        """The last bytes, of both files together."""
        newest = _tail(self.path, size)
        return _tail(self.older, size - len(newest)) + newest if len(newest) < size and self.older.exists() else newest


def _tail(path: pathlib.Path, size: int) -> bytes:
    """Nothing of a file that somebody has removed."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)
    return b""
