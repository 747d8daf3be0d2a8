"""How a pipeline is asked to write down one piece of audio: its recogniser alone, or its language model in words."""

from __future__ import annotations

from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, MediaPart, Message, TextPart, TranscriptWish
from omni_bus.sampling import SamplingParams
from omni_bus.spec import TRANSCRIPT, PipelineSpec

TOKENS_PER_SECOND = 12.0  # of a transcript that a language model writes: far above speech, so that one that runs on still ends
MIN_TOKENS = 64
_AUDIO = MediaPart("audio", 0)
_ASKED = "Write down what is said in this audio, word for word, in the language it is said in. Answer with the words alone."


def recognition_request(
    pipeline: PipelineSpec, wish: TranscriptWish, seconds: float, *, affinity: str = ""
) -> tuple[ChatInput, RequestOptions]:
    """The request; the tensor "media0", to be sent with it, is the audio. seconds: of audio. affinity: as in RequestOptions."""
    if pipeline.transcript_edge is not None:
        options = RequestOptions(modalities=(TRANSCRIPT,), affinity=affinity)
        return ChatInput((Message("user", (_AUDIO,)),), transcript=wish), options
    asked = [_ASKED]
    if wish.language:
        asked.append(f"The language is that of the ISO 639 code {wish.language}.")
    if wish.prompt:
        asked.append(f"These words may help with spelling and style: {wish.prompt}")
    sampling = SamplingParams(temperature=wish.temperature, max_tokens=MIN_TOKENS + int(TOKENS_PER_SECOND * seconds))
    return (
        ChatInput((Message("user", (_AUDIO, TextPart(" ".join(asked)))),)),
        RequestOptions(modalities=("text",), sampling={pipeline.text_stage: sampling}, affinity=affinity),
    )
