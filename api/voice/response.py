"""One response: asked of the bus, its text told at once, its audio no further ahead than it is played, and cancelled at any moment.

Text and audio of an answer are one stream of the bus. The text is read as it comes; audio waits here, unconsumed, until there is
room in the client's lead, so that credits hold the stages back. Where functions may be called, audio waits for text that is
no call: what has been said cannot be unsaid. Output items come one after the other: a call that follows words waits for their audio.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Protocol

from omni_bus.api.bus import Item as BusItem
from omni_bus.api.bus import RequestStream
from omni_bus.api.errors_render import internal_error
from omni_bus.api.timing import AnswerTiming
from omni_bus.api.voice.conversation import Conversation
from omni_bus.api.voice.events import Reason, ResponseCreated, ResponseDone, ResponseState, ResponseStatus, Usage, snapshot
from omni_bus.api.voice.formats import RATES, SAMPLE_BYTES, OutputAudioEncoder, duration_ms
from omni_bus.api.voice.items import Item
from omni_bus.api.voice.outbox import Outbox
from omni_bus.api.voice.output import ResponseOutput
from omni_bus.api.voice.pacing import PlaybackClock
from omni_bus.api.voice.prompt import BusRequest, active_tools
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.settings import ResponseWish
from omni_bus.api.voice.tool_calls import ArgumentsPiece, CallDone, CallNamed, CallStarted, Piece, TextPiece, ToolCallReader
from omni_bus.errors import OmniBusError
from omni_bus.payloads import AudioDelta, InputTranscript, TextDelta

log = logging.getLogger("omni_bus.api")

SLICE_S = 0.1  # of audio: once the lead is used up, it is sent in slices of so much
ACKNOWLEDGE_S = 2.0  # for the stages to let go of a cancelled request; the broker goes on seeing to it


class _Enough(Exception):
    """All of an answer has come that anybody wants."""


class ResponseOwner(Protocol):
    """Whoever has responses made: told of what concerns more than one response."""

    def on_first_output(self, run: ResponseRun) -> None:
        """Its first words, sound or call are about to leave."""

    def on_first_audio(self, run: ResponseRun) -> None: ...
    def on_heard(self, run: ResponseRun, index: int, text: str) -> None:
        """A recogniser heard this in the `index`-th of the request's audio parts."""

    def on_ended(self, run: ResponseRun) -> None:
        """Its response.done has been told; the request may still be on its way out of the stages."""


