"""The messages of a chat request as a pipeline reads them: parts, media, and the results of calls right behind their calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from omni_bus.api import chat_body
from omni_bus.api.chat_body import MessageBody
from omni_bus.api.media import MediaSource
from omni_bus.api.served import ServedModel
from omni_bus.errors import InvalidRequest
from omni_bus.payloads import MediaPart, Message, TextPart, ToolCall

MAX_MEDIA = 64  # pieces in one request


def parse_messages(
    bodies: Sequence[MessageBody], asked: str | None, model: ServedModel
) -> tuple[tuple[Message, ...], tuple[MediaSource, ...]]:
    """The messages and what MediaPart(index=i) in them speaks of. asked: words for the end of the system message.

    Raises InvalidRequest (400) or ModelRefused (422), naming the field.
    """
    if not bodies:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    media: list[MediaSource] = []
    messages = [_message(body, f"messages[{number}]", media, model) for number, body in enumerate(bodies)]
    ordered = [messages[number] for number in _reading_order(bodies)]
    return tuple(ordered if asked is None else _with_words(ordered, asked)), tuple(media)


def _message(body: MessageBody, where: str, media: list[MediaSource], model: ServedModel) -> Message:
    content: list[chat_body.PartBody]
    content = [chat_body.TextBody(body.content)] if isinstance(body.content, str) else body.content or []
    where_content = f"{where}.content"
    if not content and body.role != "assistant":
        raise InvalidRequest(f"{where_content} must be a text or a list of parts", param=where_content)
    parts: list[TextPart | MediaPart] = []
    for index, part in enumerate(content):
        if isinstance(part, chat_body.TextBody):
            parts.append(TextPart(part.text))
            continue
        source = _source(part, f"{where_content}[{index}]")
        model.check_takes(source.kind, f"{where_content}[{index}]")
        parts.append(MediaPart(source.kind, len(media)))
        media.append(source)
        if len(media) > MAX_MEDIA:
            raise InvalidRequest(f"a request may hold up to {MAX_MEDIA} pieces of media", param=f"{where_content}[{index}]")
    return Message("system" if body.role == "developer" else body.role, tuple(parts), _calls(body, f"{where}.tool_calls"))


def _source(part: chat_body.PartBody, where: str) -> MediaSource:
    match part:
        case chat_body.InputAudioBody(input_audio):
            return MediaSource.of_base64("audio", input_audio.data, input_audio.format, f"{where}.input_audio")
        case chat_body.AudioUrlBody(address):
            return MediaSource.of_url("audio", address.url, f"{where}.audio_url.url")
        case chat_body.ImageUrlBody(address):
            return MediaSource.of_url("image", address.url, f"{where}.image_url.url")
        case chat_body.VideoUrlBody(address):
            return MediaSource.of_url("video", address.url, f"{where}.video_url.url")
        case chat_body.TextBody():
            raise AssertionError("a text is no media")


# ---- calls and their results


def _calls(body: MessageBody, where: str) -> tuple[ToolCall, ...]:
    if body.tool_calls and body.role != "assistant":
        raise InvalidRequest(f"{where}: only a message of the assistant has calls", param=where)
    return tuple(_call(call.function, f"{where}[{index}].function") for index, call in enumerate(body.tool_calls or ()))


def _call(function: chat_body.CalledFunction, where: str) -> ToolCall:
    if not function.name:
        raise InvalidRequest(f"{where}.name is required", param=f"{where}.name")
    arguments = function.arguments if function.arguments.strip() else "{}"
    try:
        msgspec.json.decode(arguments, type=dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        param = f"{where}.arguments"
        raise InvalidRequest(
            f"{param} must be the JSON text of an object; leave out a call that broke off, and its result", param=param
        ) from None
    return ToolCall(function.name, arguments)


def _reading_order(bodies: Sequence[MessageBody]) -> Iterator[int]:
    """Every position once: those of results in the order of the calls that they answer, which is how a model tells them apart."""
    position = 0
    while position < len(bodies):
        body = bodies[position]
        if body.role == "tool":
            raise _no_such_call(position, body)
        yield position
        calls = {call.id: index for index, call in enumerate(body.tool_calls or ())}
        if len(calls) < len(body.tool_calls or ()):
            raise InvalidRequest(
                f"messages[{position}].tool_calls: two calls have the same id", param=f"messages[{position}].tool_calls"
            )
        end = position + 1
        while calls and end < len(bodies) and bodies[end].role == "tool":
            end += 1
        yield from _results(bodies, position, calls, end)
        position = end


def _results(bodies: Sequence[MessageBody], position: int, calls: dict[str, int], end: int) -> Iterator[int]:
    """Positions of the results that follow the calls of one message. calls: id → place in that message."""
    answered: dict[int, int] = {}
    for number in range(position + 1, end):
        param, call_id = f"messages[{number}].tool_call_id", bodies[number].tool_call_id
        if call_id is None or call_id not in calls:
            raise _no_such_call(number, bodies[number])
        if calls[call_id] in answered:
            raise InvalidRequest(f"{param}: this call has a result already", param=param)
        answered[calls[call_id]] = number
    for index in calls.values():
        if index not in answered:
            param = f"messages[{position}].tool_calls[{index}].id"
            raise InvalidRequest(f"{param}: a message of role tool with this tool_call_id must follow the call", param=param)
        yield answered[index]


def _no_such_call(number: int, body: MessageBody) -> InvalidRequest:
    param = f"messages[{number}].tool_call_id"
    if body.tool_call_id is None:
        return InvalidRequest(f"{param} is required: the id of the call that this is the result of", param=param)
    return InvalidRequest(f"{param}: the message of the assistant before it has no call of this id", param=param)


def _with_words(messages: list[Message], words: str) -> list[Message]:
    """A system message of its own where the conversation has none in front."""
    first = messages[0]
    if first.role != "system":
        return [Message("system", (TextPart(words),)), *messages]
    *parts, last = first.parts
    ending = (TextPart(f"{last.text}\n\n{words}"),) if isinstance(last, TextPart) else (last, TextPart(f"\n\n{words}"))
    return [msgspec.structs.replace(first, parts=(*parts, *ending)), *messages[1:]]
