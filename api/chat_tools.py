"""The functions of a chat request: which of them its answer may call, and in which words the model is asked for a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from omni_bus.api.chat_body import ToolBody
from omni_bus.api.tools import NamedTool, ToolChoice, function_json, must_call
from omni_bus.api.voice.call_object import MAX_NAME
from omni_bus.errors import InvalidRequest

MAX_TOOLS = 128
_CHOICES = ("none", "auto", "required")


@dataclasses.dataclass(frozen=True)
class Functions:
    """on_offer: as ChatInput.tools has them; empty: the answer calls nothing. asked: what the model is told beside them."""

    on_offer: tuple[str, ...] = ()
    asked: str | None = None


def parse_functions(tools: Sequence[ToolBody] | None, tool_choice: object) -> Functions:
    """Raises InvalidRequest, naming the field."""
    by_name = _by_name(tools or ())
    choice = _choice(tool_choice)
    if choice == "none":
        return Functions()
    if choice == "required" and not by_name:
        raise InvalidRequest("tool_choice is required, but there are no tools to call", param="tool_choice")
    if isinstance(choice, NamedTool):
        if choice.name not in by_name:
            raise InvalidRequest(f"tool_choice: there is no tool of the name {choice.name[:64]!r}", param="tool_choice")
        by_name = {choice.name: by_name[choice.name]}
    return Functions(tuple(by_name.values()), must_call(choice))


def _by_name(tools: Sequence[ToolBody]) -> dict[str, str]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools may hold up to {MAX_TOOLS} functions", param="tools")
    by_name: dict[str, str] = {}
    for index, tool in enumerate(tools):
        function, where = tool.function, f"tools[{index}].function.name"
        if not 0 < len(function.name) <= MAX_NAME:  # a longer one could not be read out of an answer
            raise InvalidRequest(f"{where} must have 1 to {MAX_NAME} characters", param=where)
        if function.name in by_name:
            raise InvalidRequest(f"{where}: two tools have the same name", param=where)
        by_name[function.name] = function_json(msgspec.structs.asdict(function))
    return by_name


def _choice(said: object) -> ToolChoice:
    if said is None:
        return "auto"
    for choice in _CHOICES:
        if said == choice:
            return choice  # type: ignore[return-value]
    if isinstance(said, dict) and said.get("type") == "function":
        function = said.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return NamedTool(name)
    raise InvalidRequest(
        f'tool_choice must be {", ".join(_CHOICES)} or {{"type": "function", "function": {{"name": …}}}}', param="tool_choice"
    )
