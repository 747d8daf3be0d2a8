"""What a session and a single response both say of answers: modalities, instructions, tools, limits, voice and format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from omni_bus.api.chat_body import Int32
from omni_bus.api.served import ServedModel
from omni_bus.api.voice.formats import parse_format
from omni_bus.api.voice.settings import NamedTool, SessionSettings, ToolChoice
from omni_bus.errors import InvalidRequest, ModelRefused

MAX_TOOLS = 128
_CHOICES = ("auto", "none", "required")


class _ToolBody(msgspec.Struct):
    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class AnswerBody(msgspec.Struct, kw_only=True):
    output_modalities: list[str] | None = None
    instructions: str | UnsetType | None = UNSET
    tools: list[_ToolBody] | UnsetType | None = UNSET
    tool_choice: Any = None
    max_output_tokens: Int32 | str | None = None


def merge_answer(
    body: AnswerBody, before: SessionSettings, model: ServedModel, where: str, *, voice: object, output_format: object
) -> SessionSettings:
    """`before` with what the body says. Raises InvalidRequest or ModelRefused, naming the field below `where`."""
    changed: dict[str, Any] = {}
    if body.output_modalities is not None:
        changed["speaks"] = _speaks(body.output_modalities, model, f"{where}.output_modalities")
    if not isinstance(body.instructions, UnsetType):
        changed["instructions"] = body.instructions or ""
    if not isinstance(body.tools, UnsetType):
        changed["tools"] = _tools(body.tools or [], f"{where}.tools")
    if body.tool_choice is not None:
        changed["tool_choice"] = _tool_choice(body.tool_choice, f"{where}.tool_choice")
    if body.max_output_tokens is not None:
        changed["max_output_tokens"] = _max_tokens(body.max_output_tokens, f"{where}.max_output_tokens")
    if voice is not None:
        changed["voice"] = _voice(voice, model, f"{where}.audio.output.voice")
    if output_format is not None:
        changed["output_format"] = parse_format(output_format, f"{where}.audio.output.format")
    settings = dataclasses.replace(before, **changed)
    choice = settings.tool_choice
    if isinstance(choice, NamedTool) and choice.name not in {tool["name"] for tool in settings.tools}:
        param = f"{where}.tool_choice"
        raise InvalidRequest(f"{param}: there is no tool of the name {choice.name[:64]!r}", param=param)
    return settings


def tool_choice_to_json(choice: ToolChoice) -> str | dict[str, str]:
    return {"type": "function", "name": choice.name} if isinstance(choice, NamedTool) else choice


def _speaks(modalities: Sequence[str], model: ServedModel, param: str) -> bool:
    if list(modalities) not in (["text"], ["audio"]):
        raise InvalidRequest(f'{param} must be ["audio"], which has a transcript, or ["text"]', param=param)
    if modalities[0] not in model.pipeline.output_modalities:
        raise ModelRefused(f"{param}: this model does not make {modalities[0]}", param=param)
    return modalities[0] == "audio"


def _tools(bodies: Sequence[_ToolBody], param: str) -> tuple[Mapping[str, Any], ...]:
    if len(bodies) > MAX_TOOLS:
        raise InvalidRequest(f"{param} may hold up to {MAX_TOOLS} tools", param=param)
    tools = []
    for index, body in enumerate(bodies):
        where = f"{param}[{index}]"
        if body.type not in (None, "function"):
            raise InvalidRequest(f"{where}.type must be function: this server calls nothing by itself", param=f"{where}.type")
        if not body.name:
            raise InvalidRequest(f"{where}.name is required", param=f"{where}.name")
        tool: dict[str, Any] = {"type": "function", "name": body.name}
        if body.description is not None:
            tool["description"] = body.description
        if body.parameters is not None:
            tool["parameters"] = body.parameters
        tools.append(tool)
    if len({tool["name"] for tool in tools}) < len(tools):
        raise InvalidRequest(f"{param}: two tools have the same name", param=param)
    return tuple(tools)


def _tool_choice(said: object, param: str) -> ToolChoice:
    for choice in _CHOICES:
        if said == choice:
            return choice  # type: ignore[return-value]
    if isinstance(said, dict) and said.get("type") == "function":
        name = said.get("name", (said.get("function") or {}).get("name") if isinstance(said.get("function"), dict) else None)
        if isinstance(name, str) and name:
            return NamedTool(name)
    raise InvalidRequest(f'{param} must be {", ".join(_CHOICES)} or {{"type": "function", "name": …}}', param=param)


def _max_tokens(said: int | str, param: str) -> int | None:
    if said == "inf":
        return None
    if isinstance(said, str) or said < 1:
        raise InvalidRequest(f'{param} must be an integer of at least 1, or "inf"', param=param)
    return said


def _voice(said: object, model: ServedModel, param: str) -> str | None:
    name = said.get("id") if isinstance(said, dict) else said
    if not isinstance(name, str):
        raise InvalidRequest(f"{param} must be a voice's name", param=param)
    return model.voice(name, param)
