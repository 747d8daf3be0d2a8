"""Work ahead of a turn: while the user still speaks, the stages are shown what the coming request will begin with.

Where the conversation is no other than at the last answer, they have its beginning already, and are asked for nothing.
A prepared request has no output. At most one is under way, and it goes as soon as the real one is ready: what it has done by then is
in the stages' caches, what it has not is done as if it had never been asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from omni_bus.api.voice.items import SAMPLE_RATE, Item
from omni_bus.api.voice.prompt import BusRequest
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.settings import SessionSettings
from omni_bus.errors import OmniBusError

log = logging.getLogger("omni_bus.api")

WINDOW = 8 * SAMPLE_RATE  # samples that an audio encoder reads apart from all others, from the turn's beginning
REACH = SAMPLE_RATE // 40  # samples behind a window that its last features are computed from too, and some to spare
DEADLINE_S = 30.0


class Preparer:
    """build: from how many samples of the turn are to be in it, the request; called only when it is about to be sent."""

    def __init__(self, services: VoiceServices, label: str, build: Callable[[int], BusRequest | None]) -> None:
        self._services = services
        self._label = label
        self._build = build
        self._wanted = -1  # samples of the turn that the stages should know
        self._asked = -1  # samples that they have been shown
        self._task: asyncio.Task[None] | None = None
        self._known: frozenset[str] = frozenset()  # items that the conversation's last answer was asked with
        self._known_settings: SessionSettings | None = None

    def answer_begins(self, items: Sequence[Item], settings: SessionSettings) -> None:
        """The turn is over; the conversation's answer is asked with these."""
        self.stop()
        self._known, self._known_settings = frozenset(item.id for item in items), settings

    def has_news(self, items: Sequence[Item], settings: SessionSettings) -> bool:
        """Whether the stages have anything to do for a conversation of these items. Not where they have answered it and all that is new
        are their own words; what they keep of a long one may have had to go since then."""
        known = self._known_settings
        if known is None or _head(known) != _head(settings) or not self._known <= {item.id for item in items}:
            return True
        if sum(item.audio_s for item in items) * SAMPLE_RATE >= WINDOW:
            return True
        return any(item.id not in self._known and item.role != "assistant" and item.kind != "function_call" for item in items)

    def heard(self, samples: int) -> None:
        """So much of the turn's audio is there now; 0 where it begins."""
        if not self._services.config.voice_prepare:
            return
        complete = max(0, samples - REACH) // WINDOW
        self._wanted = complete * WINDOW + REACH if complete else 0
        self._begin()

    def stop(self) -> None:
        """The turn is over."""
        self._wanted = self._asked = -1
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        task = self._task
        self.stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _ask(self) -> None:
        try:
            while self._wanted > self._asked:
                self._asked = self._wanted
                request = self._build(self._asked)
                if request is not None:
                    await self._one(request)
        except OmniBusError as error:  # the turn itself will meet it, and say so
            log.info("nothing was prepared: %s", error.code)
        except Exception:
            log.exception("a request ahead of its turn failed inside the server")

    def _begin(self) -> None:
        if self._wanted > self._asked and self._task is None:
            self._task = asyncio.create_task(self._ask())
            self._task.add_done_callback(self._ended)  # also of one that is cancelled before it has begun

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._begin()

    async def _one(self, request: BusRequest) -> None:
        stream = await self._services.bus.submit(
            options=request.options,
            payload=request.payload,
            tensors=request.tensors,
            deadline_s=DEADLINE_S,
            label=self._label,
        )
        try:
            async for _ in stream:
                pass  # a prepared request closes its edges, and says nothing
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stream.cancel()


def _head(settings: SessionSettings) -> tuple[object, ...]:
    """What every prompt begins with."""
    return settings.instructions, settings.tools, settings.tool_choice
