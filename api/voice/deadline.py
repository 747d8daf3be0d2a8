"""A response's deadline: it counts what the stages, or a client that does not read, are late with; not what is held back for the ear."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Deadline:
    """`async with deadline.kept():` ends what runs inside, with TimeoutError, when `seconds` have passed that were not `paused`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._timeout: asyncio.Timeout | None = None

    def kept(self) -> asyncio.Timeout:
        """It begins when this is entered."""
        self._timeout = asyncio.timeout(self.seconds)
        return self._timeout

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time in this block is not counted. Not to be nested."""
        timeout, loop = self._timeout, asyncio.get_running_loop()
        if timeout is None or timeout.expired():
            yield
            return
        over = timeout.when()
        assert over is not None, "paused twice"
        left = over - loop.time()
        timeout.reschedule(None)
        try:
            yield
        finally:
            timeout.reschedule(loop.time() + left)
