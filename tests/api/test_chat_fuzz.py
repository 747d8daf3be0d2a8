"""Random bodies: each is either a request that the bus can carry or a named error, never a fault of the server."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from omni_bus.api.chat_request import parse_chat
from omni_bus.api.served import ServedModel
from omni_bus.errors import OmniBusError
from omni_bus.payloads import ChatInput
from tests.api.conftest import pipeline

MODEL = ServedModel(
    name="scripted",
    pipeline=pipeline(frozenset({"text", "audio", "image", "video"})),
    voices=("Ethan", "chelsie"),
    max_deadline_s=300.0,
    created=0,
)
FULL: dict[str, Any] = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                {"type": "image_url", "image_url": {"url": "data:,a"}},
            ],
        },
    ],
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "wav"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "max_tokens": 5,
    "stop": ["a"],
    "seed": 3,
    "sampling": {"talker": {"top_k": 5, "stop": "b"}},
    "timeout": 5,
}
WITH_CALLS: dict[str, Any] = {
    "model": "scripted",
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "2", "content": "b"},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ],
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}},
        {"type": "function", "function": {"name": "g"}},
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
}
BASES = pytest.mark.parametrize("base", [FULL, WITH_CALLS], ids=["media", "calls"])
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, "", "a", "text", "\x00", "\U0001f600", "{}",
    [], {}, [[]], [None], [{}], {"type": "text"}, {"a": 1}, "wav", "audio", ["text"] * 100, "data:image/png;base64,AAAA",
]  # fmt: skip


def mutated(value: Any, chance: random.Random) -> Any:
    """The same tree with a few nodes replaced, dropped or doubled."""
    if chance.random() < 0.06:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        kept = {key: mutated(item, chance) for key, item in value.items() if chance.random() > 0.02}
        if chance.random() < 0.05:
            kept[chance.choice([*FULL, *WITH_CALLS])] = chance.choice(VALUES)
        return kept
    if isinstance(value, list):
        return [mutated(item, chance) for item in value for _ in range(chance.choice((1,) * 12 + (0, 2)))]
    return value


def attempt(body: bytes) -> bool:
    try:
        chat = parse_chat(body, MODEL)
    except OmniBusError as error:
        assert error.status in (400, 404, 422) and error.message
        error.message.encode()
        return False
    msgspec.msgpack.encode([chat.options, ChatInput(chat.messages, chat.tools), chat.deadline_s])
    return True


@BASES
def test_random_fields(base: dict[str, Any]) -> None:
    chance = random.Random(11)
    good = sum(attempt(json.dumps(mutated(base, chance)).encode()) for _ in range(4000))
    assert 50 < good < 3950, "the mutations reach both sides"


@BASES
def test_random_bytes(base: dict[str, Any]) -> None:
    chance = random.Random(12)
    body = json.dumps(base, ensure_ascii=False).encode()
    for _ in range(4000):
        damaged = bytearray(body)
        for _ in range(chance.randint(1, 4)):
            position = chance.randrange(len(damaged))
            match chance.randrange(3):
                case 0:
                    damaged[position] = chance.randrange(256)
                case 1:
                    del damaged[position : position + chance.randint(1, 9)]
                case _:
                    damaged[position:position] = chance.choice(
                        (b"{", b"[", b'"', b"\\u", b"\\ud83d", b"9" * 30, b"\xf0", b"null", b",")
                    )
        attempt(bytes(damaged))
