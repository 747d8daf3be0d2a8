"""Which responses a session runs: at most one of the conversation's own, a few beside it, and what they mean for the rest of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from omni_bus.api.voice.arrivals import Arrivals
from omni_bus.api.voice.events import Reason
from omni_bus.api.voice.history import History
from omni_bus.api.voice.items import Item
from omni_bus.api.voice.outbox import Outbox
from omni_bus.api.voice.pacing import PlaybackClock
from omni_bus.api.voice.prepare import Preparer
from omni_bus.api.voice.prompt import BusRequest, build_request
from omni_bus.api.voice.response import ResponseRun
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.settings import ResponseWish
from omni_bus.api.voice.transcription import Transcriber
from omni_bus.errors import InvalidRequest, RateLimited

MAX_OUT_OF_BAND = 4  # responses beside the conversation's own
MAX_LEAVING = 8  # responses that have ended, and that stages have not let go of
CLOSE_S = 3.0  # for the stages to let go of a closed session's requests


class ResponseRefused(InvalidRequest):
    """A response that cannot be begun or cancelled now; `code` says why, as OpenAI's error events do."""


class Responses:
    """ended: called when the conversation's own response has. turn_over: when the turn ended that is still to be answered."""

    def __init__(
        self,
        services: VoiceServices,
        outbox: Outbox,
        history: History,
        arrivals: Arrivals,
        transcriber: Transcriber,
        preparer: Preparer,
        *,
        conversation_id: str,
        label: str,
        ended: Callable[[], None],
    ) -> None:
        self.own: ResponseRun | None = None
        self.spoken = False  # audio has been given out: the voice stays as it is
        self.turn_over: float | None = None
        self._services = services
        self._outbox = outbox
        self._history = history
        self._arrivals = arrivals
        self._transcriber = transcriber
        self._preparer = preparer
        self._conversation_id = conversation_id
        self._label = label
        self._ended = ended
        self._beside: set[ResponseRun] = set()
        self._beside_heard_until = 0.0  # of those that have ended
        self._tasks: set[asyncio.Task[None]] = set()  # of what runs, and of what the stages have yet to let go of

    @property
    def running(self) -> bool:
        return self.own is not None or bool(self._beside)

    @property
    def heard_until(self) -> float:
        """When the client will have played what it was sent of responses that have ended, in seconds of time.monotonic."""
        return max(self._history.clock.ends, self._beside_heard_until)

    def create(self, wish: ResponseWish) -> None:
        """Raises ResponseRefused where the conversation has one already, RateLimited where too many run beside it."""
        if wish.in_conversation and self.own is not None:
            raise ResponseRefused(
                "the conversation has an active response already; wait until it is done, or cancel it first",
                code="conversation_already_has_active_response",
            )
        if not wish.in_conversation and len(self._beside) >= MAX_OUT_OF_BAND:
            raise RateLimited(f"up to {MAX_OUT_OF_BAND} out-of-band responses run at a time", code="too_many_responses")
        self.begin(wish)

    def begin(self, wish: ResponseWish) -> None:
        items = self._history.items if wish.input is None else list(wish.input)
        missing = wish.fetch is not None or any(item in self._arrivals for item in items)
        run = ResponseRun(
            wish,
            None if missing else self._request(wish, items),
            arrived=lambda: self._arrived(wish, items),
            conversation=self._history.conversation if wish.in_conversation else None,
            conversation_id=self._conversation_id,
            clock=self._history.clock if wish.in_conversation else PlaybackClock(),
            outbox=self._outbox,
            services=self._services,
            label=self._label,
            owner=self,
        )
        if wish.in_conversation:
            self.own = run
            self._preparer.answer_begins(items, wish.settings)
            self._transcriber.answer_begins()
        else:
            self._beside.add(run)
        task = run.start()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, response_id: str | None) -> None:
        """The conversation's own, or the one of that id. Raises ResponseRefused where there is none."""
        run = self.own
        if response_id is not None:
            running = [found for found in (self.own, *self._beside) if found is not None]
            run = next((found for found in running if found.id == response_id), None)
        if run is None:
            raise ResponseRefused("Cancellation failed: there is no active response", code="response_cancel_not_active")
        message = run.spoken_message
        if message is not None:
            self._history.ended_early(message.id)
        run.cancel("client_cancelled")

    @property
    def speaking(self) -> Item | None:
        """What the conversation's own response says aloud."""
        return None if self.own is None else self.own.spoken_message

    def interrupt(self, reason: Reason) -> None:
        """The conversation's own, if there is one."""
        if self.own is not None:
            self._services.metrics.interrupted()
            self.own.cancel(reason)

    async def settled(self) -> None:
        """Until no more have ended than stages may still be letting go of: each of these holds its whole prompt."""
        while len(self._tasks) > MAX_LEAVING + len(self._beside) + (self.own is not None):
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def drop(self) -> None:
        """The session is gone: all of them end, and nobody is told."""
        for run in [self.own, *self._beside]:
            if run is not None:
                run.drop()

    async def close(self) -> None:
        """Until the stages have let go of what was dropped, but not for long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    async def _arrived(self, wish: ResponseWish, items: list[Item]) -> BusRequest:
        """Made of these items, once they are whole; those of the conversation that are gone by then are left out."""
        await self._arrivals.have_ended(items)
        if wish.fetch is not None:
            await self._arrivals.in_turn(wish.fetch)
        if wish.input is None:
            kept = set(self._history.items)
            items = [item for item in items if item in kept]
        return self._request(wish, items)

    def _request(self, wish: ResponseWish, items: Sequence[Item]) -> BusRequest:
        return build_request(
            items, wish.settings, self._services.model, heard_ms=self._history.heard_ms, affinity=self._conversation_id
        )

    # ---- told by a response (ResponseOwner)

    def on_too_long(self, run: ResponseRun) -> BusRequest | None:
        if run.wish.input is not None or not self._history.leave_out_older_half():
            return None
        return self._request(run.wish, self._history.items)

    def on_first_output(self, run: ResponseRun) -> None:
        if run is self.own and not run.wish.settings.speaks:
            self._transcriber.answer_has_begun()

    def on_first_audio(self, run: ResponseRun) -> None:
        self.spoken = True
        if run is self.own:
            self._transcriber.answer_has_begun()
        if run is self.own and self.turn_over is not None:
            self._services.metrics.turn_answered(time.monotonic() - self.turn_over)
            self.turn_over = None

    def on_heard(self, run: ResponseRun, index: int, text: str) -> None:
        if run.request is not None and index < len(run.request.heard):
            item, part = run.request.heard[index]
            self._transcriber.heard(item, part, text)

    def on_ended(self, run: ResponseRun) -> None:
        if run is not self.own:
            self._beside.discard(run)
            self._beside_heard_until = max(self._beside_heard_until, run.heard_until)
            return
        self.own = None
        if not run.calls:  # else the client answers them, and what is said then answers the turn
            self.turn_over = None
        self._transcriber.answer_has_begun()
        self._ended()