class ResponseRun:
    """`start` once; then it ends by itself or by `cancel`, exactly once, and tells its end as one step."""

    def __init__(
        self,
        wish: ResponseWish,
        request: BusRequest,
        *,
        conversation: Conversation | None,
        conversation_id: str,
        clock: PlaybackClock,
        outbox: Outbox,
        services: VoiceServices,
        label: str,
        owner: ResponseOwner,
    ) -> None:
        self.id = f"resp_{secrets.token_hex(12)}"
        self.request = request
        self.in_conversation = conversation is not None
        self.status: ResponseStatus = "in_progress"
        self._wish = wish
        self._settings = wish.settings
        self._conversation_id = conversation_id if self.in_conversation else None
        self._clock = clock
        self._outbox = outbox
        self._services = services
        self._label = label
        self._owner = owner
        self._output = ResponseOutput(self.id, conversation, speaks=self._settings.speaks, emit=outbox.put)
        self._reader = ToolCallReader() if active_tools(self._settings) else None
        self._blank = ""  # text of blanks only, which may stand before a call or before words
        self._later: list[Piece] = []  # what follows the open message once its audio is out
        self._speech_ends: int | None = None  # characters of the message's text before a call
        self._mute = not self._settings.speaks  # no more audio is sent
        self._audio: collections.deque[BusItem] = collections.deque()
        self._audio_ended = False
        self._text_ended = False
        self._more = asyncio.Event()  # audio, or leave to send it, or its end
        self._encoder: OutputAudioEncoder | None = None
        self._source_rate = 0
        self._length = False  # the text stage was stopped by its limit
        self._tokens = 0
        self._heard = 0
        self._had_output = self._had_audio = False
        self._timing = AnswerTiming(services.metrics, time.monotonic())
        self._cancelled_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- from outside

    @property
    def spoken_message(self) -> Item | None:
        """What is being said."""
        return self._output.message if self._settings.speaks else None

    def start(self) -> asyncio.Task[None]:
        """The task ends when nothing of the request is left in any stage."""
        self._outbox.put(ResponseCreated(self.state()))
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
            self._services.metrics.response_ended("cancelled")
            assert self._task is not None
            self._task.cancel()

    def state(
        self, reason: Reason | None = None, error: OmniBusError | None = None, usage: Usage | None = None
    ) -> ResponseState:
        settings = self._settings
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
            metadata=self._wish.metadata,
            usage=usage,
        )

    # ---- the request

    async def _run(self) -> None:
        error: OmniBusError | None = None
        stream: RequestStream | None = None
        try:
            stream = await self._services.bus.submit(
                options=self.request.options,
                payload=self.request.payload,
                tensors=self.request.tensors,
                deadline_s=self._services.config.deadline_s,
                label=self._label,
            )
            for edge in self._services.audio_edges:
                stream.hold(edge)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._speak(stream))
                group.create_task(self._read(stream))
        except* _Enough:
            pass
        except* OmniBusError as failed:
            error = _first(failed)
        except* Exception:
            log.exception("response %s failed inside the server", self.id)
            error = internal_error()
        finally:
            if stream is not None:
                await self._let_go(stream)
        if self.status != "in_progress":
            return
        if error is not None:
            self._services.metrics.failed(error.code)
            self._end("failed", error=error)
            return
        assert stream is not None
        if not self._settings.speaks:
            self._timing.ended()  # a spoken answer lasts as long as it is paced to: that is no figure of the stages
        if self._length:
            self._end("incomplete", "max_output_tokens", usage=stream.usage)
        else:
            self._end("completed", usage=stream.usage)

    async def _read(self, stream: RequestStream) -> None:
        async for item in stream:
            match item.payload:
                case TextDelta(text, token_ids, finish_reason):
                    self._tokens += len(token_ids)
                    if text:
                        self._timing.text(max(1, len(token_ids)))
                    self._length = self._length or finish_reason == "length"
                    self._on_text(text, ended=finish_reason is not None)
                    await self._outbox.drained()
                case AudioDelta():
                    if self._mute:
                        self._used(stream, item)
                    else:
                        self._audio.append(item)
                        self._more.set()
                case InputTranscript(text):
                    if text or not item.last:
                        self._owner.on_heard(self, self._heard, text)
                        self._heard += 1
                case other:
                    raise TypeError(f"no client payload: {type(other).__name__}")
            self._leave_early()
        if self._reader is not None and not self._text_ended:
            self._on_text("", ended=True)
        self._audio_ended = True
        self._more.set()

    def _leave_early(self) -> None:
        """Raises _Enough where all that is wanted has come, but the stages go on speaking: the calls of an answer."""
        if self._settings.speaks and self._mute and self._text_ended and not self._later:
            raise _Enough

    async def _let_go(self, stream: RequestStream) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ACKNOWLEDGE_S):
                await stream.cancel()  # nothing to do for one that has ended
                if self._cancelled_at is not None:
                    self._services.metrics.cancel_acknowledged(time.monotonic() - self._cancelled_at)

    def _used(self, stream: RequestStream, item: BusItem) -> None:
        if item.edge in self._services.audio_edges and not item.last:
            stream.consumed(item.edge)

    # ---- text

    def _on_text(self, text: str, *, ended: bool) -> None:
        if self._reader is None:
            pieces: list[Piece] = [TextPiece(text)] if text else []
        else:
            pieces = self._reader.feed(text) if text else []
            if ended and not self._text_ended:
                pieces += self._reader.end()
        self._text_ended = self._text_ended or ended
        for piece in pieces:
            self._on_piece(piece)

    def _on_piece(self, piece: Piece) -> None:
        if self._later:
            self._later.append(piece)
            return
        output = self._output
        match piece:
            case TextPiece(text):
                self._on_words(text)
            case CallStarted():
                self._blank = ""
                message = output.message
                if message is not None and not self._mute:
                    self._later.append(piece)
                    self._speech_ends = len(_transcript(message.content[0]))
                    self._more.set()
                    return
                if message is not None:
                    output.close_message("completed")
                self._mute = True
                self._more.set()
            case CallNamed(name):
                self._first_output()
                output.open_call(name)
            case ArgumentsPiece(text):
                output.arguments(text)
            case CallDone(name, arguments, ok):
                if output.call is None:
                    self._first_output()
                    output.open_call(name)
                output.close_call(arguments, "completed" if ok else "incomplete")

    def _on_words(self, text: str) -> None:
        if self._output.message is None:
            text = self._blank + text
            if self._reader is not None and not text.strip():
                self._blank = text
                return
            self._blank = ""
            self._first_output()
            self._output.open_message()
            self._more.set()
        self._output.text(text)

    def _first_output(self) -> None:
        if not self._had_output:
            self._had_output = True
            self._owner.on_first_output(self)

    # ---- audio

    async def _speak(self, stream: RequestStream) -> None:
        """Sends the audio that waits, paced; then whatever had to wait for it."""
        while True:
            while self._audio and self._may_speak:
                item = self._audio.popleft()
                if self._is_past_words(item):
                    self._mute = True
                if not self._mute:
                    await self._send(item)
                self._used(stream, item)
            if self._mute:
                while self._audio:
                    self._used(stream, self._audio.popleft())
                self._after_speech()
                self._leave_early()
            if self._audio_ended:
                break
            self._more.clear()
            await self._more.wait()
        if self._encoder is not None and not self._mute:
            await self._send_encoded(self._encoder.flush(), None)
        self._after_speech()

    @property
    def _may_speak(self) -> bool:
        return self._mute or self._reader is None or self._output.message is not None or self._audio_ended

    def _is_past_words(self, item: BusItem) -> bool:
        """Whether this chunk may speak of a call. A model that does not tell what it speaks of falls silent when a call begins."""
        if self._speech_ends is None or "pcm" not in item.tensors:
            return False
        assert isinstance(item.payload, AudioDelta)
        spoken = item.payload.spoken
        return spoken is None or spoken > self._speech_ends

    def _after_speech(self) -> None:
        """The open message has been spoken as far as it will be: close it, and go on with what came behind it."""
        if not self._later:
            return
        self._mute = True
        if self._output.message is not None:
            self._output.close_message("completed")
        later, self._later = self._later, []
        for piece in later:
            self._on_piece(piece)

    async def _send(self, item: BusItem) -> None:
        assert isinstance(item.payload, AudioDelta)
        if "pcm" not in item.tensors:
            return
        pcm, rate = item.tensors["pcm"].data, item.payload.sample_rate
        if self._encoder is None or rate != self._source_rate:
            self._encoder = OutputAudioEncoder(self._settings.output_format, rate, self._settings.speed)
            self._source_rate = rate
        await self._send_encoded(self._encoder.push(pcm), item.payload.spoken)

    async def _send_encoded(self, data: bytes, spoken: int | None) -> None:
        """In slices that fit into the lead: the first as large as fits, so that nothing waits that need not."""
        if not data:
            return
        form = self._settings.output_format
        whole = RATES[form] * SAMPLE_BYTES[form] / 1000  # bytes a millisecond
        start = 0
        while start < len(data):
            room_ms = (self._services.config.voice_lead_s - self._clock.lead_s(time.monotonic())) * 1000
            wanted_ms = min(SLICE_S * 1000, (len(data) - start) / whole)
            if room_ms < wanted_ms:
                await asyncio.sleep((wanted_ms - room_ms) / 1000)
                continue
            end = min(len(data), start + int(room_ms * whole) // SAMPLE_BYTES[form] * SAMPLE_BYTES[form])
            piece = data[start:end]
            start = end
            self._tell(piece, spoken if start == len(data) else None)
            await self._outbox.drained()

    def _tell(self, piece: bytes, spoken: int | None) -> None:
        if self._output.message is None:
            self._first_output()
            self._output.open_message()
        message = self._output.message
        assert message is not None
        length_ms = duration_ms(self._settings.output_format, len(piece))
        self._clock.sent(message.id, length_ms, time.monotonic())
        if not self._had_audio:
            self._had_audio = True
            self._owner.on_first_audio(self)
        self._timing.audio(length_ms / 1000)
        self._output.audio(piece, length_ms, spoken)

    # ---- the end

    def _end(
        self,
        status: ResponseStatus,
        reason: Reason | None = None,
        *,
        error: OmniBusError | None = None,
        usage: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        assert self.status == "in_progress"
        if self._output.message is not None and status == "completed":
            self._output.close_message("completed")
        self._output.break_off()
        self.status = status
        self._services.metrics.response_ended(status)
        self._outbox.put(ResponseDone(self.state(reason, error, self._usage(usage or {}))))
        self._owner.on_ended(self)

    def _usage(self, counted: Mapping[str, Mapping[str, int]]) -> Usage:
        """What the stages counted; of a response that did not end well, the tokens of text that came from it."""
        text_stage = self._services.model.pipeline.text_stage
        text = counted.get(text_stage)
        if text is None:
            return Usage(output_text=self._tokens)
        audio, image = text.get("audio_tokens", 0), text.get("image_tokens", 0)
        return Usage(
            input_text=max(0, text.get("prompt_tokens", 0) - audio - image),
            input_audio=audio,
            input_image=image,
            cached=text.get("cached_tokens", 0),
            output_text=text.get("completion_tokens", 0),
            output_audio=max(
                (figures.get("frames", 0) for stage, figures in counted.items() if stage != text_stage), default=0
            ),
        )


def _transcript(part: object) -> str:
    return getattr(part, "transcript", "")


def _first(group: BaseExceptionGroup[OmniBusError]) -> OmniBusError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OmniBusError)
    return error
