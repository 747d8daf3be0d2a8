"""OpenAI's chat request as it stands in JSON: the fields that are read, their types, and how a wrong one is named.

Fields that are not declared here are ignored, as OpenAI-compatible servers do; a declared one of a wrong type is refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from omni_bus.errors import InvalidRequest
from omni_bus.sampling import SamplingParams

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Priority = Literal["interactive", "batch"]  # of a request, where it has to wait
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class SamplingBody(msgspec.Struct, kw_only=True):
    """One stage's sampling; at the top level of a request, the text stage's."""

    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[TokenId, ...] | None = None
    ignore_eos: bool | None = None
    seed: Int64 | None = None

    def params(self) -> SamplingParams:
        fields = {name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        if isinstance(self.stop, str):
            fields["stop"] = (self.stop,)
        return SamplingParams(**fields)


class TextBody(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class InputAudio(msgspec.Struct):
    data: str  # base64
    format: str | None = None  # only pcm16 has to be said: the others say themselves what they are


class InputAudioBody(msgspec.Struct, tag_field="type", tag="input_audio"):
    input_audio: InputAudio


class Url(msgspec.Struct):
    url: str


class AudioUrlBody(msgspec.Struct, tag_field="type", tag="audio_url"):
    audio_url: Url


class ImageUrlBody(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: Url


class VideoUrlBody(msgspec.Struct, tag_field="type", tag="video_url"):
    video_url: Url


PartBody = TextBody | InputAudioBody | AudioUrlBody | ImageUrlBody | VideoUrlBody


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str  # the JSON text of an object


class ToolCallBody(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class MessageBody(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[PartBody] | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None


class FunctionBody(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # read for its type alone: nothing here holds a model to a schema


class ToolBody(msgspec.Struct):
    type: Literal["function"]
    function: FunctionBody


class VoiceBody(msgspec.Struct):
    id: str


class AudioBody(msgspec.Struct):
    voice: str | VoiceBody | None = None
    format: str | None = None


class StreamOptionsBody(msgspec.Struct):
    include_usage: bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    model: str
    messages: list[MessageBody]
    modalities: list[str] | None = None
    audio: AudioBody | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    n: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    sampling: dict[str, msgspec.Raw] | None = None
    sampling_params_list: list[msgspec.Raw] | None = None
    timeout: float | None = None
    priority: Priority | None = None


BodyT = TypeVar("BodyT")

_VALID = (  # the end of a field's path → its values
    (re.compile(r"\b(tools|tool_calls)\[\d+\]\.type$"), "function"),
    (re.compile(r"^priority$"), "interactive, batch"),
    (re.compile(r"\brole$"), "system, developer, user, assistant, tool"),
    (re.compile(r"\btype$"), "text, input_audio, audio_url, image_url, video_url"),
)
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*)`")


def decode_json(body: bytes | bytearray | msgspec.Raw, kind: type[BodyT], where: str = "") -> BodyT:
    """JSON to `kind`; InvalidRequest whose param is the path of the first field that does not fit, below `where`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), where) from None
    except RecursionError:
        raise InvalidRequest("the JSON is nested too deeply", param=where or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body must be one JSON object in UTF-8: {error}", param=where or None) from None


def _named(message: str, where: str) -> InvalidRequest:
    """msgspec's sentence with the field in front instead of behind."""
    parts = _AT.match(message)
    assert parts is not None
    what, path = parts["what"][:200], (parts["path"] or "").lstrip(".")
    missing = _MISSING.search(what)
    if missing:
        path, what = f"{path}.{missing[1]}".lstrip("."), "is required"
    elif (valid := next((values for field, values in _VALID if field.search(path)), None)) is not None:
        what += f" (valid: {valid})"
    param = ".".join(name for name in (where, path) if name)
    what = what[0].lower() + what[1:]
    return InvalidRequest(f"{param}: {what}" if param else f"the body: {what}", param=param or None)
