"""From a session's settings and items to a request of the bus, and which of the user's audio that request has a recogniser hear."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from omni_bus.api.served import ServedModel
from omni_bus.api.tools import NamedTool, must_call
from omni_bus.api.voice.chat_prompt import to_chat
from omni_bus.api.voice.events import snapshot
from omni_bus.api.voice.items import InputAudio, Item, OutputAudio
from omni_bus.api.voice.settings import SessionSettings
from omni_bus.api.voice.spoken_words import spoken_part
from omni_bus.events import BATCH, INTERACTIVE, RequestOptions
from omni_bus.payloads import ChatInput
from omni_bus.sampling import SamplingParams
from omni_bus.wire import HostTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class BusRequest:
    """heard: the audio parts that travel as audio, in the order in which a recogniser tells what it heard: (item, content index)."""

    payload: ChatInput
    tensors: Mapping[str, HostTensor]
    options: RequestOptions
    heard: tuple[tuple[Item, int], ...] = ()


def active_tools(settings: SessionSettings) -> tuple[Mapping[str, Any], ...]:
    """The functions that an answer may call."""
    if settings.tool_choice == "none":
        return ()
    if isinstance(settings.tool_choice, NamedTool):
        return tuple(tool for tool in settings.tools if tool["name"] == settings.tool_choice.name)
    return settings.tools


def cut_to_heard(items: Sequence[Item], heard_ms: Mapping[str, float]) -> list[Item]:
    """The items, and of answers that were only played up to a time a copy with the words said by then."""
    found = []
    for item in items:
        if item.id in heard_ms:
            finished = item.status == "completed"
            item = snapshot(item)
            for part in item.content:
                if isinstance(part, OutputAudio) and not part.truncated:
                    spoken_part(part, heard_ms[item.id], finished=finished)
        found.append(item)
    return found


def build_request(
    items: Sequence[Item],
    settings: SessionSettings,
    model: ServedModel,
    *,
    prepare: bool = False,
    heard_ms: Mapping[str, float] | None = None,
    affinity: str = "",
) -> BusRequest:
    """prepare: of a request that only does work ahead. heard_ms: item → how much of its audio has been played, where not all.
    affinity: our own id of the conversation, whose requests are to meet what earlier ones left in the stages."""
    pipeline = model.pipeline
    hears = pipeline.transcript_edge is not None
    tools = active_tools(settings)
    payload, tensors = to_chat(
        cut_to_heard(items, heard_ms or {}),
        _instructions(settings, tools),
        tools,
        accepts=pipeline.input_kinds,
        prefer_transcripts=hears,
    )
    sampling = dict(settings.sampling)
    if settings.max_output_tokens is not None:
        said = sampling.get(pipeline.text_stage, SamplingParams())
        sampling[pipeline.text_stage] = said.merged(SamplingParams(max_tokens=settings.max_output_tokens))
    options = RequestOptions(
        modalities=("text", "audio") if settings.speaks and not prepare else ("text",),
        voice=settings.voice if settings.speaks else None,
        seed=settings.seed,
        sampling=sampling,
        prepare=prepare,
        # Work ahead of a turn waits behind all answers, and takes nobody's place in a full queue.
        priority=BATCH if prepare else INTERACTIVE,
        affinity=affinity,
    )
    return BusRequest(payload=payload, tensors=tensors, options=options, heard=_heard(items) if hears else ())


def audio_tensor(samples: NDArray[numpy.float32]) -> HostTensor:
    return HostTensor("float32", (len(samples),), numpy.ascontiguousarray(samples).data.cast("B"))


def _heard(items: Sequence[Item]) -> tuple[tuple[Item, int], ...]:
    return tuple(
        (item, index)
        for item in items
        if item.status != "in_progress"
        for index, part in enumerate(item.content)
        if isinstance(part, InputAudio) and part.transcript is None and len(part.pcm16k)
    )


def _instructions(settings: SessionSettings, tools: Sequence[Mapping[str, Any]]) -> str | None:
    said = [settings.instructions] if settings.instructions else []
    asked = must_call(settings.tool_choice) if tools else None
    if asked is not None:
        said.append(asked)
    return "\n\n".join(said) or None
