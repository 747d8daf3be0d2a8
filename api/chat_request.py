"""A chat request checked against the served model: what goes to the bus, and what the answer has to look like."""

from __future__ import annotations

import dataclasses

import msgspec

from omni_bus.api.chat_body import ChatBody, SamplingBody, VoiceBody, decode_json
from omni_bus.api.chat_messages import parse_messages
from omni_bus.api.chat_tools import parse_functions
from omni_bus.api.media import MediaSource
from omni_bus.api.served import ServedModel
from omni_bus.api.submission import deadline_s
from omni_bus.errors import InvalidRequest
from omni_bus.events import RequestOptions
from omni_bus.names import did_you_mean
from omni_bus.payloads import Message
from omni_bus.sampling import SamplingParams

MODALITIES = ("text", "audio", "image", "video")  # in the order in which they are passed on
STREAM_FORMATS = ("pcm16", "wav")
WHOLE_FORMATS = ("wav", "pcm16", "mp3", "opus", "flac", "aac")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """tools: as in ChatInput. may_call: the answer's text is read for calls of them; one_call: for one at most."""

    model: str
    messages: tuple[Message, ...]
    media: tuple[MediaSource, ...]  # media[i] is what MediaPart(index=i) speaks of
    tools: tuple[str, ...]
    may_call: bool
    one_call: bool
    options: RequestOptions
    stream: bool
    include_usage: bool
    audio_format: str
    deadline_s: float
    priority: str | None  # None: not said


def parse_chat(body: bytes | bytearray, model: ServedModel, timeout_header: str | None = None) -> ChatRequest:
    """InvalidRequest (400), NotFound (404, another model) or ModelRefused (422), each naming the field."""
    chat = decode_json(body, ChatBody)
    model.check_name(chat.model)
    if chat.n not in (None, 1):
        raise InvalidRequest("n must be 1: one answer for each request", param="n")
    stream = chat.stream is True
    if chat.stream_options is not None and not stream:
        raise InvalidRequest("stream_options may only be given with stream = true", param="stream_options")
    modalities = _modalities(chat.modalities, model)
    functions = parse_functions(chat.tools, chat.tool_choice)
    messages, media = parse_messages(chat.messages, functions.asked, model)
    return ChatRequest(
        model=chat.model,
        messages=messages,
        media=media,
        tools=functions.on_offer,
        may_call=bool(functions.on_offer),
        one_call=chat.parallel_tool_calls is False,
        options=RequestOptions(
            modalities=modalities, voice=_voice(chat, modalities, model), seed=chat.seed, sampling=_sampling(chat, model)
        ),
        stream=stream,
        include_usage=chat.stream_options is not None and chat.stream_options.include_usage is True,
        audio_format=_audio_format(chat, stream),
        deadline_s=deadline_s(chat.timeout, timeout_header, model.max_deadline_s),
        priority=chat.priority,
    )


def _modalities(wanted: list[str] | None, model: ServedModel) -> tuple[str, ...]:
    if wanted is None:
        return ("text",)
    if not wanted:
        raise InvalidRequest('modalities must name at least one output, e.g. ["text"]', param="modalities")
    for name in wanted:
        if name not in MODALITIES:
            raise InvalidRequest(f"modalities: unknown {name[:40]!r}{did_you_mean(name[:40], MODALITIES)}", param="modalities")
    model.check_makes(wanted, "modalities")
    return tuple(name for name in MODALITIES if name in wanted)


def _voice(chat: ChatBody, modalities: tuple[str, ...], model: ServedModel) -> str | None:
    voice = chat.audio.voice if chat.audio is not None else None
    if voice is None or "audio" not in modalities:
        return None
    return model.voice(voice.id if isinstance(voice, VoiceBody) else voice, "audio.voice")


def _audio_format(chat: ChatBody, stream: bool) -> str:
    wanted = chat.audio.format if chat.audio is not None else None
    formats = STREAM_FORMATS if stream else WHOLE_FORMATS
    if wanted is None:
        return formats[0]
    if wanted not in formats:
        kind = "a streamed" if stream else "an unstreamed"
        raise InvalidRequest(f"audio.format of {kind} answer must be one of {', '.join(formats)}", param="audio.format")
    return wanted


def _sampling(chat: ChatBody, model: ServedModel) -> dict[str, SamplingParams]:
    """By stage: the top-level fields for the text stage, under what `sampling` or `sampling_params_list` says."""
    stages = model.generating_stages
    said: dict[str, SamplingParams] = {}
    if chat.sampling is not None and chat.sampling_params_list is not None:
        raise InvalidRequest("give sampling or sampling_params_list, not both", param="sampling_params_list")
    if chat.sampling_params_list is not None:
        if len(chat.sampling_params_list) != len(stages):
            raise InvalidRequest(
                f"sampling_params_list must have one object for each of {', '.join(stages)}, in this order",
                param="sampling_params_list",
            )
        for index, (name, raw) in enumerate(zip(stages, chat.sampling_params_list, strict=True)):
            said[name] = _stage_sampling(
                decode_json(raw, SamplingBody, f"sampling_params_list[{index}]"), f"sampling_params_list[{index}]."
            )
    for name, raw in (chat.sampling or {}).items():
        if name not in stages:
            raise InvalidRequest(
                f"sampling: no generating stage {name[:40]!r}{did_you_mean(name[:40], stages)}", param="sampling"
            )
        said[name] = _stage_sampling(decode_json(raw, SamplingBody, f"sampling.{name}"), f"sampling.{name}.")
    top = _stage_sampling(chat, "")
    if chat.max_completion_tokens is not None:
        if chat.max_completion_tokens < 1:
            raise InvalidRequest("max_completion_tokens must be an integer of at least 1", param="max_completion_tokens")
        top = top.merged(SamplingParams(max_tokens=chat.max_completion_tokens))
    top = msgspec.structs.replace(top, seed=None)  # the request's seed is for every stage: RequestOptions.seed
    text_stage = model.pipeline.text_stage
    merged = top.merged(said.get(text_stage, SamplingParams()))
    if merged != SamplingParams():
        said[text_stage] = merged
    return said


def _stage_sampling(body: SamplingBody, where: str) -> SamplingParams:
    params = body.params()
    params.check(where)
    return params
