"""One response: asked of the bus, told as it comes, cancelled at any moment, ended exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from omni_bus.api.bus import Item as BusItem
from omni_bus.api.bus import RequestStream
from omni_bus.api.errors_render import internal_error
from omni_bus.api.timing import AnswerTiming
from omni_bus.api.usage_so_far import UsageSoFar
from omni_bus.api.voice.answer import Answer, Enough
from omni_bus.api.voice.conversation import Conversation
from omni_bus.api.voice.deadline import Deadline
from omni_bus.api.voice.events import Reason, ResponseCreated, ResponseDone, ResponseState, ResponseStatus, Usage, snapshot
from omni_bus.api.voice.items import Item
from omni_bus.api.voice.outbox import Outbox
from omni_bus.api.voice.output import ResponseOutput
from omni_bus.api.voice.pacing import PlaybackClock
from omni_bus.api.voice.prompt import BusRequest, active_tools
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.settings import ResponseWish
from omni_bus.api.voice.speech import PacedSpeech
from omni_bus.api.voice.usage import usage_of
from omni_bus.errors import DeadlineExceeded, OmniBusError, PromptTooLong
from omni_bus.payloads import AudioDelta, InputTranscript, TextDelta

log = logging.getLogger("omni_bus.api")

ACKNOWLEDGE_S = 2.0  # for the stages to let go of a cancelled request; the broker goes on seeing to it


class ResponseOwner(Protocol):
    """Whoever has responses made: told of what concerns more than one response."""

    def on_first_output(self, run: ResponseRun) -> None:
        """Its first words, sound or call are about to leave."""

    def on_first_audio(self, run: ResponseRun) -> None: ...

    def on_heard(self, run: ResponseRun, index: int, text: str) -> None:
        """A recogniser heard this in the `index`-th of the request's audio parts."""

    def on_too_long(self, run: ResponseRun) -> BusRequest | None:
        """The model has no room for its prompt: a shorter one, if there is any."""

    def on_ended(self, run: ResponseRun) -> None:
        """Its end has been told; the request may still be on its way out of the stages."""


