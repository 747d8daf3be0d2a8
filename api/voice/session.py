"""One voice session: a conversation, the user's audio and its turns, and at most one answer at a time, which a turn can interrupt.

Free of sockets and of any protocol's JSON. An endpoint calls a method for each thing that its client asks, and gets everything
that happens as typed events (events.py), in order, through its sink. What a client asks wrongly raises an OmniBusError and changes
nothing; what fails by itself is an event. Every method but `append_audio`, `drained` and `close` is one step: no other task sees half
of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time

import msgspec
import numpy
from numpy.typing import NDArray

from omni_bus.api.voice import events
from omni_bus.api.voice.conversation import Conversation, ConversationLimits
from omni_bus.api.voice.events import Reason, snapshot
from omni_bus.api.voice.formats import InputAudioDecoder
from omni_bus.api.voice.input_buffer import InputBuffer, to_ms, to_samples
from omni_bus.api.voice.items import SAMPLE_RATE, InputAudio, Item, new_item_id
from omni_bus.api.voice.outbox import Outbox, Sink
from omni_bus.api.voice.pacing import PlaybackClock
from omni_bus.api.voice.prepare import Preparer
from omni_bus.api.voice.prompt import BusRequest, build_request
from omni_bus.api.voice.response import ResponseRun
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.settings import ResponseWish, SessionSettings
from omni_bus.api.voice.transcription import Transcriber
from omni_bus.api.voice.turn_config import TurnDetection
from omni_bus.api.voice.turns import IdleTimeout, SpeechStarted, SpeechStopped, TurnDetector, TurnEvent
from omni_bus.api.voice.vad import Vad
from omni_bus.errors import InvalidRequest, ModelRefused, RateLimited

MIN_COMMIT = SAMPLE_RATE // 10  # samples: less than 0.1 s is not worth an item
DETECT = SAMPLE_RATE // 10  # samples looked at before other sessions get their turn
MAX_OUT_OF_BAND = 4  # responses beside the conversation's own
CLOSE_S = 3.0  # for the stages to let go of a closed session's requests


class ResponseRefused(InvalidRequest):
    """A response that cannot be begun or cancelled now; `code` says why, as OpenAI's error events do."""


@dataclasses.dataclass(slots=True)
class _Turn:
    """Speech of the user that has not ended. start: the position of its first sample."""

    item_id: str
    start: int


