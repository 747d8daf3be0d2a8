"""What the user said, in writing: from the answer's own recogniser where the pipeline has one, else asked for behind the answer.

Never in the way of an answer: what is still to be written down waits until the first audio of a spoken answer has left, or the first
words of one in text, and a transcription that runs when another answer begins is broken off and begun again later, unless some of it
has been told. Its requests are interactive all the same: in a full queue one of priority `batch` gives way, and would fail.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable

from omni_bus.api.errors_render import internal_error
from omni_bus.api.recognition import recognition_request
from omni_bus.api.voice.events import InputTranscriptDelta, InputTranscriptDone, InputTranscriptFailed
from omni_bus.api.voice.items import InputAudio, Item
from omni_bus.api.voice.outbox import Outbox
from omni_bus.api.voice.prompt import audio_tensor
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.settings import Transcription
from omni_bus.errors import Cancelled, OmniBusError
from omni_bus.payloads import InputTranscript, TextDelta, TranscriptWish

log = logging.getLogger("omni_bus.api")

GRACE_S = 1.0  # for an answer to be asked for, behind audio that was committed by hand


class Transcriber:
    """One session's audio that is to be written down, one piece at a time, oldest first. affinity: that of the session's answers."""

    def __init__(self, services: VoiceServices, outbox: Outbox, label: str, *, affinity: str) -> None:
        self._services = services
        self._outbox = outbox
        self._label = label
        self._affinity = affinity
        self._waiting: collections.deque[tuple[Item, int, Transcription]] = collections.deque()
        self._answering = False
        self._told = False  # some of the running transcript
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def writing(self) -> bool:
        """Something is being written down, or waits for it."""
        return self._task is not None or bool(self._waiting)

    def add(self, item: Item, wish: Transcription, *, answer_follows: bool) -> None:
        """Every piece of audio in that item. answer_follows: a response will begin at once."""
        for index, part in enumerate(item.content):
            if isinstance(part, InputAudio) and part.transcript is None:
                self._waiting.append((item, index, wish))
        if not self._answering and not answer_follows:
            self._later(self._go)

    def heard(self, item: Item, index: int, text: str) -> None:
        """The recogniser of an answer heard it: told, if it was waited for."""
        part = item.content[index]
        assert isinstance(part, InputAudio)
        part.transcript = text
        for waiting in self._waiting:
            if waiting[0] is item and waiting[1] == index:
                self._waiting.remove(waiting)
                if text:
                    self._outbox.put(InputTranscriptDelta(item.id, index, text))
                self._outbox.put(InputTranscriptDone(item.id, index, text, part.duration_ms / 1000))
                return

    def forget(self, item: Item) -> None:
        """The item is no longer part of the conversation."""
        if self._task is not None and self._waiting and self._waiting[0][0] is item:
            self._task.cancel()
        self._waiting = collections.deque(waiting for waiting in self._waiting if waiting[0] is not item)

    def answer_begins(self) -> None:
        self._answering = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and not self._told:
            self._task.cancel()

    def answer_has_begun(self) -> None:
        """Its first audio, or the first output of one that does not speak, is on its way; or it has ended."""
        self._answering = False
        self._go()

    async def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _later(self, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(GRACE_S, call)

    def _go(self) -> None:
        if self._waiting and not self._answering and self._task is None:
            self._task = asyncio.create_task(self._write())
            self._task.add_done_callback(self._ended)  # no `finally` runs in a task that is cancelled before its first step

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._task = None
        self._told = False
        if self._waiting and not self._answering:
            self._later(self._go)

    async def _write(self) -> None:
        while await self._may_ask():
            self._told = False
            item, index, wish = self._waiting[0]
            await self._one(item, index, wish)
            if self._waiting and self._waiting[0][:2] == (item, index):
                self._waiting.popleft()

    async def _may_ask(self) -> bool:
        """Once the client has been sent all that was put: the answer's first audio, and what was written down before."""
        await self._outbox.drained()
        return bool(self._waiting) and not self._answering

    async def _one(self, item: Item, index: int, wish: Transcription) -> None:
        part = item.content[index]
        assert isinstance(part, InputAudio)
        try:
            await self._ask(item, index, part, wish)
        except Cancelled as error:
            self._outbox.put(InputTranscriptFailed(item.id, index, error))
        except OmniBusError as error:
            self._services.metrics.failed(error.code)
            self._outbox.put(InputTranscriptFailed(item.id, index, error))
        except Exception:
            log.exception("a transcription failed inside the server")
            self._outbox.put(InputTranscriptFailed(item.id, index, internal_error()))

    async def _ask(self, item: Item, index: int, part: InputAudio, wish: Transcription) -> None:
        seconds = part.duration_ms / 1000
        payload, options = recognition_request(
            self._services.model.pipeline,
            TranscriptWish(language=wish.language, prompt=wish.prompt),
            seconds,
            affinity=self._affinity,
        )
        stream = await self._services.bus.submit(
            options=options,
            payload=payload,
            tensors={"media0": audio_tensor(part.pcm16k)},
            deadline_s=self._services.config.deadline_s,
            label=self._label,
        )
        text = ""
        try:
            async for piece in stream:
                match piece.payload:
                    case TextDelta(delta):
                        pass
                    case InputTranscript(heard):
                        delta = f" {heard}" if heard and text else heard
                    case other:
                        raise TypeError(f"no piece of a transcript: {type(other).__name__}")
                delta = delta if text else delta.lstrip()
                if delta:
                    text += delta
                    self._told = True
                    self._outbox.put(InputTranscriptDelta(item.id, index, delta))
                    await self._outbox.drained()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stream.cancel()
        part.transcript = text.rstrip()
        counted = stream.usage.get(self._services.model.pipeline.text_stage, {})
        self._outbox.put(
            InputTranscriptDone(
                item.id, index, text.rstrip(), seconds, counted.get("prompt_tokens"), counted.get("completion_tokens")
            )
        )
