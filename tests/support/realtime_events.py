"""Server events held to the types of the openai package, which asks more of them by pydantic than by its own parser."""

from __future__ import annotations

import functools
from typing import Any

import pydantic
from openai.types.realtime import RealtimeServerEvent


@functools.cache
def _types() -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(RealtimeServerEvent)


class EventChecker:
    """Called with each event of one session: a type that OpenAI has, fields of OpenAI's types, an id of its own."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def __call__(self, event: dict[str, Any]) -> None:
        try:
            _types().validate_python(event)
        except pydantic.ValidationError as wrong:
            raise AssertionError(f"{event}: {wrong}") from None
        assert event["event_id"] not in self._ids, f"event_id came twice: {event}"
        self._ids.add(event["event_id"])
