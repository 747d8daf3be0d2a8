"""Items of a conversation to the messages, media and tools that a pipeline is asked with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omni_bus.api.voice.items import Item
from omni_bus.payloads import ChatInput
from omni_bus.wire import HostTensor


def to_chat(
    items: Sequence[Item],
    instructions: str | None,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    accepts: frozenset[str],
    prefer_transcripts: bool = False,
) -> tuple[ChatInput, dict[str, HostTensor]]:
    """The prompt, and its media as tensors media0, media1, … (audio float32 [samples] 16 kHz; images uint8 [bytes], encoded).

    accepts: the kinds of media that the pipeline takes (`PipelineSpec.input_kinds`); audio that it does not take stands as its
    transcript, if there is one. prefer_transcripts: audio with a transcript stands as that, so that it is not heard again.
    tools: as a session lists them, {"type": "function", "name", "description", "parameters"}.
    Left out: what is still in progress, messages without words, outputs of calls that are not there.
    """
    raise NotImplementedError
