"""What a voice session is told to do, checked already: an endpoint reads its protocol's form into this."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from omni_bus.api.served import ServedModel
from omni_bus.api.tools import NamedTool, ToolChoice
from omni_bus.api.voice.formats import AudioFormat
from omni_bus.api.voice.items import Item
from omni_bus.api.voice.turn_config import ServerVad, TurnDetection
from omni_bus.sampling import SamplingParams

__all__ = ["NamedTool", "ResponseWish", "SessionSettings", "ToolChoice", "Transcription"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcription:
    """That the user's audio is to be written down. model: the name that the client gave; what writes is the served pipeline."""

    model: str | None = None
    language: str = ""  # ISO 639-1
    prompt: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """speaks: answers with audio and its transcript, else with text alone. tools: as OpenAI's Realtime lists them.

    max_lead_s: of audio that a client has room for ahead of its playback; None: as much as the server sends ahead.
    """

    speaks: bool
    instructions: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    max_output_tokens: int | None = None
    voice: str | None = None
    speed: float = 1.0
    input_format: AudioFormat = "pcm16"
    output_format: AudioFormat = "pcm16"
    max_lead_s: float | None = None
    turn_detection: TurnDetection | None = None
    transcription: Transcription | None = None
    sampling: Mapping[str, SamplingParams] = dataclasses.field(default_factory=dict)  # by stage
    seed: int | None = None

    @classmethod
    def default(cls, model: ServedModel) -> SessionSettings:
        """Speech and turn detection where the model has them."""
        speaks = "audio" in model.pipeline.output_modalities
        return cls(
            speaks=speaks,
            voice=model.voices[0] if speaks and model.voices else None,
            turn_detection=ServerVad() if "audio" in model.pipeline.input_kinds else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseWish:
    """One response that a client asks for. settings: those of the session, with what it says otherwise.

    in_conversation: False for one whose items are kept out of the conversation. input: items that it is given in place of the
    conversation's. fetch: gets what is missing in `input`; raises OmniBusError.
    """

    settings: SessionSettings
    in_conversation: bool = True
    input: tuple[Item, ...] | None = None
    fetch: Callable[[], Awaitable[None]] | None = None
    metadata: Mapping[str, str] | None = None
