"""docs/realtime.md names every event, error code and limit that the code has, and none that it has not."""

from __future__ import annotations

import pathlib
import re

from omni_bus.api.realtime import client_events
from omni_bus.deployment import ApiConfig

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "realtime.md").read_text()
SOURCES = "".join(path.read_text() for folder in ("voice", "realtime") for path in sorted((ROOT / "api" / folder).glob("*.py")))
RENDERED = (ROOT / "api" / "realtime" / "server_events.py").read_text()


def section(heading: str) -> str:
    return re.split(r"^## ", PAGE.split(f"## {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def test_the_events_of_a_client() -> None:
    named = set(re.findall(r"^\| `([a-z_.]+)[ `]", section("What a client may say").split("### ")[0], re.M))
    assert named == set(client_events._KINDS)


def test_the_events_of_the_server() -> None:
    rendered = set(re.findall(r'return "([a-z_.]+)"', RENDERED)) | {"session.created", "session.updated"}
    named = set(re.findall(r"`([a-z_.]+)`", section("What the server says").strip().split("\n\n")[0]))
    assert named == rendered


def test_the_error_codes() -> None:
    said = {code for code in re.findall(r'code="([a-z_]+)"', SOURCES)} | {"session_idle", "session_expired"}
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert said - named == set()


def test_the_limits() -> None:
    keys = {name for name in ApiConfig.__struct_fields__ if name.startswith(("session_", "max_sessions"))}
    assert keys <= set(re.findall(r"`([a-z_]+)`", section("Limits")))
