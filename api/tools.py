"""Functions that a model may call, the same for every endpoint: how one is put to it, the choice among them, and the ids of calls."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import msgspec


@dataclasses.dataclass(frozen=True)
class NamedTool:
    """tool_choice: this function."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def must_call(choice: ToolChoice) -> str | None:
    """What asks the model for a call where the client wants one for certain: nothing can force a model's hand."""
    if choice == "required":
        return "Answer by calling one of the functions, with no other words."
    if isinstance(choice, NamedTool):
        return f"Answer by calling the function {choice.name}, with no other words."
    return None


def function_json(function: Mapping[str, Any]) -> str:
    """A function (name, description, parameters) as ChatInput.tools holds it; what is None in it is left out."""
    said = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return msgspec.json.encode({"type": "function", "function": said}).decode()


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
