"""Functions and their calls as a chat template takes them: OpenAI's objects, in which marks stand for all that a client wrote."""

from __future__ import annotations

import json
import re
from typing import Any

from omni_bus.errors import InvalidRequest
from omni_bus.payloads import ToolCall
from omni_bus.stages.qwen3_omni.marked_texts import MarkedTexts

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEEPEST = 64  # nested objects and lists; far more than a function's schema has, far less than Python's stack


def marked_tool(text: str, texts: MarkedTexts) -> dict[str, Any]:
    """A function's description (the JSON of ChatInput.tools). InvalidRequest names `tools` where it is not one."""
    try:
        tool = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("a tool is not valid JSON", param="tools") from None
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise InvalidRequest('a tool must be an object with "type": "function" and a "function" object', param="tools")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest("a tool's function must have a name", param="tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequest("a tool's function.parameters must be a JSON Schema object", param="tools")
    marked: dict[str, Any] = _marked(tool, texts, 0)
    return marked


def marked_call(call: ToolCall, texts: MarkedTexts) -> dict[str, Any]:
    """An earlier call. The arguments go in as the model wrote them, so that the tokens are those it made."""
    arguments = texts.mark_json(call.arguments)
    return {"type": "function", "function": {"name": texts.mark(call.name), "arguments": arguments}}


def _marked(value: Any, texts: MarkedTexts, depth: int) -> Any:
    """A JSON value with marks for its strings, which stand inside quotes when the template has written the value as JSON."""
    if depth > _DEEPEST:
        raise InvalidRequest(f"a tool is nested deeper than {_DEEPEST} levels", param="tools")
    if isinstance(value, str):
        return texts.mark(_inside_quotes(value), field="tools")
    if isinstance(value, list):
        return [_marked(one, texts, depth + 1) for one in value]
    if isinstance(value, dict):
        # Templates look up the keys that they know; those that a client made up may hold anything.
        return {
            key if _PLAIN_KEY.fullmatch(key) else texts.mark(_inside_quotes(key), field="tools"): _marked(one, texts, depth + 1)
            for key, one in value.items()
        }
    return value


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
