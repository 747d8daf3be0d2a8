"""Items of a conversation to the messages, media and tools that a pipeline is asked with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy
from numpy.typing import NDArray

from omni_bus.api.tools import function_json
from omni_bus.api.voice.items import InputAudio, InputImage, InputText, Item, OutputAudio, OutputText, Part
from omni_bus.payloads import ChatInput, MediaPart, Message, TextPart, ToolCall
from omni_bus.wire import HostTensor

SILENCE = 400  # samples at 16 kHz: as many as one frame of a model's features is computed from
HOP = 160  # samples between frames
NO_OUTPUT = "(no output)"  # of a call whose output is an empty text: a message must have words


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
    Left out: what is still in progress, messages without content, calls that broke off in their arguments, outputs of calls that
    are not there. The outputs of calls come right behind them whatever was said in between, as models expect; a call that has no
    output yet stands in a message of its own.
    """
    prompt = _Prompt(accepts, prefer_transcripts)
    if instructions:
        prompt.messages.append(Message("system", (TextPart(instructions),)))
    items = [item for item in items if item.status != "in_progress" and not _broken_off(item)]
    outputs: dict[str, str] = {}
    for item in items:
        if item.kind == "function_call_output":
            outputs.setdefault(item.call_id, item.output)
    position = 0
    while position < len(items):
        run = _answer_run(items, position)
        if run:
            prompt.add_answer(items[position : position + run], outputs)
        else:
            prompt.add_message(items[position])
        position += run or 1
    return ChatInput(tuple(prompt.messages), tuple(chat_tool(tool) for tool in tools)), prompt.media


def chat_tool(tool: Mapping[str, Any]) -> str:
    """A session's tool, or one in OpenAI's chat form, as the JSON text that ChatInput.tools holds."""
    function = tool.get("function")
    return function_json(function if isinstance(function, Mapping) else tool)


def _broken_off(item: Item) -> bool:
    """A call whose arguments are no JSON object: nobody can have carried it out, and templates take objects only."""
    if item.kind != "function_call":
        return False
    try:
        msgspec.json.decode(item.arguments or "{}", type=dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return True
    return False


def _answer_run(items: Sequence[Item], start: int) -> int:
    """How many items from here on are one answer of the assistant: what it said, then its calls; 0 where it calls nothing."""
    calls = start
    if items[start].role == "assistant":
        calls += 1
    end = calls
    while end < len(items) and items[end].kind == "function_call":
        end += 1
    return end - start if end > calls else 0


class _Prompt:
    def __init__(self, accepts: frozenset[str], prefer_transcripts: bool) -> None:
        self.messages: list[Message] = []
        self.media: dict[str, HostTensor] = {}
        self._accepts = accepts
        self._prefer_transcripts = prefer_transcripts

    def add_message(self, item: Item) -> None:
        """A message; an output is no message of its own: it goes with its call."""
        if item.kind != "message":
            return
        assert item.role is not None
        parts = self._parts(item.content)
        if parts:
            self.messages.append(Message(item.role, parts))

    def add_answer(self, run: Sequence[Item], outputs: Mapping[str, str]) -> None:
        said = self._parts(run[0].content)
        calls = {item.call_id: ToolCall(item.name, item.arguments or "{}") for item in run if item.kind == "function_call"}
        answered = {call_id: call for call_id, call in calls.items() if call_id in outputs}
        waiting = tuple(call for call_id, call in calls.items() if call_id not in outputs)
        if said or answered:
            self.messages.append(Message("assistant", said, tuple(answered.values()) or waiting))
        self.messages += [Message("tool", (TextPart(outputs[call_id] or NO_OUTPUT),)) for call_id in answered]
        if waiting and (answered or not said):
            self.messages.append(Message("assistant", (), waiting))

    def _parts(self, content: Sequence[Part]) -> tuple[TextPart | MediaPart, ...]:
        parts: list[TextPart | MediaPart] = []
        for part in content:
            match part:
                case InputText(text=text) | OutputText(text=text) | OutputAudio(transcript=text):
                    _add_text(parts, text)
                case InputAudio(pcm16k=samples, transcript=transcript):
                    known = transcript is not None and (self._prefer_transcripts or not len(samples))
                    if known or "audio" not in self._accepts:
                        _add_text(parts, transcript or "")
                    elif len(samples):
                        samples = _with_silence(samples)
                        data = samples.data.cast("B")
                        parts.append(self._medium(MediaPart("audio", len(self.media)), "float32", len(samples), data))
                case InputImage(content=image):
                    if "image" in self._accepts:
                        parts.append(self._medium(MediaPart("image", len(self.media)), "uint8", len(image), image))
        return tuple(parts)

    def _medium(self, part: MediaPart, dtype: str, count: int, data: bytes | bytearray | memoryview) -> MediaPart:
        self.media[f"media{part.index}"] = HostTensor(dtype, (count,), data)
        return part


def _with_silence(samples: NDArray[numpy.float32]) -> NDArray[numpy.float32]:
    """The samples and a moment of silence, to whole hops. What a model's features show of an audio's end then does not depend on
    which other audio stands in the prompt, so that a stage knows the audio again when the conversation has grown."""
    count = len(samples) + SILENCE
    return numpy.pad(samples, (0, SILENCE - count % -HOP))


def _add_text(parts: list[TextPart | MediaPart], text: str) -> None:
    """Texts side by side become one, a line each unless they bring their own space."""
    text = text if text.strip() else ""
    before = parts[-1] if parts else None
    if not text:
        return
    if isinstance(before, TextPart):
        joint = "" if before.text[-1].isspace() or text[0].isspace() else "\n"
        parts[-1] = TextPart(before.text + joint + text)
    else:
        parts.append(TextPart(text))
