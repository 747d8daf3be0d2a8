"""One voice session: a conversation, the user's turns, and at most one answer at a time, which a turn can interrupt.

Free of sockets and of any protocol's JSON. An endpoint calls a method for each thing that its client asks, and gets everything
that happens as typed events (events.py), in order, through its sink. What a client asks wrongly raises an OmniBusError and changes
nothing; what fails by itself is an event. Every method that is no coroutine is one step: no other task sees half of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from omni_bus.api.errors_render import internal_error
from omni_bus.api.voice import events
from omni_bus.api.voice.arrivals import Arrivals, Fetch
from omni_bus.api.voice.conversation import Conversation, ConversationLimits
from omni_bus.api.voice.events import Reason, SessionEvent, snapshot
from omni_bus.api.voice.history import History
from omni_bus.api.voice.items import InputAudio, Item
from omni_bus.api.voice.kept_audio import audio_of
from omni_bus.api.voice.outbox import Outbox, Sink
from omni_bus.api.voice.prepare import Preparer
from omni_bus.api.voice.prompt import BusRequest, build_request
from omni_bus.api.voice.responses import Responses
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.settings import ResponseWish, SessionSettings
from omni_bus.api.voice.transcription import Transcriber
from omni_bus.api.voice.user_audio import Samples, UserAudio
from omni_bus.errors import InvalidRequest, OmniBusError

log = logging.getLogger("omni_bus.api")


class VoiceSession:
    """`run` is its writer: a task of the endpoint, which ends with the sink's error. `close` when the client is gone."""

    def __init__(self, services: VoiceServices, settings: SessionSettings, sink: Sink, *, label: str = "") -> None:
        config = services.config
        self.id = f"sess_{secrets.token_hex(12)}"
        self.conversation_id = f"conv_{secrets.token_hex(12)}"
        self.settings = settings
        self._services = services
        self._outbox = Outbox(sink)
        limits = ConversationLimits(max_audio_s=max(config.session_history_s, config.session_buffer_s))
        self._conversation = Conversation(limits, evicted=self._evicted)
        self._history = History(self._conversation)
        self._arrivals = Arrivals()
        self._audio = UserAudio(services, self._outbox, self, settings.input_format, settings.turn_detection)
        self._transcriber = Transcriber(services, self._outbox, label, affinity=self.conversation_id)
        self._preparer = Preparer(services, label, self._build_prepared)
        self._responses = Responses(
            services,
            self._outbox,
            self._history,
            self._arrivals,
            self._transcriber,
            self._preparer,
            conversation_id=self.conversation_id,
            label=label,
            ended=self._answer_ended,
        )
        self._turn_waits = False  # a turn has ended, and its answer waits for the one that is being given
        self._closed = False

    @property
    def spoken(self) -> bool:
        """Audio has been given out: the voice stays as it is."""
        return self._responses.spoken

    # ---- the way out

    def tell(self, event: SessionEvent) -> None:
        """An event of the endpoint's own, behind all that has been told."""
        self._outbox.put(event)

    async def run(self) -> None:
        """Hands events to the sink until cancelled; raises what the sink raises."""
        await self._outbox.run()

    async def drained(self) -> None:
        """Until the client has taken what was said to it, and the stages what it has put an end to: to be awaited before its next wish is
        read."""
        await self._outbox.drained()
        await self._responses.settled()

    def busy_until(self, now: float) -> float:
        """Until when it had, or will have, something to do for its client: to answer, to write down, to fetch, or to be played to its
        end. `now` where that is not over yet. Seconds of time.monotonic."""
        if self._responses.running or self._transcriber.writing or len(self._arrivals):
            return max(now, self._responses.heard_until)
        return max(self._outbox.last_put, self._responses.heard_until)

    async def close(self) -> None:
        """Cancel all that is under way, and wait a little for the stages to let go. Nothing more is told."""
        self._closed = True
        self._outbox.close()
        self._audio.close()
        self._responses.drop()
        await asyncio.gather(self._preparer.close(), self._transcriber.close(), self._responses.close(), self._arrivals.close())

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
        return self._responses.own is not None or self._history.clock.lead_s(time.monotonic()) > 0

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
        self._responses.turn_over = time.monotonic() if answered else None
        self._preparer.stop()
        busy = self._responses.own is not None
        self._commit(item_id, samples, answer_follows=answered and not busy)
        if answered and busy:
            self._turn_waits = True
        elif answered:
            self._answer()

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

    def add_unfetched(self, item: Item, previous_item_id: str | None, fetch: Fetch, cause: str | None) -> None:
        """As `add_item`, of an item whose content `fetch` gets: it has its place at once, and is done when it is whole. Where that fails,
        an error with this cause is told, and the item goes.

        Raises ConversationError, and RateLimited where too many are on their way.
        """
        self._arrivals.check_room()
        item.status = "in_progress"
        previous = self._conversation.add(item, previous_item_id)
        self._outbox.put(events.ItemAdded(snapshot(item), previous))
        self._arrivals.begin(item, fetch, lambda error: self._fetched(item, cause, error))

    def _fetched(self, item: Item, cause: str | None, error: Exception | None) -> None:
        try:
            if error is not None:
                raise error
            self._conversation.complete(item)
        except OmniBusError as known:
            self._not_fetched(item, cause, known)
        except Exception:
            log.exception("an item's content could not be fetched for a fault of the server's")
            self._not_fetched(item, cause, internal_error())
        else:
            self._outbox.put(events.ItemDone(snapshot(item), self._conversation.previous_id(item.id)))

    def _not_fetched(self, item: Item, cause: str | None, error: OmniBusError) -> None:
        self._services.metrics.failed(error.code)
        self._outbox.put(events.ErrorRaised(error, cause))
        self.delete_item(item.id)

    def get_item(self, item_id: str) -> Item:
        """Raises ConversationError."""
        return self._conversation.get(item_id)

    async def retrieve_item(self, item_id: str) -> None:
        """With the user's audio in the session's input format, up to MAX_AUDIO_SHOWN bytes. Raises ConversationError."""
        item = self._conversation.get(item_id)
        audio: dict[int, bytes] = {}
        if item.audio_s:
            loop = asyncio.get_running_loop()
            audio = await loop.run_in_executor(self._services.threads, audio_of, item, self.settings.input_format)
        self._outbox.put(events.ItemRetrieved(snapshot(item), audio))

    def delete_item(self, item_id: str) -> None:
        """Raises ConversationError."""
        self._forget(self._conversation.delete(item_id))
        self._outbox.put(events.ItemDeleted(item_id))

    def truncate_item(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """The client has played so much of an answer, and no more. Raises ConversationError."""
        self._history.truncate(item_id, content_index, audio_end_ms)
        self._outbox.put(events.ItemTruncated(item_id, content_index, audio_end_ms))

    def _tell_item(self, item: Item, previous: str | None) -> None:
        self._outbox.put(events.ItemAdded(snapshot(item), previous))
        self._outbox.put(events.ItemDone(snapshot(item), previous))

    def _evicted(self, item: Item) -> None:
        self._forget(item)
        self._outbox.put(events.ItemDeleted(item.id))

    def _forget(self, item: Item) -> None:
        self._history.forget(item)
        self._arrivals.forget(item)
        self._transcriber.forget(item)

    # ---- responses

    def create_response(self, wish: ResponseWish) -> None:
        """Raises ResponseRefused where the conversation has one already, RateLimited where too many run beside it."""
        self._responses.create(wish)
        if wish.in_conversation:
            self._turn_waits = False

    def cancel_response(self, response_id: str | None = None) -> None:
        """The conversation's response, or the one of that id. Raises ResponseRefused where there is none."""
        self._responses.cancel(response_id)

    def answer_item(self, item: Item) -> None:
        """Add what the user says by other means than speech, and answer it in place of an answer that is still being given.

        Raises ConversationError.
        """
        self.add_item(item)
        self.interrupt("client_cancelled")
        self._answer()

    def report_played(self, item_id: str, played_ms: float) -> None:
        """The client has played so much of an answer: of one that was interrupted, just this counts as heard. Of one that is not
        known any more, nothing is changed."""
        self._history.report_played(item_id, played_ms, time.monotonic())

    def clear_output(self) -> None:
        """The client has thrown away what it had not played: what is still being said is cancelled."""
        run = self._responses.own
        self.interrupt("client_cancelled")
        self._outbox.put(events.OutputCleared(None if run is None else run.id))

    def interrupt(self, reason: Reason) -> None:
        """The user speaks, or wants silence: nothing more is said, and what was not heard does not count as said."""
        for item_id, heard_ms in self._history.silenced(self._responses.speaking, time.monotonic()).items():
            self._outbox.put(events.AnswerInterrupted(item_id, heard_ms))
        self._turn_waits = False
        self._responses.interrupt(reason)

    def _answer(self) -> None:
        self._turn_waits = False
        self._responses.begin(ResponseWish(settings=self.settings))

    def _answer_ended(self) -> None:
        if self._turn_waits and not self._closed:
            self._answer()

    # ---- ahead of a turn

    def _build_prepared(self, samples: int) -> BusRequest | None:
        """What the next response would be asked with, if the turn had ended after so many samples."""
        items = self._history.items
        if samples:
            items.append(Item.message("user", [InputAudio(self._audio.read(samples))]))
        elif not self._preparer.has_news(items, self.settings):
            return None
        if not items or any(item in self._arrivals for item in items):
            return None
        return build_request(
            items,
            self.settings,
            self._services.model,
            prepare=True,
            heard_ms=self._history.heard_ms,
            affinity=self.conversation_id,
        )
