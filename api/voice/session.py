"""One voice session: a conversation, the user's turns, and at most one answer at a time, which a turn can interrupt.

Free of sockets and of any protocol's JSON. An endpoint calls a method for each thing that its client asks, and gets everything
that happens as typed events (events.py), in order, through its sink. What a client asks wrongly raises an OmniBusError and changes
nothing; what fails by itself is an event. Every method that is no coroutine is one step: no other task sees half of it.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from omni_bus.api.voice import events
from omni_bus.api.voice.conversation import Conversation, ConversationLimits
from omni_bus.api.voice.events import Reason, SessionEvent, snapshot
from omni_bus.api.voice.items import InputAudio, Item
from omni_bus.api.voice.outbox import Outbox, Sink
from omni_bus.api.voice.pacing import PlaybackClock
from omni_bus.api.voice.prepare import Preparer
from omni_bus.api.voice.prompt import BusRequest, build_request
from omni_bus.api.voice.response import ResponseRun
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.settings import ResponseWish, SessionSettings
from omni_bus.api.voice.transcription import Transcriber
from omni_bus.api.voice.user_audio import Samples, UserAudio
from omni_bus.errors import InvalidRequest, RateLimited

MAX_OUT_OF_BAND = 4  # responses beside the conversation's own
CLOSE_S = 3.0  # for the stages to let go of a closed session's requests


class ResponseRefused(InvalidRequest):
    """A response that cannot be begun or cancelled now; `code` says why, as OpenAI's error events do."""


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
        limits = ConversationLimits(max_audio_s=max(config.session_history_s, config.session_buffer_s))
        self._conversation = Conversation(limits, evicted=self._evicted)
        self._audio = UserAudio(services, self._outbox, self, settings.input_format, settings.turn_detection)
        self._clock = PlaybackClock()
        self._left_out: set[str] = set()  # items that no prompt has any more: the model had no room for them
        self._heard_ms: dict[str, float] = {}  # answers that were cut short → how much of them can have been played
        self._run: ResponseRun | None = None  # the conversation's own response
        self._beside: set[ResponseRun] = set()
        self._turn_waits = False  # a turn has ended, and its answer waits for the one that is being given
        self._turn_over: float | None = None  # when the last turn ended, until its answer is first heard
        self._tasks: set[asyncio.Task[None]] = set()
        self._transcriber = Transcriber(services, self._outbox, label)
        self._preparer = Preparer(services, label, self._build_prepared)
        self._closed = False

    # ---- the way out

    def tell(self, event: SessionEvent) -> None:
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
        self._audio.close()
        for run in [self._run, *self._beside]:
            if run is not None:
                run.drop()
        await asyncio.gather(self._preparer.close(), self._transcriber.close())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    # ---- settings

    async def configure(self, settings: SessionSettings) -> None:
        """Take these settings from now on. Raises InvalidRequest or ModelRefused, and keeps the old ones."""
        if self.spoken and settings.voice != self.settings.voice:
            raise InvalidRequest(
                "session.audio.output.voice: the voice cannot be changed once it has been heard",
                param="session.audio.output.voice",
                code="cannot_update_voice",
            )
        await self._audio.configure(settings.input_format, settings.turn_detection)
        self.settings = settings

    # ---- the user's audio

    async def append_audio(self, data: bytes | bytearray | memoryview) -> None:
        """More of the user's audio, in the session's input format. Raises InvalidRequest or ModelRefused; nothing is kept then."""
        await self._audio.append(data)

    def commit_audio(self) -> None:
        """What is in the buffer becomes an item. Raises InvalidRequest where there is less than 0.1 s."""
        item_id, samples = self._audio.commit()
        self._preparer.stop()
        self._commit(item_id, samples, answer_follows=False)

    def end_turn(self) -> None:
        """The user has finished: what is in the buffer becomes an item and is answered, in place of an answer that is still being
        given. Raises InvalidRequest where there is less than 0.1 s."""
        item_id, samples = self._audio.commit()
        self.interrupt("client_cancelled")
        self._take_turn(item_id, samples, answered=True)

    def clear_audio(self) -> None:
        self._audio.clear()
        self._preparer.stop()
        self._outbox.put(events.InputCleared())

    @property
    def playing(self) -> bool:
        """An answer is being made, or heard by the user."""
        return self._run is not None or self._clock.lead_s(time.monotonic()) > 0

    def on_speech_started(self, item_id: str, start_ms: int) -> None:
        self._outbox.put(events.UserSpeechStarted(item_id, start_ms))
        detection = self.settings.turn_detection
        if detection is not None and detection.interrupt_response:
            self.interrupt("turn_detected")

    def on_speech(self, samples: int) -> None:
        self._preparer.heard(samples)

    def on_speech_stopped(self, item_id: str, end_ms: int, samples: Samples) -> None:
        self._outbox.put(events.UserSpeechStopped(item_id, end_ms))
        self._answer_turn(item_id, samples)

    def on_idle(self, item_id: str, start_ms: int, end_ms: int, samples: Samples) -> None:
        self._outbox.put(events.UserIdle(item_id, start_ms, end_ms))
        self._answer_turn(item_id, samples)

    def _answer_turn(self, item_id: str, samples: Samples) -> None:
        detection = self.settings.turn_detection
        self._take_turn(item_id, samples, answered=detection is not None and detection.create_response)

    def _take_turn(self, item_id: str, samples: Samples, *, answered: bool) -> None:
        self._turn_over = time.monotonic() if answered else None
        self._preparer.stop()
        self._commit(item_id, samples, answer_follows=answered and self._run is None)
        if answered and self._run is not None:
            self._turn_waits = True
        elif answered:
            self._respond(ResponseWish(settings=self.settings))

    def _commit(self, item_id: str, samples: Samples, *, answer_follows: bool) -> None:
        item = Item.message("user", [InputAudio(samples)], item_id=item_id)
        previous = self._conversation.add(item)
        self._outbox.put(events.InputCommitted(item.id, previous))
        self._tell_item(item, previous)
        if self.settings.transcription is not None:
            self._transcriber.add(item, self.settings.transcription, answer_follows=answer_follows)

    # ---- the conversation

    def add_item(self, item: Item, previous_item_id: str | None = None) -> None:
        """Raises ConversationError."""
        self._tell_item(item, self._conversation.add(item, previous_item_id))

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

    def _tell_item(self, item: Item, previous: str | None) -> None:
        self._outbox.put(events.ItemAdded(snapshot(item), previous))
        self._outbox.put(events.ItemDone(snapshot(item), previous))

    def _evicted(self, item: Item) -> None:
        self._forget(item)
        self._outbox.put(events.ItemDeleted(item.id))

    def _forget(self, item: Item) -> None:
        self._heard_ms.pop(item.id, None)
        self._left_out.discard(item.id)
        self._transcriber.forget(item)

    # ---- responses

    def create_response(self, wish: ResponseWish) -> None:
        """Raises ResponseRefused where the conversation has one already, RateLimited where too many run beside it."""
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
            raise ResponseRefused("Cancellation failed: there is no active response", code="response_cancel_not_active")
        message = run.spoken_message
        if message is not None:  # what was sent may be played to its end; what was not will never be
            self._heard_ms.setdefault(message.id, self._clock.sent_ms(message.id))
        run.cancel("client_cancelled")

    def answer_item(self, item: Item) -> None:
        """Add what the user says by other means than speech, and answer it in place of an answer that is still being given.

        Raises ConversationError.
        """
        self.add_item(item)
        self.interrupt("client_cancelled")
        self._respond(ResponseWish(settings=self.settings))

    def report_played(self, item_id: str, played_ms: float) -> None:
        """The client has played so much of an answer: of one that was interrupted, just this counts as heard. Of one that is not
        known any more, nothing is changed."""
        played_ms = min(played_ms, self._clock.sent_ms(item_id))
        if item_id in self._heard_ms:
            self._heard_ms[item_id] = played_ms
        else:
            self._clock.played(item_id, played_ms, time.monotonic())

    def clear_output(self) -> None:
        """The client has thrown away what it had not played: what is still being said is cancelled."""
        response_id = None if self._run is None else self._run.id
        self.interrupt("client_cancelled")
        self._outbox.put(events.OutputCleared(response_id))

    def interrupt(self, reason: Reason) -> None:
        """The user speaks, or wants silence: nothing more is said, and what was not heard does not count as said.

        How much was heard is our clock's guess until the client tells what it has played, or truncates the answer itself.
        """
        now = time.monotonic()
        unheard = self._clock.unheard(now)
        message = None if self._run is None else self._run.spoken_message
        if message is not None:
            unheard.setdefault(message.id, self._clock.sent_ms(message.id))
        for item_id, played_ms in unheard.items():
            heard_ms = min(played_ms, self._heard_ms.get(item_id, played_ms))
            if item_id in self._conversation:
                self._heard_ms[item_id] = heard_ms
            self._outbox.put(events.AnswerInterrupted(item_id, heard_ms))
        self._clock.cleared(now)
        self._turn_waits = False
        if self._run is not None:
            self._services.metrics.interrupted()
            self._run.cancel(reason)

    def _respond(self, wish: ResponseWish) -> None:
        request = self._request(wish)
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

    def _request(self, wish: ResponseWish) -> BusRequest:
        items = self._remembered if wish.input is None else wish.input
        return build_request(items, wish.settings, self._services.model, heard_ms=self._heard_ms)

    @property
    def _remembered(self) -> list[Item]:
        """What prompts are made of."""
        return [item for item in self._conversation.items if item.id not in self._left_out]

    def on_too_long(self, run: ResponseRun) -> BusRequest | None:
        """The older half of what was said is left out from now on, so that the next turns need not try again; not what instructs."""
        said = [item for item in self._remembered if item.role != "system" and item.status != "in_progress"]
        if run.wish.input is not None or len(said) < 2:
            return None
        self._left_out.update(item.id for item in said[: (len(said) + 1) // 2])
        return self._request(run.wish)

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
        items = self._remembered
        if samples:
            items.append(Item.message("user", [InputAudio(self._audio.read(samples))]))
        if not items:
            return None
        return build_request(items, self.settings, self._services.model, prepare=True, heard_ms=self._heard_ms)
