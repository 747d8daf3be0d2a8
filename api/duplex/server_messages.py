"""A voice session's events as a duplex client gets them: audio and text as they are, the rest as small events in JSON."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from omni_bus.api.duplex.client_messages import Kind
from omni_bus.api.errors_render import error_body
from omni_bus.api.voice import events
from omni_bus.api.voice.events import ResponseState, SessionEvent
from omni_bus.api.voice.pacing import KEPT
from omni_bus.errors import OmniBusError

# Of what a thin client need not know: it holds no items, calls no functions and knows the ends of parts by the answer's end.
_UNTOLD = (
    events.ItemAdded,
    events.ItemDone,
    events.ItemRetrieved,
    events.ItemTruncated,
    events.ItemDeleted,
    events.UserIdle,
    events.InputCommitted,
    events.InputCleared,
    events.InputTranscriptDelta,
    events.OutputItemDone,
    events.PartAdded,
    events.PartDone,
    events.OutputTextDone,
    events.OutputTranscriptDone,
    events.OutputAudioDone,
    events.CallArgumentsDelta,
    events.CallArgumentsDone,
    events.OutputCleared,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Told(SessionEvent):
    """Something that this protocol alone says."""

    kind: Kind
    fields: dict[str, Any]


def message(kind: Kind, body: bytes) -> bytes:
    return bytes((kind,)) + body


def json_message(kind: Kind, fields: dict[str, Any]) -> bytes:
    return message(kind, msgspec.json.encode(fields))


def event_message(name: str, **fields: Any) -> bytes:
    return json_message(Kind.EVENT, {"type": name, **fields})


def error_message(error: OmniBusError) -> bytes:
    shown = error_body(error)["error"]
    return event_message("error", code=shown["code"], message=shown["message"])


class ServerMessages:
    """One client's. captions, audio_bytes: of DuplexSettings."""

    def __init__(self) -> None:
        self.captions = True
        self.audio_bytes = 4_800
        self.sounding: str | None = None  # the item whose audio was sent last
        self._answers: dict[str, str] = {}  # item → answer, of the last few
        self._interrupted: collections.deque[str] = collections.deque(maxlen=KEPT)  # answers, of the last few

    def item_of(self, answer_id: str) -> str | None:
        """What an answer says, where it is one of the last few."""
        return next((item for item, answer in self._answers.items() if answer == answer_id), None)

    def render(self, event: SessionEvent) -> Iterator[bytes]:
        match event:
            case events.OutputAudioDelta(item_id=item_id, data=data):
                self.sounding = item_id
                for start in range(0, len(data), self.audio_bytes):
                    yield message(Kind.AUDIO, data[start : start + self.audio_bytes])
            case events.OutputTranscriptDelta(delta=delta):
                if self.captions:
                    yield message(Kind.TEXT, delta.encode())
            case events.OutputTextDelta(delta=delta):
                yield message(Kind.TEXT, delta.encode())
            case events.UserSpeechStarted(audio_start_ms=ms):
                yield event_message("speech_started", ms=ms)
            case events.UserSpeechStopped(audio_end_ms=ms):
                yield event_message("speech_stopped", ms=ms)
            case events.InputTranscriptDone(transcript=text):
                yield event_message("transcript", text=text)
            case events.ResponseCreated(response):
                yield event_message("answer_started", id=response.id)
            case events.OutputItemAdded(response_id, _, item):
                if item.kind == "message":  # a call is neither heard nor silenced
                    self._answers[item.id] = response_id
                while len(self._answers) > KEPT:
                    del self._answers[next(iter(self._answers))]
            case events.AnswerInterrupted(item_id, played_ms):
                answer = self._answers.get(item_id)
                if answer is not None:
                    self._interrupted.append(answer)
                yield event_message("interrupted", id=answer, played_ms=round(played_ms))
            case events.ResponseDone(response):
                yield from self._done(response)
            case events.InputTranscriptFailed(error=error) | events.ErrorRaised(error=error):
                yield error_message(error)
            case Told(kind, fields):
                yield json_message(kind, fields)
            case other if not isinstance(other, _UNTOLD):
                raise TypeError(f"no message for {type(other).__name__}")

    def _done(self, response: ResponseState) -> Iterator[bytes]:
        if response.status == "cancelled" and response.id not in self._interrupted:
            yield event_message("interrupted", id=response.id, played_ms=0)  # before its first sound
        if response.error is not None:
            yield error_message(response.error)
        usage = response.usage
        assert usage is not None
        yield event_message(
            "answer_done",
            id=response.id,
            status=response.status,
            reason=response.reason if response.error is None else response.error.code,
            usage={"input_tokens": usage.input, "cached_tokens": usage.cached, "output_tokens": usage.output},
        )
