"""Items of a conversation: messages, function calls and their outputs, and how each stands in OpenAI's JSON."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Sequence
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from omni_bus.api.tools import new_call_id

SAMPLE_RATE = 16_000  # of the audio that is kept, as the models take it

Kind = Literal["message", "function_call", "function_call_output"]
Role = Literal["system", "user", "assistant"]
Status = Literal["in_progress", "completed", "incomplete"]


@dataclasses.dataclass(slots=True)
class InputText:
    text: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "input_text", "text": self.text}


@dataclasses.dataclass(slots=True, eq=False)
class InputAudio:
    """Audio of the user. pcm16k: float32 [samples], mono, 16 kHz; never written to once it is in a conversation."""

    pcm16k: NDArray[numpy.float32]
    transcript: str | None = None  # what a recogniser heard in it; None as long as none has said

    @property
    def duration_ms(self) -> float:
        return len(self.pcm16k) * 1000 / SAMPLE_RATE

    def to_json(self) -> dict[str, Any]:
        """Without the audio itself, as OpenAI's events have it."""
        return {"type": "input_audio", "transcript": self.transcript}


@dataclasses.dataclass(slots=True)
class InputImage:
    """content: the encoded file as it came."""

    content: bytes | bytearray

    def to_json(self) -> dict[str, Any]:
        return {"type": "input_image", "detail": "auto"}


@dataclasses.dataclass(slots=True)
class OutputText:
    text: str

    def to_json(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text}


@dataclasses.dataclass(slots=True)
class OutputAudio:
    """A spoken answer: its words, and how far the audio given out for them goes. The audio itself is not kept.

    duration_ms: of the audio given to the client so far, as the client plays it.
    marks: (audio_ms, characters): when so much of the audio has been played, so many characters of the transcript have been
    said. Both grow from mark to mark. Empty for a model that does not know.
    truncated: the client has cut it; what arrives later is no longer heard, and so not added.
    """

    transcript: str = ""
    duration_ms: float = 0.0
    marks: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    truncated: bool = False

    def add_text(self, text: str) -> None:
        if not self.truncated:
            self.transcript += text

    def add_audio(self, duration_ms: float, spoken: int | None = None) -> None:
        """spoken: characters of the transcript said at the end of this piece, where the model tells."""
        if self.truncated:
            return
        self.duration_ms += duration_ms
        if spoken is None:
            return
        if len(self.marks) > 1 and self.marks[-1][1] == self.marks[-2][1] == spoken:
            self.marks.pop()  # a pause that goes on: its two ends are enough
        self.marks.append((self.duration_ms, spoken))

    def to_json(self) -> dict[str, Any]:
        return {"type": "output_audio", "transcript": self.transcript}


Part = InputText | InputAudio | InputImage | OutputText | OutputAudio


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Item:
    """One item. id: ours, or the client's own label, which means something in its conversation only."""

    id: str
    kind: Kind
    status: Status = "completed"
    role: Role | None = None  # of a message
    content: list[Part] = dataclasses.field(default_factory=list)  # of a message
    name: str = ""  # of a function_call, as are its arguments: the JSON text of an object
    arguments: str = ""
    call_id: str = ""  # of a function_call and its function_call_output
    output: str = ""  # of a function_call_output

    @classmethod
    def message(
        cls, role: Role, content: Sequence[Part] = (), *, item_id: str | None = None, status: Status = "completed"
    ) -> Item:
        return cls(id=item_id or new_item_id(), kind="message", status=status, role=role, content=list(content))

    @classmethod
    def function_call(
        cls,
        name: str,
        arguments: str = "",
        *,
        call_id: str | None = None,
        item_id: str | None = None,
        status: Status = "completed",
    ) -> Item:
        return cls(
            id=item_id or new_item_id(),
            kind="function_call",
            status=status,
            name=name,
            arguments=arguments,
            call_id=call_id or new_call_id(),
        )

    @classmethod
    def function_call_output(cls, call_id: str, output: str, *, item_id: str | None = None) -> Item:
        return cls(id=item_id or new_item_id(), kind="function_call_output", call_id=call_id, output=output)

    @property
    def audio_s(self) -> float:
        """Seconds of audio that this item keeps."""
        return sum(len(part.pcm16k) for part in self.content if isinstance(part, InputAudio)) / SAMPLE_RATE

    @property
    def other_bytes(self) -> int:
        """Bytes of images, and characters of text, that this item keeps."""
        total = len(self.name) + len(self.arguments) + len(self.output)
        for part in self.content:
            match part:
                case InputImage(content=content):
                    total += len(content)
                case InputText(text=text) | OutputText(text=text) | OutputAudio(transcript=text):
                    total += len(text)
                case InputAudio(transcript=transcript):
                    total += len(transcript or "")
        return total

    def to_json(self) -> dict[str, Any]:
        """The GA protocol's conversation item."""
        shown: dict[str, Any] = {"id": self.id, "object": "realtime.item", "type": self.kind, "status": self.status}
        match self.kind:
            case "message":
                shown |= {"role": self.role, "content": [part.to_json() for part in self.content]}
            case "function_call":
                shown |= {"name": self.name, "call_id": self.call_id, "arguments": self.arguments}
            case "function_call_output":
                shown |= {"call_id": self.call_id, "output": self.output}
        return shown


def new_item_id() -> str:
    return f"item_{secrets.token_hex(12)}"


def whole_ms(duration_ms: float) -> int:
    """Milliseconds as the protocol gives them: a client that has played all of the audio may round up."""
    return math.ceil(duration_ms)
