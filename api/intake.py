"""How much of requests that are still being read may lie in memory at once: many large bodies are refused before they fill it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from omni_bus.errors import Overloaded

LIMIT_BYTES = 2**30  # of all bodies, fetched media and decoded audio together; one body always fits


class Intake:
    """The bytes held by all requests up to their submission."""

    def __init__(self, max_body_bytes: int) -> None:
        self.limit = max(LIMIT_BYTES, 4 * max_body_bytes)
        self.held = 0

    @contextlib.contextmanager
    def share(self) -> Iterator[IntakeShare]:
        """One request's part; given back at the end of the block."""
        share = IntakeShare(self)
        try:
            yield share
        finally:
            self.held -= share.held


class IntakeShare:
    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.held = 0

    def add(self, nbytes: int) -> None:
        """Raises Overloaded where that would be too much for all together."""
        if self._intake.held + nbytes > self._intake.limit:
            raise Overloaded("the server is reading too many large requests at once; try again")
        self.held += nbytes
        self._intake.held += nbytes
