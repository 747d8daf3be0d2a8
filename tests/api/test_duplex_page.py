"""docs/duplex.md is the whole protocol: it names every field, control message, event and error, and its bytes are right."""

from __future__ import annotations

import pathlib
import re

import pytest

from omni_bus.api.duplex import client_messages
from omni_bus.api.duplex.client_messages import HelloBody, Kind
from tests.support.duplex_socket import FIELDS

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "duplex.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}")[1].split("\n## ")[0]


@pytest.mark.parametrize("field", HelloBody.__struct_fields__)
def test_every_field_of_the_hello_is_on_the_page(field: str) -> None:
    assert f"`{field}`" in section("Hello")


@pytest.mark.parametrize("name", client_messages._CONTROLS)
def test_every_control_message_is_on_the_page(name: str) -> None:
    assert f'| `"{name}"' in section("Control")


@pytest.mark.parametrize("name", FIELDS)
def test_every_event_and_its_fields_are_on_the_page(name: str) -> None:
    row = next(line for line in section("Events").splitlines() if f'`"{name}"' in line)
    for field in FIELDS[name]:
        assert f'"{field}"' in row


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_is_on_the_page(kind: Kind) -> None:
    assert f"| `{kind:02x}` {kind.name.lower()} |" in section("Messages")


def test_every_code_of_the_protocol_is_on_the_page() -> None:
    files = (ROOT / "api" / "duplex").glob("*.py")
    codes = {code for file in files for code in re.findall(r'code ?= ?"(\w+)"', file.read_text())}
    assert len(codes) > 5
    assert not {code for code in codes if f"`{code}`" not in section("What goes wrong")}


def test_the_bytes_on_the_page_are_what_it_says_they_are() -> None:
    found = re.findall(r"`((?:[0-9a-f]{2} )+[0-9a-f]{2})` is a whole hello, `(.*?)`", PAGE)
    assert [bytes.fromhex(octets) for octets, _ in found] == [b"\0" + text.encode() for _, text in found] != []