class ResponseRun:
    """`start` once; then it ends by itself, by `cancel` or by `drop`. What ends it and what is told of that are one step."""

    def __init__(
        self,
        wish: ResponseWish,
        request: BusRequest | None,
        *,
        arrived: Callable[[], Awaitable[BusRequest]],
        conversation: Conversation | None,
        conversation_id: str,
        clock: PlaybackClock,
        outbox: Outbox,
        services: VoiceServices,
        label: str,
        owner: ResponseOwner,
    ) -> None:
        """request: None where something of it is still on its way: `arrived` gives it then. conversation: None for an out-of-band response."""
        settings = wish.settings
        self.id = f"resp_{secrets.token_hex(12)}"
        self.request = request
        self._arrived = arrived
        self.status: ResponseStatus = "in_progress"
        self.wish = wish
        self._conversation_id = None if conversation is None else conversation_id
        self._clock = clock
        self._outbox = outbox
        self._services = services
        self._label = label
        self._owner = owner
        self._deadline = Deadline(services.config.deadline_s)
        self._output = ResponseOutput(self.id, conversation, speaks=settings.speaks, emit=outbox.put)
        speech = PacedSpeech(
            settings.output_format,
            settings.speed,
            min(services.config.voice_lead_s, settings.max_lead_s or math.inf),
            lead_s=clock.lead_s,
            tell=self._tell_audio,
            drained=outbox.drained,
            held_back=self._deadline.paused,
        )
        self._answer = Answer(
            self._output,
            speech if settings.speaks else None,
            may_call=bool(active_tools(settings)),
            begun=self._first_output,
            used=self._used,
        )
        self._stream: RequestStream | None = None
        self._length = False  # the text stage was stopped by its limit
        self._used_so_far = UsageSoFar(services.model.pipeline.text_stage)
        self._heard = 0
        self._had_output = self._had_audio = False
        self._timing = AnswerTiming(services.metrics, time.monotonic())
        self._cancelled_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- from outside

    @property
    def spoken_message(self) -> Item | None:
        """What is being said."""
        return self._output.message if self.wish.settings.speaks else None

    @property
    def heard_until(self) -> float:
        """When the client will have played what it was sent by now, in seconds of time.monotonic."""
        return self._clock.ends

    @property
    def calls(self) -> bool:
        """Whether it is complete and has called functions."""
        return self.status == "completed" and any(item.kind == "function_call" for item in self._output.items)

    def start(self) -> asyncio.Task[None]:
        """The task ends when nothing of the request is left in any stage."""
        self._outbox.put(ResponseCreated(self._state()))
        self._task = asyncio.create_task(self._run())
        return self._task

    def cancel(self, reason: Reason) -> None:
        """Nothing more of it is sent from now on, and every stage is told. Nothing to do for one that has ended."""
        if self.status == "in_progress":
            self._cancelled_at = time.monotonic()
            self._end("cancelled", reason)
            assert self._task is not None
            self._task.cancel()

    def drop(self) -> None:
        """The session is gone: as `cancel`, and nobody is told."""
        if self.status == "in_progress":
            self.status = "cancelled"
            self._answer.stop()
            self._services.metrics.response_ended("cancelled")
            assert self._task is not None
            self._task.cancel()

    # ---- the request

    async def _run(self) -> None:
        try:
            error = await self._ask()
            if self.status == "in_progress":
                self._finish(error)
        finally:
            if self._stream is not None:
                await self._let_go(self._stream)

    async def _ask(self) -> OmniBusError | None:
        """The request and its answer, with the oldest part of a conversation left out where the model has no room for all of it."""
        try:
            if self.request is None:
                self.request = await self._arrived()
        except OmniBusError as missing:
            return missing
        except Exception:
            log.exception("response %s could not be asked for inside the server", self.id)
            return internal_error()
        try:
            async with self._deadline.kept():
                while True:
                    error = await self._ask_once(self.request)
                    if not isinstance(error, PromptTooLong) or self._had_output:
                        return error
                    shorter = self._owner.on_too_long(self)
                    if shorter is None:
                        return error
                    self.request, self._heard = shorter, 0
        except TimeoutError:
            return DeadlineExceeded(f"not finished within {self._deadline.seconds:.3g} s, its pauses for playback not counted")

    async def _ask_once(self, request: BusRequest) -> OmniBusError | None:
        """The request and its answer, to the end of what is wanted of it; or what it failed by."""
        error: OmniBusError | None = None
        try:
            self._stream = await self._services.bus.submit(
                options=request.options,
                payload=request.payload,
                tensors=request.tensors,
                deadline_s=self._deadline.seconds + self._longest_pause_s,
                label=self._label,
            )
            for edge in self._services.audio_edges:
                self._stream.hold(edge)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._answer.speak())
                group.create_task(self._read(self._stream))
        except* Enough:
            pass
        except* OmniBusError as failed:
            error = _first(failed)
        except* Exception:
            log.exception("response %s failed inside the server", self.id)
            error = internal_error()
        return error

    async def _read(self, stream: RequestStream) -> None:
        async for item in stream:
            self._used_so_far.take(item)
            match item.payload:
                case TextDelta(text, token_ids, finish_reason):
                    if text:
                        self._timing.text(max(1, len(token_ids)))
                    self._length = self._length or finish_reason == "length"
                    self._answer.text(text, ended=finish_reason is not None)
                    await self._outbox.drained()
                case AudioDelta():
                    self._answer.audio(item)
                case InputTranscript(text):
                    if text or not item.last:
                        self._owner.on_heard(self, self._heard, text)
                        self._heard += 1
                case other:
                    raise TypeError(f"no client payload: {type(other).__name__}")
            self._answer.leave_if_enough()
        self._answer.end()

    async def _let_go(self, stream: RequestStream) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ACKNOWLEDGE_S):
                await stream.cancel()  # nothing to do for one that has ended
        if self._cancelled_at is not None:  # of one that is still held too: left out, the slowest would look like none
            self._services.metrics.cancel_acknowledged(time.monotonic() - self._cancelled_at)

    @property
    def _longest_pause_s(self) -> float:
        """For how long, at most, an answer's audio is held back in all: the session ends before."""
        return self._services.config.session_s if self.wish.settings.speaks else 0.0

    def _used(self, item: BusItem) -> None:
        if item.edge in self._services.audio_edges and not item.last and self._stream is not None:
            self._stream.consumed(item.edge)

    def _tell_audio(self, data: bytes, duration_ms: float, spoken: int | None) -> None:
        message = self._answer.sent(data, duration_ms, spoken)
        self._clock.sent(message.id, duration_ms, time.monotonic())
        self._timing.audio(duration_ms / 1000)
        if not self._had_audio:
            self._had_audio = True
            self._owner.on_first_audio(self)

    def _first_output(self) -> None:
        if not self._had_output:
            self._had_output = True
            self._owner.on_first_output(self)

    # ---- the end

    def _finish(self, error: OmniBusError | None) -> None:
        """By itself."""
        if error is not None:
            self._services.metrics.failed(error.code)
            self._end("failed", error=error)
            return
        if not self.wish.settings.speaks:
            self._timing.ended()  # a spoken answer lasts as long as it is paced to: that is no figure of the stages
        if self._length:
            self._end("incomplete", "max_output_tokens")
        else:
            self._end("completed")

    def _end(self, status: ResponseStatus, reason: Reason | None = None, *, error: OmniBusError | None = None) -> None:
        assert self.status == "in_progress"
        if self._output.message is not None and status == "completed":
            self._output.close_message("completed")
        self._output.break_off()
        self._answer.stop()
        self.status = status
        self._services.metrics.response_ended(status)
        counted: Mapping[str, Mapping[str, int]] = {} if self._stream is None else self._stream.usage
        usage = usage_of(self._used_so_far.of(counted), self._services.model.pipeline.text_stage)
        self._outbox.put(ResponseDone(self._state(reason, error, usage)))
        self._owner.on_ended(self)

    def _state(
        self, reason: Reason | None = None, error: OmniBusError | None = None, usage: Usage | None = None
    ) -> ResponseState:
        settings = self.wish.settings
        return ResponseState(
            id=self.id,
            status=self.status,
            reason=reason,
            error=error,
            output=tuple(snapshot(item) for item in self._output.items),
            conversation_id=self._conversation_id,
            speaks=settings.speaks,
            voice=settings.voice,
            output_format=settings.output_format,
            max_output_tokens=settings.max_output_tokens,
            metadata=self.wish.metadata,
            usage=usage,
        )


def _first(group: BaseExceptionGroup[OmniBusError]) -> OmniBusError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OmniBusError)
    return error
