"""Every relative link of the Markdown pages leads to a file of the repository, and to a heading of it where it names one."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", flags=re.MULTILINE)


def pages() -> list[pathlib.Path]:
    """Not those of environments and caches, whose folders begin with a dot."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """What GitHub makes of a page's headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(text)}


def broken(page: pathlib.Path) -> list[str]:
    found = []
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            found.append(target)
    return found


def test_links_lead_somewhere() -> None:
    found = pages()
    assert len(found) >= 12
    assert {str(page.relative_to(ROOT)): links for page in found if (links := broken(page))} == {}


@pytest.mark.parametrize("target", ["nothing.md", "page.md#nowhere", "#nowhere"])
def test_a_link_that_leads_nowhere_is_found(tmp_path: pathlib.Path, target: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n[this](#a-page), [there](https://example.com), [lost]({target})\n")
    assert broken(page) == [target]
