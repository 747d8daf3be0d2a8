"""A chat body with functions, calls and results out of their order, and the ChatInput that the API makes of it."""

from __future__ import annotations

import json
from typing import Any

from omni_bus.api.chat_request import parse_chat
from omni_bus.api.served import ServedModel
from omni_bus.payloads import ChatInput
from omni_bus.spec import load_pipeline

CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
        "strict": True,
    },
}
DICE = {"type": "function", "function": {"name": "dice"}}
BODY: dict[str, Any] = {
    "model": "m",
    "tools": [CLOCK, DICE],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"zone":  "UTC"}'}},
                {"id": "b", "type": "function", "function": {"name": "dice", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "6"},
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        {"role": "assistant", "content": "Noon, and a six."},
        {"role": "user", "content": "Again."},
    ],
}


def chat_input(pipeline: str, **fields: Any) -> ChatInput:
    """BODY with `fields`, as the bus gets it."""
    model = ServedModel(name="m", pipeline=load_pipeline(pipeline), voices=(), max_deadline_s=60.0, created=0)
    chat = parse_chat(json.dumps({**BODY, **fields}).encode(), model)
    return ChatInput(chat.messages, chat.tools)
