"""What the edges to and from the client carry, the same for every pipeline.

A payload is a msgspec Struct, encoded into the first payload frame of a Chunk; tensors travel beside it as TensorRefs. Edges
between stages carry payloads of the model family's own, declared in its PipelineSpec.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class MediaPart(msgspec.Struct, frozen=True, tag="media"):
    """A piece of media inside a message; its content is the chunk's tensor `media{index}`.

    audio: float32 [samples], mono, 16 kHz, decoded by the API. image, video: uint8 [bytes], the encoded file as it came.
    """

    kind: Literal["audio", "image", "video"]
    index: int


class ToolCall(msgspec.Struct, frozen=True):
    """A function that the assistant called. `arguments`: a JSON object as text, as the model wrote it."""

    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | MediaPart, ...]
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant's message; the answers follow as messages of role "tool", in order


class TranscriptWish(msgspec.Struct, frozen=True):
    """How the recogniser of a pipeline with a `transcript_edge` is to write down a request's audio.

    A transcript that is asked for so leaves in pieces, each as soon as it is heard; joined by spaces they are the whole.
    """

    times: bool = False  # with segments
    words: bool = False  # and with the words of each
    language: str = ""  # ISO 639-1; "" = the recogniser's own choice
    prompt: str = ""  # words and spelling to expect
    temperature: float = 0.0


class ChatInput(msgspec.Struct, frozen=True):
    """client → first stage: the whole conversation, oldest message first.

    tools: functions the answer may call, each the JSON text of OpenAI's `{"type": "function", "function": {name, description,
    parameters}}`. say: the answer itself, word for word: the text stage makes no text of its own, and the rest speaks this one.
    transcript: of a request whose one modality is "transcript".
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    say: str | None = None
    transcript: TranscriptWish | None = None


class TextDelta(msgspec.Struct, frozen=True):
    """stage → client: newly decided text. The last one has `finish_reason`; its text may be empty.

    usage: what the stage has counted by then, as in its Done: of the prompt on the first delta, all of it on the last, so that an answer
    that is broken off has its figures too.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    usage: dict[str, int] = {}


class AudioDelta(msgspec.Struct, frozen=True):
    """stage → client: tensor `pcm`, int16 [samples], mono, never empty; an empty last delta closes the edge without a tensor.

    spoken: characters of the answer's text (all its TextDeltas joined) that have been said when this chunk has been played, where
    the stage knows; it never falls. frames: codec frames that this chunk was made of, where the model has them.
    """

    sample_rate: int
    spoken: int | None = None
    frames: int = 0


class TranscriptWord(msgspec.Struct, frozen=True, array_like=True):
    """One word, with the marks that stand at it, in seconds from the audio's beginning."""

    start_s: float
    end_s: float
    text: str


class TranscriptSegment(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a transcript, in seconds from the audio's beginning, and what the recogniser thinks of it, in Whisper's terms."""

    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_prob: float = 0.0
    words: tuple[TranscriptWord, ...] = ()  # where the request asked for them


class InputTranscript(msgspec.Struct, frozen=True):
    """stage → client: what a speech recogniser heard in one piece of the user's audio; an empty one only closes the edge."""

    text: str
    segments: tuple[TranscriptSegment, ...] = ()  # where the request asked for times
    language: str = ""  # its English name, where the recogniser knows it
