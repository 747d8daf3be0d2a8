"""ARCHITECTURE.md names every source file, and no file that is gone."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def test_every_file_has_its_line() -> None:
    sections = re.split(r"^### `(.+?)/`.*$", TEXT, flags=re.MULTILINE)[1:]
    assert len(sections) >= 20
    for folder, body in zip(sections[::2], sections[1::2], strict=True):
        named = set(re.findall(r"^\| `(\w+\.\w+)` \|", body, flags=re.MULTILINE))
        found = {path.name for path in (ROOT / folder).iterdir() if path.suffix in (".py", ".js", ".css", ".html", ".svg")}
        assert named == found - {"__init__.py"}, folder


def test_every_folder_has_its_section() -> None:
    roots = ("omni_bus", "stages", "workers", "connectors", "api", "bench")
    found = {str(path.parent.relative_to(ROOT)) for root in roots for path in (ROOT / root).glob("**/*.py")}
    folders = {folder for folder in found if not re.match(r"omni_bus/(stages|workers|connectors|api)", folder)}
    assert folders == set(re.findall(r"^### `(.+?)/`", TEXT, flags=re.MULTILINE))