class VoiceSession:
    """`run` is its writer: a task of the endpoint, which ends with the sink's error. `close` when the client is gone."""

    def __init__(self, services: VoiceServices, settings: SessionSettings, sink: Sink, *, label: str = "") -> None:
        config = services.config
        self.id = f"sess_{secrets.token_hex(12)}"
        self.conversation_id = f"conv_{secrets.token_hex(12)}"
        self.settings = settings
        self.spoken = False  # audio has been given out: the voice stays as it is
        self._services = services
        self._label = label
        self._outbox = Outbox(sink)
        self._conversation = Conversation(
            ConversationLimits(max_audio_s=max(config.session_history_s, config.session_buffer_s)), evicted=self._evicted
        )
        self._clock = PlaybackClock()
        self._heard_ms: dict[str, float] = {}  # answers that were interrupted → how much of them can have been played
        self._decoder = InputAudioDecoder(settings.input_format)
        self._buffer = InputBuffer()
        self._turn: _Turn | None = None
        self._detector: TurnDetector | None = None
        self._run: ResponseRun | None = None  # the conversation's own response
        self._beside: set[ResponseRun] = set()
        self._turn_waits = False  # a turn has ended, and its answer waits for the one that is being given
        self._turn_over: float | None = None  # when the last turn ended, until its answer is first heard
        self._tasks: set[asyncio.Task[None]] = set()
        self._transcriber = Transcriber(services, self._outbox, label)
        self._preparer = Preparer(services, label, self._build_prepared)
        self._closed = False

    # ---- the way out

    def tell(self, event: events.SessionEvent) -> None:
        """An event of the endpoint's own, behind all that has been told."""
        self._outbox.put(event)

    async def run(self) -> None:
        """Hands events to the sink until cancelled; raises what the sink raises."""
        await self._outbox.run()

    async def drained(self) -> None:
        """Until the client has taken what was said to it: to be awaited before its next wish is read."""
        await self._outbox.drained()

    async def close(self) -> None:
        """Cancel all that is under way, and wait a little for the stages to let go. Nothing more is told."""
        self._closed = True
        self._outbox.close()
        for run in [self._run, *self._beside]:
            if run is not None:
                run.drop()
        await self._preparer.close()
        await self._transcriber.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        self._buffer.clear()
        self._turn = None

    # ---- settings

    async def configure(self, settings: SessionSettings) -> None:
        """Take these settings from now on. Raises InvalidRequest or ModelRefused, and keeps the old ones."""
        before = self.settings
        if self.spoken and settings.voice != before.voice:
            raise InvalidRequest(
                "session.audio.output.voice: the voice cannot be changed once it has been heard",
                param="session.audio.output.voice",
                code="cannot_update_voice",
            )
        if settings.turn_detection is not None and settings.turn_detection != before.turn_detection:
            await self._load_vad()
        if settings.input_format != before.input_format:
            self._buffer.push(self._decoder.flush())
            self._decoder = InputAudioDecoder(settings.input_format)
        if _detection(settings) != _detection(before):
            self._detector = None
            if settings.turn_detection is None and self._turn is not None:
                self._buffer.drop_before(self._turn.start)
            self._turn = None
        self.settings = settings

    async def _load_vad(self) -> Vad:
        if "audio" not in self._services.model.pipeline.input_kinds:
            raise ModelRefused("this model takes no audio", param="session.audio.input")
        return await asyncio.get_running_loop().run_in_executor(self._services.threads, Vad.load)

    # ---- the user's audio

    async def append_audio(self, data: bytes | bytearray | memoryview) -> None:
        """More of the user's audio, in the session's input format. Raises where it is refused; nothing of it is kept then."""
        config = self.settings.turn_detection
        if "audio" not in self._services.model.pipeline.input_kinds:
            raise ModelRefused("this model takes no audio", param="audio")
        most = to_samples(self._services.config.session_buffer_s * 1000)
        if config is not None and self._detector is None:
            self._detector = TurnDetector(config, await self._load_vad(), position=self._buffer.position)
        samples = self._decoder.push(data)
        if config is None:
            if len(self._buffer) + len(samples) > most:
                raise InvalidRequest(
                    f"audio: the buffer holds up to {self._services.config.session_buffer_s:g} s; commit or clear it",
                    param="audio",
                    code="input_audio_buffer_full",
                )
            self._buffer.push(samples)
            self._preparer.heard(len(self._buffer))
            return
        for start in range(0, len(samples), DETECT):
            if start:
                await asyncio.sleep(0)  # a long piece must not hold up other sessions
            if self._closed or self._detector is None:
                return
            self._detect(samples[start : start + DETECT].copy(), most)  # a view would keep the whole
            await self._outbox.drained()

    def _detect(self, samples: NDArray[numpy.float32], most: int) -> None:
        assert self._detector is not None
        self._buffer.push(samples)
        for event in self._detector.push(samples, playing=self._playing):
            self._on_turn(event)
        if self._turn is not None:
            if self._buffer.position - self._turn.start >= most:
                self._stop_turn(self._buffer.position)
                self._detector.reset()
            else:
                self._preparer.heard(self._buffer.position - self._turn.start)
        self._buffer.drop_before(to_samples(self._detector.needed_from_ms) if self._turn is None else self._turn.start)

    @property
    def _playing(self) -> bool:
        """An answer is being made, or heard by the user."""
        return self._run is not None or self._clock.lead_s(time.monotonic()) > 0

    def commit_audio(self) -> None:
        """What is in the buffer becomes an item. Raises InvalidRequest where there is less than 0.1 s."""
        self._buffer.push(self._decoder.flush())
        start = None if self._turn is None else self._turn.start
        samples = self._buffer.read(start)
        if len(samples) < MIN_COMMIT:
            raise InvalidRequest(
                f"the audio buffer holds {to_ms(len(samples))} ms; at least {to_ms(MIN_COMMIT)} ms can be committed",
                code="input_audio_buffer_commit_empty",
            )
        item_id = new_item_id() if self._turn is None else self._turn.item_id
        self._end_turn()
        self._buffer.clear()
        self._commit(item_id, samples, answer_follows=False)

    def clear_audio(self) -> None:
        self._decoder.flush()
        self._end_turn()
        self._buffer.clear()
        self._outbox.put(events.InputCleared())

    def _end_turn(self) -> None:
        self._turn = None
        self._preparer.stop()
        if self._detector is not None:
            self._detector.reset()

    def _on_turn(self, event: TurnEvent) -> None:
        match event:
            case SpeechStarted(start_ms):
                self._start_turn(start_ms)
            case SpeechStopped(end_ms):
                if self._turn is not None:
                    self._stop_turn(to_samples(end_ms))
            case IdleTimeout(start_ms, end_ms):
                item_id = new_item_id()
                self._outbox.put(events.UserIdle(item_id, start_ms, end_ms))
                samples = self._buffer.read(to_samples(start_ms), to_samples(end_ms))
                self._answer_turn(item_id, samples)

    def _start_turn(self, start_ms: int) -> None:
        detection = self.settings.turn_detection
        assert detection is not None
        self._turn = _Turn(new_item_id(), to_samples(start_ms))
        self._outbox.put(events.UserSpeechStarted(self._turn.item_id, start_ms))
        if detection.interrupt_response:
            self.interrupt("turn_detected")
        self._preparer.heard(0)

    def _stop_turn(self, end: int) -> None:
        turn, self._turn = self._turn, None
        assert turn is not None
        self._outbox.put(events.UserSpeechStopped(turn.item_id, to_ms(end)))
        self._answer_turn(turn.item_id, self._buffer.read(turn.start, end))

    def _answer_turn(self, item_id: str, samples: NDArray[numpy.float32]) -> None:
        detection = self.settings.turn_detection
        assert detection is not None
        self._turn_over = time.monotonic()
        self._preparer.stop()
        self._commit(item_id, samples, answer_follows=detection.create_response)
        if not detection.create_response:
            return
        if self._run is not None:
            self._turn_waits = True
        else:
            self._respond(ResponseWish(settings=self.settings))

    def _commit(self, item_id: str, samples: NDArray[numpy.float32], *, answer_follows: bool) -> None:
        item = Item.message("user", [InputAudio(samples)], item_id=item_id)
        previous = self._conversation.add(item)
        self._outbox.put(events.InputCommitted(item.id, previous))
        self._told_of(item, previous)
        if self.settings.transcription is not None:
            self._transcriber.add(item, self.settings.transcription, answer_follows=answer_follows and self._run is None)

    # ---- the conversation

    def add_item(self, item: Item, previous_item_id: str | None = None) -> None:
        """Raises ConversationError."""
        self._told_of(item, self._conversation.add(item, previous_item_id))

    def get_item(self, item_id: str) -> Item:
        """Raises ConversationError."""
        return self._conversation.get(item_id)

    def retrieve_item(self, item_id: str) -> None:
        """Raises ConversationError."""
        self._outbox.put(events.ItemRetrieved(snapshot(self._conversation.get(item_id))))

    def delete_item(self, item_id: str) -> None:
        """Raises ConversationError."""
        self._forget(self._conversation.delete(item_id))
        self._outbox.put(events.ItemDeleted(item_id))

    def truncate_item(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """The client has played so much of an answer, and no more. Raises ConversationError."""
        self._conversation.truncate(item_id, content_index, audio_end_ms)
        self._heard_ms.pop(item_id, None)  # the client knows better
        self._outbox.put(events.ItemTruncated(item_id, content_index, audio_end_ms))

    def _told_of(self, item: Item, previous: str | None) -> None:
        self._outbox.put(events.ItemAdded(snapshot(item), previous))
        self._outbox.put(events.ItemDone(snapshot(item), previous))

    def _evicted(self, item: Item) -> None:
        self._forget(item)
        self._outbox.put(events.ItemDeleted(item.id))

    def _forget(self, item: Item) -> None:
        self._heard_ms.pop(item.id, None)
        self._transcriber.forget(item)

    # ---- responses

    def create_response(self, wish: ResponseWish) -> None:
        """Raises ResponseRefused where the conversation has one already, or too many run beside it."""
        if wish.in_conversation and self._run is not None:
            raise ResponseRefused(
                "the conversation has an active response already; wait until it is done, or cancel it first",
                code="conversation_already_has_active_response",
            )
        if not wish.in_conversation and len(self._beside) >= MAX_OUT_OF_BAND:
            raise RateLimited(f"up to {MAX_OUT_OF_BAND} out-of-band responses run at a time", code="too_many_responses")
        self._respond(wish)

    def cancel_response(self, response_id: str | None = None) -> None:
        """The conversation's response, or the one of that id. Raises ResponseRefused where there is none."""
        run = self._run
        if response_id is not None:
            running = [found for found in (self._run, *self._beside) if found is not None]
            run = next((found for found in running if found.id == response_id), None)
        if run is None:
            raise ResponseRefused("there is no active response to cancel", code="response_cancel_not_active")
        message = run.spoken_message
        if message is not None:  # what was sent may be played to its end; what was not will never be
            self._heard_ms.setdefault(message.id, self._clock.sent_ms(message.id))
        run.cancel("client_cancelled")

    def clear_output(self) -> None:
        """The client has thrown away what it had not played: what is still being said is cancelled."""
        run = self._run
        self._outbox.put(events.OutputCleared(None if run is None else run.id))
        self.interrupt("client_cancelled")

    def interrupt(self, reason: Reason) -> None:
        """The user speaks, or wants silence: nothing more is said, and what was not heard does not count as said."""
        now = time.monotonic()
        unheard = self._clock.unheard(now)
        message = None if self._run is None else self._run.spoken_message
        if message is not None:
            unheard.setdefault(message.id, self._clock.sent_ms(message.id))
        for item_id, played_ms in unheard.items():
            if item_id in self._conversation:
                self._heard_ms[item_id] = min(played_ms, self._heard_ms.get(item_id, played_ms))
        self._clock.cleared(now)
        self._turn_waits = False
        if self._run is not None:
            self._services.metrics.interrupted()
            self._run.cancel(reason)

    def _respond(self, wish: ResponseWish) -> None:
        items = self._conversation.items if wish.input is None else wish.input
        request = build_request(items, wish.settings, self._services.model, heard_ms=self._heard_ms)
        run = ResponseRun(
            wish,
            request,
            conversation=self._conversation if wish.in_conversation else None,
            conversation_id=self.conversation_id,
            clock=self._clock if wish.in_conversation else PlaybackClock(),
            outbox=self._outbox,
            services=self._services,
            label=self._label,
            owner=self,
        )
        if wish.in_conversation:
            self._run = run
            self._turn_waits = False
            self._preparer.stop()
            self._transcriber.answer_begins()
        else:
            self._beside.add(run)
        task = run.start()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_first_output(self, run: ResponseRun) -> None:
        if run is self._run:
            self._transcriber.answer_has_begun()

    def on_first_audio(self, run: ResponseRun) -> None:
        self.spoken = True
        if run is self._run and self._turn_over is not None:
            self._services.metrics.turn_answered(time.monotonic() - self._turn_over)
            self._turn_over = None

    def on_heard(self, run: ResponseRun, index: int, text: str) -> None:
        if index < len(run.request.heard):
            item, part = run.request.heard[index]
            self._transcriber.heard(item, part, text)

    def on_ended(self, run: ResponseRun) -> None:
        if run is not self._run:
            self._beside.discard(run)
            return
        self._run = None
        self._transcriber.answer_has_begun()
        if self._turn_waits and not self._closed:
            self._respond(ResponseWish(settings=self.settings))

    # ---- ahead of a turn

    def _build_prepared(self, samples: int) -> BusRequest | None:
        """What the next response would be asked with, if the turn had ended after so many samples."""
        items = list(self._conversation.items)
        if samples:
            start = None if self._turn is None else self._turn.start
            spoken = self._buffer.read(start)[:samples]
            items.append(Item.message("user", [InputAudio(spoken)]))
        if not items:
            return None
        return build_request(items, self.settings, self._services.model, prepare=True, heard_ms=self._heard_ms)


def _detection(settings: SessionSettings) -> TurnDetection | None:
    """What a detector is made for: what is done when a turn begins or ends is no part of it."""
    detection = settings.turn_detection
    return detection and msgspec.structs.replace(detection, create_response=True, interrupt_response=True)
