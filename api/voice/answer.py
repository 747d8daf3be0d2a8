"""An answer as it comes from the bus, text and audio side by side, to output items that come one after the other.

Text is told at once. Audio waits, unconsumed, until there is room in the client's lead: so credits hold the stages back. Where functions
may be called, audio waits for text that is no call, since what was said cannot be unsaid; and a call that follows words waits until
they have been spoken, so that the response ends soon behind it and its result can be answered.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from omni_bus.api.bus import Item as BusItem
from omni_bus.api.voice.items import Item, OutputAudio
from omni_bus.api.voice.output import PART, ResponseOutput
from omni_bus.api.voice.speech import PacedSpeech
from omni_bus.api.voice.tool_calls import ArgumentsPiece, CallDone, CallNamed, CallStarted, Piece, TextPiece, ToolCallReader
from omni_bus.payloads import AudioDelta


class Enough(Exception):
    """Nobody wants more of this answer, though the stages may go on."""


class Answer:
    """used: an item of audio has been used up. begun: called before the first output item is opened."""

    def __init__(
        self,
        output: ResponseOutput,
        speech: PacedSpeech | None,
        *,
        may_call: bool,
        begun: Callable[[], None],
        used: Callable[[BusItem], None],
    ) -> None:
        """speech: None for an answer of text alone."""
        self._output = output
        self._speech = speech
        self._reader = ToolCallReader() if may_call else None
        self._begun = begun
        self._used = used
        self._blank = ""  # text of blanks only, which may stand before a call or before words
        self._later: list[Piece] = []  # what follows the open message, once it has been spoken
        self._words_end: int | None = None  # characters of the spoken message that come before a call
        self._mute = speech is None  # no more audio is sent
        self._audio: collections.deque[BusItem] = collections.deque()
        self._audio_ended = self._text_ended = False
        self._more = asyncio.Event()  # audio, or leave to send it, or its end
        self._stopped = False

    def stop(self) -> None:
        """Nothing more is told from now on. A task that is cancelled may still take a step before it hears of it."""
        self._stopped = True

    # ---- text

    def text(self, text: str, *, ended: bool) -> None:
        """More of what the model writes; ended: nothing follows."""
        if self._reader is None:
            pieces: list[Piece] = [TextPiece(text)] if text else []
        else:
            pieces = list(self._reader.feed(text)) if text else []
            if ended and not self._text_ended:
                pieces += self._reader.end()
        self._text_ended = self._text_ended or ended
        for piece in pieces:
            self._piece(piece)

    def _piece(self, piece: Piece) -> None:
        if self._stopped:
            raise Enough
        if self._later:
            self._later.append(piece)
            return
        output = self._output
        match piece:
            case TextPiece(text):
                self._words(text)
            case CallStarted():
                self._blank = ""
                message = output.message
                if message is not None and not self._mute:
                    self._later.append(piece)
                    self._words_end = _length(message)
                else:
                    if message is not None:
                        output.close_message("completed")
                    self._mute = True
                self._more.set()
            case CallNamed(name):
                self._begun()
                output.open_call(name)
            case ArgumentsPiece(text):
                output.arguments(text)
            case CallDone(_, arguments, ok):
                output.close_call(arguments, "completed" if ok else "incomplete")

    def _words(self, text: str) -> None:
        if self._output.message is None:
            text = self._blank + text
            if self._reader is not None and not text.strip():
                self._blank = text
                return
            self._blank = ""
            self._open_message()
        self._output.text(text)

    def _open_message(self) -> None:
        self._begun()
        self._output.open_message()
        self._more.set()

    # ---- audio

    def audio(self, item: BusItem) -> None:
        """More of what the model says."""
        if self._mute:
            self._used(item)
        else:
            self._audio.append(item)
            self._more.set()

    def end(self) -> None:
        """The stream has ended: no text and no audio follow."""
        if not self._text_ended:
            self.text("", ended=True)
        self._audio_ended = True
        self._more.set()

    def leave_if_enough(self) -> None:
        """Raises Enough where only audio could still come that nobody is to hear: of calls."""
        if self._speech is not None and self._mute and self._text_ended and not self._later:
            raise Enough

    async def speak(self) -> None:
        """Sends the audio as it comes, paced, and then tells whatever had to wait for it; returns when all has been said."""
        if self._speech is None:
            return
        while True:
            while self._audio and self._may_speak:
                item = self._audio.popleft()
                self._mute = self._mute or self._is_past_words(item)
                if not self._mute and "pcm" in item.tensors:
                    assert isinstance(item.payload, AudioDelta)
                    await self._speech.send(item.tensors["pcm"].data, item.payload.sample_rate, item.payload.spoken)
                self._used(item)
            if self._mute:
                self._go_on()
                self.leave_if_enough()
            if self._audio_ended and not self._audio:
                break
            self._more.clear()
            await self._more.wait()
        if not self._mute:
            await self._speech.flush()
        self._go_on()

    def sent(self, data: bytes, duration_ms: float, spoken: int | None) -> Item:
        """This much is about to leave: told as a part of the message, which is returned."""
        if self._stopped:
            raise Enough
        if self._output.message is None:
            self._open_message()
        message = self._output.message
        assert message is not None
        self._output.audio(data, duration_ms, spoken)
        return message

    @property
    def _may_speak(self) -> bool:
        return self._mute or self._reader is None or self._output.message is not None or self._audio_ended

    def _is_past_words(self, item: BusItem) -> bool:
        """Whether this chunk may speak of a call. A model that does not tell what it speaks of falls silent when a call begins."""
        if self._words_end is None or "pcm" not in item.tensors:
            return False
        assert isinstance(item.payload, AudioDelta)
        return item.payload.spoken is None or item.payload.spoken > self._words_end

    def _go_on(self) -> None:
        """The open message has been spoken as far as it will be: go on with what came behind it."""
        if not self._later:
            return
        self._mute = True
        if self._output.message is not None:
            self._output.close_message("completed")
        later, self._later = self._later, []
        for piece in later:
            self._piece(piece)


def _length(message: Item) -> int:
    part = message.content[PART]
    return len(part.transcript) if isinstance(part, OutputAudio) else 0
