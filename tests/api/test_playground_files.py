"""The page's files as the API serves them: types, caching, a policy that lets nothing in from elsewhere, and no key needed."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from omni_bus.api.playground import files

FOLDER = pathlib.Path(files.__file__).parent
SOURCES = {path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")}


def directives(policy: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.strip().partition(" ") for part in policy.split(";"))}


async def test_the_page_and_each_of_its_files_are_served(server: Any) -> None:
    assert set(files.PATHS.values()) == set(SOURCES)
    for path, name in files.PATHS.items():
        async with server.http.get(f"{server.url}{path}") as answer:
            assert answer.status == 200 and await answer.text() == SOURCES[name]
            kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.split(".")[1]]
            assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
            assert answer.headers["Cache-Control"] == "no-cache"


async def test_nothing_runs_that_is_not_a_file_of_this_origin(server: Any) -> None:
    async with server.http.get(f"{server.url}/") as answer:
        policy = directives(answer.headers["Content-Security-Policy"])
        assert answer.headers["X-Frame-Options"] == "DENY" and answer.headers["X-Content-Type-Options"] == "nosniff"
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'" and policy["base-uri"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "worker-src")} == {"'self'"}
    async with server.http.get(f"{server.url}/v1/models") as answer:
        assert directives(answer.headers["Content-Security-Policy"])["default-src"] == "'none'"


async def test_a_file_that_has_not_changed_is_not_sent_again(server: Any) -> None:
    async with server.http.get(f"{server.url}/playground/main.js") as answer:
        tag = answer.headers["ETag"]
    async with server.http.get(f"{server.url}/playground/main.js", headers={"If-None-Match": tag}) as answer:
        assert (answer.status, await answer.read(), answer.headers["ETag"]) == (304, b"", tag)
        assert answer.headers["Cache-Control"] == "no-cache"
    async with server.http.get(f"{server.url}/playground/main.js", headers={"If-None-Match": '"of another release"'}) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "path", ["/playground", "/playground/", "/playground/files.py", "/playground/..%2fauth.py", "/index.html"]
)
async def test_nothing_else_is_served(server: Any, path: str) -> None:
    async with server.http.get(f"{server.url}{path}") as answer:
        assert answer.status == 404


async def test_the_page_opens_without_a_key_and_shows_nothing_that_needs_one(start: Any, tmp_path: pathlib.Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("sk-only\n")
    server = await start(api_keys_file=str(keys))
    for path in files.PATHS:
        async with server.http.get(f"{server.url}{path}") as answer:
            assert answer.status == 200
    for path in ("/v1/models", "/v1/status", "/playground/files.py"):
        async with server.http.get(f"{server.url}{path}") as answer:
            assert answer.status == 401


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_file_names_another_address(name: str) -> None:
    addresses = set(
        re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"^\s*//.*$", "", SOURCES[name], flags=re.M))
    )
    assert addresses <= {"http://www.w3.org/2000/svg", "//www.w3.org/2000/svg"}


def test_nothing_in_the_page_is_inline() -> None:
    page = SOURCES["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert all('src="' in tag for tag in re.findall(r"<script[^>]*>", page))
