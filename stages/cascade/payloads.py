"""What travels between the stages of the cascade; edges to and from the client carry `omni_bus.payloads`."""

from __future__ import annotations

from typing import Literal

import msgspec

from omni_bus.payloads import ToolCall


class Turn(msgspec.Struct, frozen=True):
    """One message of the conversation, speech already written down."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class Prompt(msgspec.Struct, frozen=True):
    """asr → llm: the whole conversation as text, oldest message first; `tools` and `say` as in ChatInput."""

    turns: tuple[Turn, ...]
    tools: tuple[str, ...] = ()
    say: str | None = None


class Clause(msgspec.Struct, frozen=True):
    """llm → tts: the next piece of the answer that can be spoken on its own; the last one may be empty."""

    text: str
