"""A conversation item as a client sends it, checked, to an Item."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import msgspec
import numpy
from msgspec import Meta

from omni_bus.api.chat_body import decode_json
from omni_bus.api.media import base64_content, data_url_content
from omni_bus.api.voice.formats import AudioFormat, InputAudioDecoder
from omni_bus.api.voice.items import InputAudio, InputImage, InputText, Item, OutputAudio, OutputText, Part
from omni_bus.errors import InvalidRequest, ModelRefused, UndecodableMedia

Id = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]

# By role: the content types that a message of it may hold.
_CONTENT = {
    "system": ("input_text",),
    "user": ("input_text", "input_audio", "input_image"),
    "assistant": ("output_text", "output_audio"),
}
_TEXT = ("text", "input_text")  # taken as text of any role: stock clients say so, of answers too


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image that is yet to be fetched from `url` into `part`. param: the field that named it."""

    part: InputImage
    url: str
    param: str


class _PartBody(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None


class _MessageBody(msgspec.Struct, tag_field="type", tag="message"):
    role: Literal["system", "user", "assistant"]
    content: list[_PartBody]
    id: Id | None = None


class _CallBody(msgspec.Struct, tag_field="type", tag="function_call"):
    name: Name
    arguments: str
    id: Id | None = None
    call_id: Id | None = None


class _OutputBody(msgspec.Struct, tag_field="type", tag="function_call_output"):
    call_id: Id
    output: str
    id: Id | None = None


class _Body(msgspec.Struct):
    """Just enough to say well what is wrong with `type`."""

    type: str


MAX_PARTS = 256  # of a message: an empty one weighs nothing in what a conversation may hold, and yet takes memory
KINDS = ("message", "function_call", "function_call_output")


def item_from_json(
    raw: bytes | msgspec.Raw,
    *,
    input_format: AudioFormat = "pcm16",
    accepts: frozenset[str] = frozenset({"audio", "image"}),
    where: str = "item",
    remote: list[RemoteImage] | None = None,
) -> Item:
    """raw: JSON of a message, function_call or function_call_output. Audio is base64 in `input_format`, images are data: URLs, or
    http(s) URLs: those are added to `remote`, and refused where it is None.

    Raises InvalidRequest, ModelRefused (a kind of media the pipeline does not take) or UndecodableMedia, naming the field below
    `where`. Fields that are not known are ignored. Minutes of audio take tens of milliseconds: decode those in a thread.
    """
    match decode_json(raw, _Body, where).type:
        case "message":
            message = decode_json(raw, _MessageBody, where)
            if not message.content:
                raise InvalidRequest(f"{where}.content must hold at least one part", param=f"{where}.content")
            if len(message.content) > MAX_PARTS:
                raise InvalidRequest(f"{where}.content may hold up to {MAX_PARTS} parts", param=f"{where}.content")
            content = [
                _part(part, message.role, f"{where}.content[{index}]", input_format, accepts, remote)
                for index, part in enumerate(message.content)
            ]
            return Item.message(message.role, content, item_id=message.id)
        case "function_call":
            call = decode_json(raw, _CallBody, where)
            _check_arguments(call.arguments, f"{where}.arguments")
            return Item.function_call(call.name, call.arguments, call_id=call.call_id, item_id=call.id)
        case "function_call_output":
            answer = decode_json(raw, _OutputBody, where)
            return Item.function_call_output(answer.call_id, answer.output, item_id=answer.id)
        case _:
            raise InvalidRequest(f"{where}.type must be one of {', '.join(KINDS)}", param=f"{where}.type")


def _check_arguments(text: str, param: str) -> None:
    try:
        msgspec.json.decode(text or "{}", type=dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise InvalidRequest(f"{param} must be the JSON text of an object", param=param) from None


def _part(
    body: _PartBody,
    role: str,
    where: str,
    input_format: AudioFormat,
    accepts: frozenset[str],
    remote: list[RemoteImage] | None,
) -> Part:
    if body.type not in _CONTENT[role] and body.type not in _TEXT:
        valid = ", ".join(_CONTENT[role])
        raise InvalidRequest(f"{where}.type of a message of role {role} must be one of {valid}", param=f"{where}.type")
    match body.type:
        case "input_audio":
            return _audio(body, where, input_format, accepts)
        case "input_image":
            return _image(body, where, accepts, remote)
        case "output_audio":
            if body.transcript is None:
                raise InvalidRequest(
                    f"{where}.transcript is required: of an earlier answer, its words are kept", param=f"{where}.transcript"
                )
            return OutputAudio(body.transcript)
    if body.text is None:
        raise InvalidRequest(f"{where}.text is required", param=f"{where}.text")
    return OutputText(body.text) if role == "assistant" else InputText(body.text)


def _audio(body: _PartBody, where: str, input_format: AudioFormat, accepts: frozenset[str]) -> InputAudio:
    """Audio, or the transcript alone of what was said earlier."""
    if not body.audio:
        if body.transcript is None:
            raise InvalidRequest(f"{where}.audio must be base64 and not empty", param=f"{where}.audio")
        return InputAudio(numpy.empty(0, numpy.float32), body.transcript)
    if "audio" not in accepts:
        raise ModelRefused("this model does not take audio; send input_text", param=where)
    content = base64_content(body.audio, f"{where}.audio")
    decoder = InputAudioDecoder(input_format)
    if input_format == "pcm16" and len(content) % 2:
        raise UndecodableMedia(f"{where}.audio: pcm16 has two bytes a sample, but the length is odd", param=f"{where}.audio")
    samples = numpy.concatenate([decoder.push(content), decoder.flush()])
    return InputAudio(samples, body.transcript)


def _image(body: _PartBody, where: str, accepts: frozenset[str], remote: list[RemoteImage] | None) -> InputImage:
    param = f"{where}.image_url"
    if "image" not in accepts:
        raise ModelRefused("this model does not take images", param=where)
    scheme = (body.image_url or "").partition(":")[0].lower()
    if body.image_url is not None and scheme == "data":
        return InputImage(data_url_content(body.image_url, param))
    if body.image_url is not None and scheme in ("http", "https") and remote is not None:
        image = InputImage(b"")
        remote.append(RemoteImage(image, body.image_url, param))
        return image
    also = "" if remote is None else ", or an http(s) URL"
    raise InvalidRequest(f"{param} must be a data: URL, e.g. data:image/png;base64,…{also}", param=param)
